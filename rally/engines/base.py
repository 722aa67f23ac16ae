"""One of several servers that sample from the same weights; what may go wrong with it has four names."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Protocol, runtime_checkable

from rally.types import Generation, ImageSpan, RallyError, SamplingParams


class UtilizationClock:
    """One thread at a time may enter and leave; `seconds` grows when the last piece under way ends."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.seconds += time.perf_counter() - self._since


NO_IMAGES = "servers are given tokens alone, and the prompt holds images; set rollout.name=embedded"


class EngineError(RallyError):
    """A request or a setting that the engine cannot honour, in one sentence."""


@runtime_checkable
class Engine(Protocol):
    """What an agent loop may ask of an engine."""

    @property
    def weight_version(self) -> int:
        """The version of the weights that the next token will be sampled under."""
        ...

    @property
    def max_model_len(self) -> int:
        """The most tokens, prompt and response together, that one history may hold."""
        ...

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Generation:
        """Sample one continuation of a prompt, some of whose tokens may be `images`. Cancelling the awaiting task
        cancels the request."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests in flight end with finish `abort`."""
        ...


class TrainingEngine(Engine, Protocol):
    """An engine that follows a policy while it is trained."""

    @property
    def busy_seconds(self) -> float:
        """For how long, so far, anything was being sampled."""
        ...

    def begin_at(self, version: int) -> None:
        """The weights are version `version` of a run that goes on here; before `start`."""
        ...

    async def start(self) -> None:
        """Ready to sample from the trainer's weights; whatever stands in the way is said now, in words."""
        ...

    async def rest(self) -> None:
        """Nothing is asked until `publish`; memory that sampling needs may be given to the update."""
        ...

    def updating(self) -> AbstractContextManager[None]:
        """Change the weights inside; at the end they are a new version."""
        ...

    async def publish(self) -> dict[str, float]:
        """After an update: whatever is sampled from now on is of the new version. Returns what it took, as metrics."""
        ...


@runtime_checkable
class LockstepEngine(Protocol):
    """An engine whose steps depend on who takes part, and not on who was quick: it is told who does."""

    def expect(self, session: str) -> None:
        """An exchange begins; no step is made while it is neither waiting for a reply nor at its end."""
        ...

    def dismiss(self, session: str) -> None:
        """The exchange has ended."""
        ...


class ReplicaGone(EngineError):
    """The server cannot be reached, died in mid-request or answered with an error of its own; another may do it."""


class ReplicaBusy(EngineError):
    """The server has more than it can do and says so; the same one may take the request a little later."""

    def __init__(self, reason: str, retry_after: float = 0.0) -> None:
        super().__init__(reason)
        self.retry_after = retry_after


class SampleVoid(EngineError):
    """What the server sampled is of no use through no fault of its own: its weights changed meanwhile. Ask again."""


class Replica(Protocol):
    """A server behind the router. A request that is the caller's own mistake raises a plain EngineError: no other
    server would take it either."""

    @property
    def name(self) -> str:
        """Unique among the replicas, for logs and metrics."""
        ...

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        """Sample one continuation. The seed in `params` makes a repetition on another server the same request."""
        ...

    async def healthy(self) -> bool:
        """Whether it answers now, and with the weights it should have; never raises."""
        ...

    async def close(self) -> None:
        """Let go of its connections, and of its process if it is ours."""
        ...
