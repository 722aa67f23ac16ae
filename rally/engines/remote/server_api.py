"""What goes over the wire to a rollout server and what must come back; an answer that is not whole is a failed one."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, Literal, NamedTuple, Protocol

from rally.engines.base import ReplicaGone, SampleVoid
from rally.types import FinishReason, Generation, SamplingParams, WeightSpan

TOKEN_VARIABLE = "RALLY_ENGINE_TOKEN"


def sampling_to_wire(params: SamplingParams) -> dict[str, Any]:
    """What differs from the defaults."""
    return {f.name: value for f in fields(params) if (value := getattr(params, f.name)) != f.default}


def generation_to_wire(generation: Generation) -> dict[str, Any]:
    spans = [[span.version, span.start, span.end] for span in generation.spans]
    return {f.name: getattr(generation, f.name) for f in fields(generation)} | {"spans": spans}


InFlight = Literal["abort", "keep", "recompute"]


class IpcExport(Protocol):
    """Weights in the memory of the GPU that this process shares with a server, as each kind of server wants them."""

    def described(self) -> dict[str, Any]: ...

    def serialized(self) -> str: ...


Source = str | IpcExport
"""Where weights are: a folder, or memory."""


class HttpCall(NamedTuple):
    """One request to a server: POST with a JSON body, or GET without one."""

    path: str
    body: Mapping[str, Any] | None = None
    optional: bool = False  # older servers do not know it, and then it is not needed
    wakes: str = ""  # the part of a sleeping server's memory that it brings back; a second time would kill SGLang


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A generation as it was asked for, and the weight versions its server had before and after it."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    before: int
    after: int | None  # None: nobody knows
    salt: str
    """What its cached prefixes are kept under, of one load of weights alone: version 3 of another run is not ours."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a server of our own is started."""

    python: str
    folder: str
    port: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float
    tensor_parallel: int = 1
    frontends: int = 1  # processes that answer HTTP, where a server can have several
    on_cpu: bool = False
    seed: int = 0
    eager: bool = False
    log_level: str | None = None
    raw_logprobs: bool = True  # at temperature 1 those before any filter; otherwise those after the temperature
    in_flight: InFlight = "keep"
    sleeps: bool = False  # it gives its memory to others for a while
    by_handles: bool = False  # it may be given weights in the memory of another process
    extra: Mapping[str, Any]


class ServerApi(Protocol):
    """What one kind of server wants to be asked, and how it answers; nothing here waits or remembers."""

    @property
    def name(self) -> str: ...

    def generate(self, request: Asked) -> HttpCall:
        """The call that samples one continuation."""
        ...

    def generation(self, answer: Any, request: Asked) -> Generation:
        """What was sampled; ReplicaGone where the answer is not whole."""
        ...

    def abort(self, request_id: str) -> HttpCall | None:
        """What frees a request whose caller has gone; None where closing the connection does."""
        ...

    def load(self, source: Source, version: int, in_flight: InFlight) -> tuple[HttpCall, ...]:
        """The calls, in order, after which the server is paused and holds the weights of `source`."""
        ...

    def sleep(self) -> tuple[HttpCall, ...]:
        """What makes an idle server give back the GPU memory of its weights and KV."""
        ...

    def wake(self, source: Source, version: int) -> tuple[HttpCall, ...]:
        """The calls, in order, after which a sleeping one holds the weights of `source`. Nothing was in flight."""
        ...

    def resume(self) -> HttpCall:
        """What makes a paused server go on."""
        ...

    def window(self) -> HttpCall:
        """The call whose answer `window_of` understands."""
        ...

    def window_of(self, answer: Any) -> int | None:
        """The most tokens of one history, if the server says it."""
        ...

    def command(self, launch: Launch) -> list[str]:
        """The command line of a server of our own."""
        ...

    def environment(self, by_handles: bool = False) -> dict[str, str]:
        """What such a server wants beside our own environment."""
        ...

    def headers(self) -> dict[str, str]:
        """What goes with every request."""
        ...


def take(answer: Any, *path: str | int) -> Any:
    """The value at a place inside an answer; ReplicaGone where there is none."""
    for step in path:
        try:
            answer = answer[step]
        except (KeyError, IndexError, TypeError):
            place = ".".join(map(str, path))
            raise ReplicaGone(f"the server's answer has no {place}, so it is not used") from None
    return answer


def whole(
    request: Asked,
    ids: Any,
    logprobs: Any,
    finish: Any,
    *,
    spans: Any = None,
    prompt_tokens: Any = None,
    cached_tokens: Any = None,
    queued_seconds: Any = None,
    first_token_seconds: Any = None,
    sampling_logprobs: Any = None,
) -> Generation:
    """The generation, if everything about it fits together."""
    sampled = _ids(ids, request.params.max_tokens)
    if prompt_tokens is not None and prompt_tokens != len(request.prompt_ids):
        raise ReplicaGone(
            f"the server was given a prompt of {len(request.prompt_ids)} tokens and read {prompt_tokens}; it must take "
            "token ids as they are"
        )
    if finish not in ("stop", "length", "abort"):
        raise ReplicaGone(f"the server ended a request for the unknown reason {finish!r}")
    if not sampled and finish != "abort":
        raise ReplicaGone(f"the server sampled nothing and calls that finished ({finish})")
    reason: FinishReason = finish
    return Generation(
        ids=sampled,
        logprobs=_logprobs(logprobs, len(sampled)),
        finish=reason,
        cached_tokens=cached_tokens if isinstance(cached_tokens, int) else 0,
        spans=_spans(spans, len(sampled), request),
        sampling_logprobs=_logprobs(sampling_logprobs, len(sampled)) if sampling_logprobs else (),
        queued_seconds=_seconds(queued_seconds),
        first_token_seconds=_seconds(first_token_seconds),
    )


def _ids(ids: Any, most: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        raise ReplicaGone("the server's answer holds no list of token ids; it must return ids, not text")
    if len(ids) > most:
        raise ReplicaGone(f"the server sampled {len(ids)} tokens where {most} were asked for")
    return tuple(ids)


def _logprobs(values: Any, count: int) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise ReplicaGone("the server returned no log-probabilities of what it sampled")
    if len(values) != count:
        raise ReplicaGone(f"the server returned {len(values)} log-probabilities for {count} sampled tokens")
    if not set(map(type, values)) <= {int, float} or not all(map(math.isfinite, values)):
        raise ReplicaGone("the server returned a log-probability that is not a number")
    return tuple(map(float, values))


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _spans(reported: Any, count: int, request: Asked) -> tuple[WeightSpan, ...]:
    """Which weights sampled what: as the server says, else by what it had before and after."""
    if count == 0:
        return ()
    if reported:
        return _reported_spans(reported, count)
    if request.before != request.after:
        raise SampleVoid("weights changed while the server sampled, and it does not say where; it is sampled again")
    return (WeightSpan(request.before, 0, count),)


def _reported_spans(reported: Any, count: int) -> tuple[WeightSpan, ...]:
    spans, end = [], 0
    for one in reported:
        label, start, stop = take(one, "version"), take(one, "start"), take(one, "end")
        if not str(label).isdecimal():
            raise ReplicaGone(f"the server samples from weights called {label!r}, which this run never gave it")
        if start != end or stop <= start:
            raise ReplicaGone("the server's weight versions do not cover what it sampled")
        spans.append(WeightSpan(int(label), start, stop))
        end = stop
    if end != count:
        raise ReplicaGone("the server's weight versions do not cover what it sampled")
    return tuple(spans)


def flags(options: Mapping[str, Any], *, negated: bool) -> list[str]:
    """Options as a command line; `negated` where the server knows --no-x for what is switched off."""
    words: list[str] = []
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if value is None or (value is False and not negated):
            continue
        if isinstance(value, bool):
            words.append(flag if value else "--no-" + flag[2:])
        else:
            words += [flag, value if isinstance(value, str) else json.dumps(value)]
    return words


def as_list(ids: Sequence[int]) -> list[int]:
    return list(map(int, ids))
