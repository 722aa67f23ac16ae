"""One of several servers that sample from the same weights; what may go wrong with it has four names."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rally.engines.base import EngineError
from rally.types import Generation, SamplingParams


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
