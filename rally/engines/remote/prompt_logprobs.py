"""The client of a server that computes log-probabilities of given tokens: Rally's own, vLLM or SGLang.

| server | call | what is read |
| --- | --- | --- |
| `rally serve engine` | POST /prompt_logprobs | see rally/services/engine.py |
| vLLM | POST /v1/completions with `prompt_logprobs` | the entries of the prompt's tokens, by token id and rank |
| SGLang | POST /generate with `return_logprob`, `logprob_start_len` | `input_token_logprobs`, `input_top_logprobs` |

vLLM and SGLang also sample one token, which is not used. All of them compute the distribution at temperature 1. Every
answer is checked: it must hold a finite number for each token that was asked for, and the ids of these very tokens.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple, Protocol

from rally.engines.base import EngineError, PromptLogprobs, ReplicaGone
from rally.engines.remote.client import ClientSettings, ServerReplica, retry_while_busy
from rally.engines.remote.rally_api import Rally
from rally.engines.remote.server_api import HttpCall, ServerApi, get_field
from rally.engines.remote.sglang_api import Sglang
from rally.engines.remote.vllm_api import Vllm

Kind = Literal["rally", "vllm", "sglang"]
SHORT_SECONDS = 60.0  # for questions about the server


class PromptQuery(NamedTuple):
    """The tokens from `start` on are scored, with the `top` likeliest ones at each of them."""

    ids: Sequence[int]
    start: int
    top: int


class ServedVocabulary(NamedTuple):
    """The ids of a server's tokens, and the rows of its embedding."""

    ids: Mapping[str, int]
    rows: int


class _Protocol(Protocol):
    @property
    def api(self) -> ServerApi: ...

    def call(self, query: PromptQuery, model: str) -> HttpCall: ...

    def read(self, answer: Any, query: PromptQuery) -> PromptLogprobs: ...


class _RallyPrompts:
    api = Rally()

    def call(self, query: PromptQuery, model: str) -> HttpCall:
        return HttpCall("/prompt_logprobs", {"ids": list(query.ids), "start": query.start, "top": query.top})

    def read(self, answer: Any, query: PromptQuery) -> PromptLogprobs:
        return PromptLogprobs(*(get_field(answer, name) for name in PromptLogprobs._fields))


class _VllmPrompts:
    api = Vllm()

    def call(self, query: PromptQuery, model: str) -> HttpCall:
        body = {"model": model, "prompt": list(query.ids), "max_tokens": 1, "temperature": 1.0}
        return HttpCall("/v1/completions", body | {"prompt_logprobs": query.top})

    def read(self, answer: Any, query: PromptQuery) -> PromptLogprobs:
        positions = get_field(answer, "choices", 0, "prompt_logprobs")
        if not isinstance(positions, list) or len(positions) != len(query.ids):
            raise ReplicaGone(f"the server returned no prompt_logprobs of {len(query.ids)} tokens")
        found = PromptLogprobs([], [], [])
        for token, entries in zip(query.ids[query.start :], positions[query.start :], strict=True):
            found.logprobs.append(get_field(entries, str(token), "logprob"))
            ranked = sorted((get_field(entry, "rank"), int(id_)) for id_, entry in entries.items())[: query.top]
            found.top_ids.append([id_ for _, id_ in ranked])
            found.top_logprobs.append([get_field(entries, str(id_), "logprob") for _, id_ in ranked])
        return found


class _SglangPrompts:
    api = Sglang()

    def call(self, query: PromptQuery, model: str) -> HttpCall:
        # The first entry has no log-probability, so it is asked for one token earlier.
        body: dict[str, Any] = {
            "input_ids": list(query.ids),
            "sampling_params": {"max_new_tokens": 1, "temperature": 1.0},
            "return_logprob": True,
            "logprob_start_len": query.start - 1,
            "stream": False,
        }
        return HttpCall("/generate", body | ({"top_logprobs_num": query.top} if query.top else {}))

    def read(self, answer: Any, query: PromptQuery) -> PromptLogprobs:
        wanted = query.ids[query.start :]
        own = get_field(answer, "meta_info", "input_token_logprobs")[-len(wanted) :]
        if [get_field(entry, 1) for entry in own] != list(wanted):
            raise ReplicaGone("the server returned log-probabilities of other tokens than those of the prompt")
        likeliest: list[Any] = [[]] * len(wanted)
        if query.top:
            likeliest = get_field(answer, "meta_info", "input_top_logprobs")[-len(wanted) :]
        return PromptLogprobs(
            [get_field(entry, 0) for entry in own],
            [[get_field(entry, 1) for entry in entries or ()] for entries in likeliest],
            [[get_field(entry, 0) for entry in entries or ()] for entries in likeliest],
        )


PROTOCOLS: Mapping[Kind, _Protocol] = {"rally": _RallyPrompts(), "vllm": _VllmPrompts(), "sglang": _SglangPrompts()}


@dataclass(frozen=True, kw_only=True)
class PromptClientSettings:
    """Where the server is, and its limits."""

    url: str
    kind: Kind
    model: str  # the path or Hub name of the served model
    timeout: float = 600.0  # seconds for one answer, its wait in the server's queue included
    max_connections: int = 32
    token: str | None = None
    tries: int = 3  # of a request whose server cannot be reached or fails
    retry_seconds: float = 2.0


class PromptLogprobsClient:
    """Asks one server. EngineError, with its address, if it does not answer or answers something unusable."""

    def __init__(self, settings: PromptClientSettings) -> None:
        self.settings = settings
        self._protocol = PROTOCOLS[settings.kind]
        limits = ClientSettings(timeout=settings.timeout, max_connections=settings.max_connections)
        self._replica = ServerReplica(settings.url, self._protocol.api, limits, settings.token)
        self._model = settings.model  # the name that requests use

    @property
    def name(self) -> str:
        return self._replica.name

    async def score(self, queries: Sequence[PromptQuery]) -> list[PromptLogprobs]:
        """The answers to all queries, in their order. The first failure cancels the others."""
        try:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._answer(query)) for query in queries]
        except* EngineError as problems:
            raise problems.exceptions[0] from None
        finally:
            await self._replica.close()
        return [task.result() for task in tasks]

    async def vocabulary(self) -> ServedVocabulary | None:
        """The server's own vocabulary; None if this kind of server does not tell it."""
        if self.settings.kind != "rally":
            return None
        try:
            answer = await self._replica.call(HttpCall("/tokenizer"), SHORT_SECONDS)
        finally:
            await self._replica.close()
        return ServedVocabulary(get_field(answer, "vocab"), get_field(answer, "rows"))

    async def check(self, max_length: int, top: int) -> None:
        """Raise EngineError unless the server serves the model, takes prompts of `max_length` tokens, and returns `top`
        likeliest tokens."""
        try:
            api = self._protocol.api
            window = api.window_of(await self._replica.call(api.window(), SHORT_SECONDS))
            needed = max_length + (self.settings.kind != "rally")  # the others sample one token
            if window is not None and window < needed:
                raise EngineError(
                    f"{self.name} takes {window} tokens, and the run has histories of up to {needed}; start the server "
                    "with a longer context"
                )
            if self.settings.kind != "rally":
                await self._check_model()
            await self._check_answer(PromptQuery((0, 1), 1, top))
        finally:
            await self._replica.close()

    async def _check_answer(self, query: PromptQuery) -> None:
        try:
            await self._attempt(query)
        except ReplicaGone:
            raise
        except EngineError as problem:
            advice = "; start it with --max-logprobs, at least that many" if self.settings.kind == "vllm" else ""
            raise EngineError(f"{query.top} likeliest tokens of a position: {problem}{advice}") from None

    async def _check_model(self) -> None:
        """Compare the server's model with the configured one, whose tokenizer is compared with the policy's."""
        if self.settings.kind == "vllm":
            served = get_field(await self._replica.call(HttpCall("/v1/models"), SHORT_SECONDS), "data", 0)
            self._model = str(get_field(served, "id"))
            names = [self._model, served.get("root")]
        else:
            answer = await self._replica.call(HttpCall("/model_info", optional=True), SHORT_SECONDS)
            if answer is None:  # its name before 0.5
                answer = await self._replica.call(HttpCall("/get_model_info"), SHORT_SECONDS)
            names = [get_field(answer, "model_path"), answer.get("tokenizer_path")]
        if not {_place(name) for name in names if name} & {_place(self.settings.model)}:
            shown = ", ".join(dict.fromkeys(str(name) for name in names if name))
            raise EngineError(
                f"{self.name} serves {shown} and not {self.settings.model}, so its tokenizer cannot be compared with "
                "the policy's; set model_path to the model that is served, or serve it under that name"
            )

    async def _answer(self, query: PromptQuery) -> PromptLogprobs:
        for left in range(self.settings.tries - 1, -1, -1):
            try:
                return await self._attempt(query)
            except ReplicaGone:
                if not left:
                    raise
                await asyncio.sleep(self.settings.retry_seconds)
        raise AssertionError("a request is tried at least once")

    async def _attempt(self, query: PromptQuery) -> PromptLogprobs:
        call = self._protocol.call(query, self._model)
        answer = await retry_while_busy(lambda: self._replica.call(call, self.settings.timeout, limited=True))
        try:
            found = self._protocol.read(answer, query)
            _check(found, query)
        except ReplicaGone as problem:
            raise ReplicaGone(f"{self.name}: {problem}") from None
        except (TypeError, ValueError, AttributeError) as problem:
            raise ReplicaGone(f"{self.name} answered {call.path} in an unknown form ({problem})") from None
        return found


def _place(name: str) -> str:
    """A folder as its absolute path, and any other name as it is."""
    return str(Path(name).resolve()) if Path(name).exists() else name.rstrip("/")


def _check(found: PromptLogprobs, query: PromptQuery) -> None:
    count = len(query.ids) - query.start
    if {len(values) for values in found} != {count}:
        raise ReplicaGone(f"the server returned {len(found.logprobs)} log-probabilities for {count} tokens")
    if any(len(ids) != query.top or len(set(ids)) != query.top for ids in found.top_ids):
        raise ReplicaGone(f"the server did not return {query.top} likeliest tokens at every position")
    numbers = [*found.logprobs, *(value for values in found.top_logprobs for value in values)]
    if not all(isinstance(value, (int, float)) and math.isfinite(value) for value in numbers):
        raise ReplicaGone("the server returned a log-probability that is not a finite number")
