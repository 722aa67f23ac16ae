"""The engine protocol: ids in; ids, logprobs and weight versions out. Nothing above knows which engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from rally.types import Generation, ImageSpan, RallyError, SamplingParams

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
class WaitsForEveryone(Protocol):
    """An engine whose steps depend on who takes part, and not on who was quick: it is told who does."""

    def expect(self, session: str) -> None:
        """An exchange begins; no step is made while it is neither waiting for a reply nor at its end."""
        ...

    def dismiss(self, session: str) -> None:
        """The exchange has ended."""
        ...
