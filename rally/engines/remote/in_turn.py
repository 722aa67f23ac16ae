"""The plainest way to spread requests: a conversation keeps its server, others are asked in turn when it fails."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Sequence

from rally.engines.base import EngineError
from rally.engines.replica import Replica, ReplicaBusy, ReplicaGone
from rally.types import Generation, SamplingParams


class InTurn:
    """The `generate` of several replicas that hold the same weights."""

    def __init__(self, replicas: Sequence[Replica]) -> None:
        if not replicas:
            raise EngineError("there is no server to ask; set rollout.server.url")
        self.replicas = list(replicas)
        self._next = itertools.count()
        self._kept: dict[str, int] = {}

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        first = self._kept.get(session, -1) if session else -1
        first = next(self._next) if first < 0 else first
        gone: ReplicaGone | None = None
        for place in range(first, first + len(self.replicas)):
            try:
                generation = await self._patiently(self.replicas[place % len(self.replicas)], prompt_ids, params)
            except ReplicaGone as problem:
                gone = problem
                continue
            if session:
                self._kept[session] = place
            return generation
        assert gone is not None
        raise gone

    async def close(self) -> None:
        """The replicas belong to somebody else."""

    async def _patiently(self, replica: Replica, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        while True:
            try:
                return await replica.generate(prompt_ids, params)
            except ReplicaBusy as busy:
                await asyncio.sleep(max(busy.retry_after, 0.05))
