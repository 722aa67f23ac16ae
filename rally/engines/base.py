"""The engine protocol: ids in; ids, logprobs and weight versions out. Nothing above knows which engine runs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from rally.types import Generation, RallyError, SamplingParams


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
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        """Sample one continuation. Cancelling the awaiting task cancels the request."""
        ...

    async def close(self) -> None:
        """Stop the engine; requests in flight end with finish `abort`."""
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
