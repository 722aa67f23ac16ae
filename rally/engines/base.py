"""The protocols that engines implement, and their errors.

`Engine` is what an agent loop uses, `TrainingEngine` what the trainer uses, `LockstepEngine` what a deterministic
rollout uses, and `Replica` is one server behind the router. A replica fails in one of four ways: ReplicaGone,
ReplicaBusy, SampleVoid, or a plain EngineError if the request itself is at fault.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

from rally.types import Generation, ImageSpan, RallyError, SamplingParams


class UtilizationClock:
    """Counts the seconds in which at least one piece of work runs; `seconds` grows when the last one ends. Only one
    thread at a time may enter and leave."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._active = 0
        self._since = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        if not self._active:
            self._since = time.perf_counter()
        self._active += 1
        try:
            yield
        finally:
            self._active -= 1
            if not self._active:
                self.seconds += time.perf_counter() - self._since


NO_GRAMMAR = (
    "response_format, tool_choice and parallel_tool_calls need an engine of Rally's own: vLLM and SGLang do not return "
    "which tokens were allowed, so training would see another distribution; set rollout.name=embedded or rally, or "
    "leave them out"
)
NO_IMAGES = (
    "the prompt contains images, and vLLM and SGLang are sent only tokens; set rollout.name=embedded, which works on "
    "several GPUs too, or rally"
)


def first_stop(
    decode: Callable[[Sequence[int]], str], ids: Sequence[int], start: int, stop: Sequence[str]
) -> int | None:
    """How many of the sampled `ids` there are up to the token that completes a stop string, searched from `start` on;
    None if there is none. Only the tail is decoded at each token, as in the embedded engine."""
    tail = 4 * max(len(text) for text in stop) + 8
    text = decode(ids[max(0, start + 1 - tail) :])
    if not any(one in text for one in stop):
        return None
    for end in range(start + 1, len(ids) + 1):
        text = decode(ids[max(0, end - tail) : end])
        if any(one in text for one in stop):
            return end
    return None


class SampledTokens(NamedTuple):
    """Consecutive sampled tokens and their logprobs."""

    ids: list[int]
    logprobs: list[float]


OnTokens = Callable[[SampledTokens], None]
"""Called in the caller's event loop with the tokens sampled since the last call; the Generation holds all of them."""


class EngineError(RallyError):
    """A request or a setting that the engine does not support."""


class ContextExceeded(EngineError):
    """A prompt, or a prompt and its answer, that does not fit the context length."""


class PromptLogprobs(NamedTuple):
    """Log-probabilities of consecutive tokens of a prompt, and the likeliest tokens at each, likeliest first."""

    logprobs: list[float]
    top_ids: list[list[int]]
    top_logprobs: list[list[float]]


@runtime_checkable
class Engine(Protocol):
    """The interface that agent loops use."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token is sampled with."""
        ...

    @property
    def max_model_len(self) -> int:
        """The maximum length of prompt and response together, in tokens."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Generation:
        """Sample one continuation of a prompt; `images` are the spans of its image tokens. Cancelling the awaiting task
        cancels the request."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests in flight end with finish `abort`."""
        ...


class TrainingEngine(Engine, Protocol):
    """The interface that the trainer uses: an engine whose weights follow the policy."""

    @property
    def busy_seconds(self) -> float:
        """Total seconds in which at least one request was being sampled."""
        ...

    def begin_at(self, version: int) -> None:
        """Set the weight version of a resumed run; called before `start`."""
        ...

    async def start(self) -> None:
        """Get ready to sample from the trainer's weights; raises if that is not possible."""
        ...

    async def rest(self) -> None:
        """Called before an update: no request comes until `publish`, so the engine may release its memory."""
        ...

    async def verify(self) -> None:
        """Called during an update of asynchronous training, while requests go on: raises if something samples from
        other weights than those published last."""
        ...

    def updating(self) -> AbstractContextManager[None]:
        """A context in which the weights may be changed; leaving it starts a new version. It may be entered in another
        thread."""
        ...

    async def publish(self) -> dict[str, float]:
        """Called after an update: everything sampled from now on uses the new version. Returns metrics."""
        ...


@runtime_checkable
class LockstepEngine(Protocol):
    """An engine whose steps depend on which sessions take part and not on their timing, so it must know them."""

    def expect(self, session: str) -> None:
        """A session begins. The engine makes no step while the session runs and has no request waiting."""
        ...

    def dismiss(self, session: str) -> None:
        """The session has ended."""
        ...


@runtime_checkable
class GrammarEngine(Protocol):
    """An engine that may sample under a grammar (`SamplingParams.grammar`)."""

    async def check_grammar(self, grammar: str) -> None:
        """Raises RallyError if the grammar cannot be applied. Over servers a grammar that does not compile is found
        only by `generate`, which raises GrammarError."""
        ...


@runtime_checkable
class LocalEngine(Protocol):
    """An engine in this process. Its `generate` takes `on_tokens: OnTokens`, which is told of tokens as they are
    sampled."""

    @property
    def reports_tokens(self) -> bool: ...


class ReplicaGone(EngineError):
    """The server is unreachable, died during a request or returned a server error; another one may answer."""


class ReplicaBusy(EngineError):
    """The server is overloaded; it may accept the same request later."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class SampleVoid(EngineError):
    """The server's weights are unknown, so the result is unusable. Repeat the request."""


class Replica(Protocol):
    """A server behind the router. An invalid request raises a plain EngineError: no other server would accept it
    either."""

    @property
    def name(self) -> str:
        """Unique among the replicas, for logs and metrics."""
        ...

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, images: Sequence[ImageSpan] = ()
    ) -> Generation:
        """Sample one continuation. The seed in `params` makes a repetition on another server the same request."""
        ...

    async def healthy(self) -> bool:
        """Whether it answers now and has the current weights; never raises."""
        ...

    async def close(self) -> None:
        """Close its connections, and end its process if Rally started it."""
        ...
