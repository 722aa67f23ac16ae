"""The interface of a rollout server's HTTP API, and the checks of its responses.

`ServerApi` describes one kind of server (vLLM, SGLang, Rally). An incomplete or inconsistent response raises
ReplicaGone, so it is never used for training.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

import numpy as np

from rally.engines.base import EngineError, ReplicaGone, SampleVoid
from rally.types import ConstrainedSpan, FinishReason, Generation, ImageSpan, Routes, SamplingParams, WeightSpan

TOKEN_VARIABLE = "RALLY_ENGINE_TOKEN"
LAUNCHER = str(Path(__file__).parent / "inside" / "rally_server_launcher.py")
"""Starts a server of another package with the token that the variable holds."""


InFlight = Literal["abort", "keep", "recompute"]


class IpcExport(Protocol):
    """CUDA IPC handles of weights on a GPU that this process shares with a server."""

    def for_vllm(self) -> dict[str, Any]: ...

    def for_sglang(self) -> str: ...


class WeightChain(NamedTuple):
    """Delta files, to be applied in this order to the weights in `folder`; None: to those that the server has."""

    folder: str | None
    deltas: tuple[str, ...]


class WeightBroadcast(NamedTuple):
    """Weights that the trainer is about to broadcast in a group that the server has joined: the name, dtype and shape
    of each, and the size of the buckets into which they are cut."""

    group: str
    weights: tuple[tuple[str, str, tuple[int, ...]], ...]
    bucket_bytes: int


Source = str | IpcExport | WeightChain | WeightBroadcast
"""Where weights are: a folder, GPU memory, deltas in files, or on their way."""


def no_broadcast(server: str) -> EngineError:
    return EngineError(f"{server} cannot join Rally's broadcasts; use rollout.checkpoint_engine.backend=files with it")


def without_deltas(source: Source, server: str) -> str | IpcExport:
    """The source, for a server that loads only whole models."""
    if isinstance(source, WeightBroadcast):
        raise no_broadcast(server)
    if not isinstance(source, WeightChain):
        return source
    if source.deltas or source.folder is None:
        raise EngineError(f"{server} cannot apply weight deltas; use rollout.checkpoint_engine.backend=files with it")
    return source.folder


class HttpCall(NamedTuple):
    """One request to a server: POST with a JSON body, or GET without one."""

    path: str
    body: Mapping[str, Any] | None = None
    optional: bool = False  # older servers lack the route and do not need the call
    wakes: str = ""  # the part of a sleeping server's memory that it restores; SGLang dies if it is sent twice


@dataclass(frozen=True, kw_only=True)
class GenerationRequest:
    """A generation request, and the weight versions of its server before and after it."""

    id: str
    prompt_ids: tuple[int, ...]
    params: SamplingParams
    before: int
    after: int | None  # None: unknown
    route_experts: int | None = None  # the experts of a token, if the choices of the routers are asked for
    images: tuple[ImageSpan, ...] = ()
    salt: str
    """The key of cached prefixes. It changes with each load of weights, since another run may use the same versions."""


Asked = GenerationRequest
"""The name of GenerationRequest in earlier documentation."""


@dataclass(frozen=True, kw_only=True)
class Launch:
    """How a server is launched."""

    python: str
    folder: str
    port: int
    dtype: str
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    memory_share: float
    host: str = "127.0.0.1"
    tensor_parallel: int = 1
    frontends: int = 1  # HTTP processes, if the server supports several
    on_cpu: bool = False
    seed: int = 0
    eager: bool = False
    log_level: str | None = None
    raw_logprobs: bool = (
        True  # log-probabilities before temperature and filters; only equal to the policy's at temperature 1
    )
    in_flight: InFlight = "keep"
    sleeps: bool = False  # it can release its GPU memory
    by_handles: bool = False  # weights may be sent as CUDA IPC handles
    by_broadcast: bool = False  # weights may be broadcast in a group
    images: str = ""  # the model whose image processor it uses, if it is sent images
    routes: bool = False  # it returns the expert choices of routers
    extra: Mapping[str, Any]


class ServerApi(Protocol):
    """The HTTP calls of one kind of server and how to read the responses. Stateless, no I/O."""

    @property
    def name(self) -> str: ...

    @property
    def stops_at_strings(self) -> bool:
        """Whether the server itself stops at `SamplingParams.stop`."""
        ...

    @property
    def applies_grammars(self) -> bool:
        """Whether it samples under `SamplingParams.grammar` and returns which tokens were allowed."""
        ...

    @property
    def takes_images(self) -> bool:
        """Whether prompts may have images."""
        ...

    def generate(self, request: GenerationRequest) -> HttpCall:
        """The call that samples one continuation."""
        ...

    def generation(self, answer: Any, request: GenerationRequest) -> Generation:
        """Read the response; ReplicaGone if it is incomplete."""
        ...

    def abort(self, request_id: str) -> HttpCall | None:
        """The call that aborts a request; None if closing the connection is enough."""
        ...

    def load(self, source: Source, version: int, in_flight: InFlight) -> tuple[HttpCall, ...]:
        """The calls, in order, that pause the server and load the weights of `source`."""
        ...

    def join(self, invitation: Mapping[str, Any]) -> HttpCall:
        """The call by which the server joins a group in which weights are broadcast."""
        ...

    def sleep(self) -> tuple[HttpCall, ...]:
        """The calls that make an idle server release the GPU memory of its weights and KV."""
        ...

    def wake(self, source: Source, version: int) -> tuple[HttpCall, ...]:
        """The calls, in order, that wake a sleeping server and load the weights of `source`."""
        ...

    def resume(self) -> HttpCall:
        """The call that resumes a paused server."""
        ...

    def window(self) -> HttpCall:
        """The call whose response `window_of` reads."""
        ...

    def window_of(self, answer: Any) -> int | None:
        """The maximum length of a history in tokens, if the server reports it."""
        ...

    def command(self, launch: Launch) -> list[str]:
        """The command line that launches a server."""
        ...

    def environment(self, by_handles: bool = False) -> dict[str, str]:
        """Additional environment variables of a launched server."""
        ...

    def headers(self) -> dict[str, str]:
        """Headers of every request."""
        ...


def get_field(answer: Any, *path: str | int) -> Any:
    """The value at `path` inside a response; ReplicaGone if it is missing."""
    for step in path:
        try:
            answer = answer[step]
        except (KeyError, IndexError, TypeError):
            missing = ".".join(map(str, path))
            raise ReplicaGone(f"the server's response has no {missing}, so it is not used") from None
    return answer


def checked_generation(
    request: GenerationRequest,
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
    routes: Routes | None = None,
    constrained: ConstrainedSpan | None = None,
    salted: bool = False,
) -> Generation:
    """The generation; ReplicaGone if the fields of the response are missing or inconsistent. `salted`: the server finds
    cached prefixes by the salt of the request, so they may be of the version before it."""
    sampled = _ids(ids, request.params.max_tokens)
    if prompt_tokens is not None and prompt_tokens != len(request.prompt_ids):
        raise ReplicaGone(
            f"the server read {prompt_tokens} tokens of a prompt of {len(request.prompt_ids)}; it must take token ids "
            "unchanged"
        )
    if finish not in ("stop", "length", "abort"):
        raise ReplicaGone(f"the server returned the unknown finish reason {finish!r}")
    if not sampled and finish != "abort":
        raise ReplicaGone(f"the server returned no tokens with finish reason {finish!r}")
    reason: FinishReason = finish
    if request.route_experts is not None and sampled:
        _check_routes(routes, len(request.prompt_ids) + len(sampled) - 1, request.route_experts)
    return Generation(
        ids=sampled,
        logprobs=_logprobs(logprobs, len(sampled)),
        finish=reason,
        cached_tokens=cached_tokens if isinstance(cached_tokens, int) else 0,
        spans=_spans(spans, len(sampled), request, salted),
        sampling_logprobs=_logprobs(sampling_logprobs, len(sampled)) if sampling_logprobs else (),
        queued_seconds=_seconds(queued_seconds),
        first_token_seconds=_seconds(first_token_seconds),
        routes=routes if sampled else None,
        constrained=constrained,
    )


def npy_routes(text: Any) -> Routes | None:
    """Routes from a base64 .npy file of [tokens, layers, experts]; None if there is none."""
    if text is None:
        return None
    try:
        numbers = np.load(io.BytesIO(base64.b64decode(text, validate=True)), allow_pickle=False)
        return _routes(numbers, *numbers.shape[1:])
    except (ValueError, TypeError, EOFError) as problem:
        raise ReplicaGone(f"the server's expert choices cannot be read ({problem})") from None


def int32_routes(text: Any, tokens: int, experts: int | None) -> Routes | None:
    """Routes from base64 int32 numbers of [tokens, layers, experts]; None if there are none."""
    if text is None or experts is None:
        return None
    try:
        numbers = np.frombuffer(base64.b64decode(text, validate=True), "<i4")
        return _routes(numbers, numbers.size // max(1, tokens * experts), experts)
    except (ValueError, TypeError) as problem:
        raise ReplicaGone(f"the server's expert choices cannot be read ({problem})") from None


def _routes(numbers: np.ndarray[Any, Any], layers: int, experts: int) -> Routes:
    if layers < 1 or experts < 1 or numbers.size % (layers * experts):
        raise ValueError(f"shape {numbers.shape}")
    if numbers.size and not (numbers.dtype.kind in "iu" and 0 <= numbers.min() <= numbers.max() < 2**15):
        raise ValueError("they are not numbers of experts")
    return Routes(numbers.astype("<i2").tobytes(), layers, experts)


def _check_routes(routes: Routes | None, tokens: int, experts: int) -> None:
    if routes is None:
        raise ReplicaGone(
            "the server returned no expert choices; start it with --enable-return-routed-experts (vLLM, SGLang) or "
            "--return-routes (rally serve engine), or set actor.router_replay.mode=R2"
        )
    if len(routes) != tokens or routes.experts != experts:
        raise ReplicaGone(
            f"the server returned {routes.experts} experts for each of {len(routes)} tokens; it computed {tokens} "
            f"tokens, and the model chooses {experts}"
        )


def _ids(ids: Any, max_tokens: int) -> tuple[int, ...]:
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int} or min(ids, default=0) < 0:
        raise ReplicaGone("the server's response contains no list of token ids; it must return ids, not text")
    if len(ids) > max_tokens:
        raise ReplicaGone(f"the server sampled {len(ids)} tokens, more than max_tokens={max_tokens}")
    return tuple(ids)


def _logprobs(values: Any, count: int) -> tuple[float, ...]:
    if not isinstance(values, list):
        raise ReplicaGone("the server returned no log-probabilities of the sampled tokens")
    if len(values) != count:
        raise ReplicaGone(f"the server returned {len(values)} log-probabilities for {count} sampled tokens")
    if not set(map(type, values)) <= {int, float} or not all(-math.inf < value < math.inf for value in values):
        raise ReplicaGone("the server returned a log-probability that is not a finite number")
    try:
        return tuple(map(float, values))
    except OverflowError:
        raise ReplicaGone("the server returned a log-probability that is too large a number") from None


def _seconds(value: Any) -> float:
    return float(value) if isinstance(value, (int, float)) else 0.0


def _spans(reported: Any, count: int, request: GenerationRequest, salted: bool) -> tuple[WeightSpan, ...]:
    """The weight version of each token, as the server reports it. If it does not, all tokens count as of the oldest
    version that it had: repeating the request would favour short responses. A request that waited during an update may
    have used prefixes of the older version, so its first token counts as of that one."""
    if count == 0:
        return ()
    if not reported and request.after is None:
        raise SampleVoid("the server failed to load weights while it sampled; the request is repeated")
    if not reported:
        return (WeightSpan(request.before, 0, count),)
    spans = _reported_spans(reported, count)
    if not salted or spans[0].version <= request.before:
        return spans
    rest = (WeightSpan(spans[0].version, 1, spans[0].end),) if spans[0].end > 1 else ()
    return (WeightSpan(request.before, 0, 1), *rest, *spans[1:])


def _reported_spans(reported: Any, count: int) -> tuple[WeightSpan, ...]:
    spans, end = [], 0
    for one in reported:
        label, start, stop = get_field(one, "version"), get_field(one, "start"), get_field(one, "end")
        if not str(label).isdecimal():
            raise ReplicaGone(f"the server reports the weight version {label!r}, which is not one of this run")
        if type(start) is not int or type(stop) is not int or start != end or stop <= start:
            raise ReplicaGone("the server's weight versions do not cover the sampled tokens")
        spans.append(WeightSpan(int(label), start, stop))
        end = stop
    if end != count:
        raise ReplicaGone("the server's weight versions do not cover the sampled tokens")
    return tuple(spans)


def flags(options: Mapping[str, Any], *, negated: bool) -> list[str]:
    """Options as command-line arguments; `negated` if the server has --no-x for False."""
    arguments: list[str] = []
    for key, value in options.items():
        flag = "--" + key.replace("_", "-")
        if value is None or (value is False and not negated):
            continue
        if isinstance(value, bool):
            arguments.append(flag if value else "--no-" + flag[2:])
        else:
            arguments += [flag, value if isinstance(value, str) else json.dumps(value)]
    return arguments


def as_list(ids: Sequence[int]) -> list[int]:
    return list(map(int, ids))
