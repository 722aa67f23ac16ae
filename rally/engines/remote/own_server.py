"""A server that this run starts itself: it is up or its last words are told, and it ends with the run."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.ports import Port, reserve_port
from rally.engines.remote.process import POLL_SECONDS, ServerProcess
from rally.engines.remote.wire import Dialect
from rally.engines.replica import ReplicaGone
from rally.types import Generation, SamplingParams

NOWHERE = "http://127.0.0.1:0"
Command = Callable[[str, int], list[str]]
"""The command line of a server over the model in a folder, at a port."""


class OwnServer(ServerReplica):
    """A `ServerReplica` whose process is ours."""

    def __init__(
        self,
        dialect: Dialect,
        command: Command,
        log: Path,
        *,
        port_start: int | None = None,
        environment: Mapping[str, str] | None = None,
        settings: ClientSettings | None = None,
    ) -> None:
        super().__init__(NOWHERE, dialect, settings)
        self.process: ServerProcess | None = None
        self._command = command
        self._log = log
        self._port_start = port_start
        self._port: Port | None = None
        self._environment = dialect.environment() if environment is None else environment

    @property
    def name(self) -> str:
        return self._log.stem

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    async def generate(self, prompt_ids: Sequence[int], params: SamplingParams) -> Generation:
        try:
            return await super().generate(prompt_ids, params)
        except ReplicaGone as problem:
            await asyncio.sleep(2 * POLL_SECONDS)  # if its process died, whoever watches it knows before the caller
            raise ReplicaGone(f"{problem}; its log is {self._log}") from None

    async def up(self, folder: str) -> None:
        """Start it. Its predecessor, if there was one, may hold its port for a while, so the next free one is taken."""
        await self.down()
        self.asleep = False
        self._woken.clear()
        self._port = reserve_port(self._port_start)
        self.url = f"http://127.0.0.1:{self._port.number}"
        self.process = ServerProcess(self._command(folder, self._port.number), self._environment, self._log)
        try:
            await self._answers(self._check_alive)
        except ReplicaGone as problem:
            words = self.process.last_words()
            await self.down()
            raise ReplicaGone(f"{problem}; {words}") from None

    async def close(self) -> None:
        await super().close()
        await self.down()

    def _check_alive(self) -> None:
        if not self.alive:
            raise ReplicaGone(f"{self.name} has ended while it was starting")

    async def down(self) -> None:
        """End it; `up` starts it again."""
        self.serving = False
        if self.process is not None:
            await self.process.stop()
            self.process = None
        if self._port is not None:
            self._port.lock.release()
            self._port, self.url = None, NOWHERE  # whose server answers there from now on, nobody knows
