"""The engines of the ranks, as servers of a `RemoteEngine`: each rank samples from a copy of the policy.

Weights reach them by a collective of all ranks, not over HTTP. So no file is written, and nobody but the run can load
weights into them. Servers that join the run get files.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Callable, Sequence

from rally.engines.base import EngineError
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.rally_api import Rally
from rally.engines.remote.server_api import InFlight
from rally.engines.remote.weight_updates import WeightTransport


class RankReplica(ServerReplica):
    """The engine of one rank. It ends with the run; it is never started again by itself."""

    def __init__(self, rank: int, url: str, settings: ClientSettings, token: str) -> None:
        super().__init__(url, Rally(), settings, token)
        self._rank = rank

    @property
    def name(self) -> str:
        return f"rank-{self._rank}"

    def loaded(self, version: int) -> None:
        """It samples from this version now."""
        self.version, self.serving, self.salt = version, True, f"rally-{uuid.uuid4().hex}"


class GatheredWeights:
    """A `WeightTransport` to the engines of the ranks. `publish` copies the policy into all of them. `files` are for
    servers that joined, and hold what the policy is when they are written."""

    keeps_staged = False

    def __init__(self, publish: Callable[[int], None], files: WeightTransport) -> None:
        self._publish, self._files = publish, files
        self.version: int | None = None
        self._writing: asyncio.Task[None] | None = None

    async def stage(self, version: int) -> None:
        """All engines have the new version after it. What becomes of their requests follows their settings."""
        await asyncio.to_thread(self._publish, version)
        self.version = version

    def expect(self, servers: Sequence[ServerReplica]) -> None:
        """All ranks got the version together, when it was staged."""

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        assert self.version is not None, "no weights were staged yet"
        if isinstance(server, RankReplica):
            server.loaded(self.version)
            return
        while self._files.version != self.version:
            if self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._files.stage(self.version))
            await asyncio.shield(self._writing)  # once for all servers, also if one of them is given up meanwhile
        await self._files.send(server, in_flight)

    async def folder(self) -> str:
        return ""  # no server is started from it

    def fall_back(self, problem: EngineError) -> bool:
        return False

    def close(self) -> None:
        self._files.close()
