"""A server that this run starts itself: it is up or its last words are told, and it ends with the run."""

from __future__ import annotations

import asyncio
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from rally.engines.base import EngineError, ReplicaGone
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.server_api import ServerApi
from rally.types import Generation, SamplingParams
from rally.util.locks import Lock, hold
from rally.util.subprocesses import POLL_SECONDS, ServerProcess

PORTS = 1000  # how far a free one is looked for


class Port(NamedTuple):
    """A port that is nobody else's until its lock is released."""

    number: int
    lock: Lock


def reserve_port(start: int | None) -> Port:
    """The first port from `start` on that nobody uses or is about to use; without a start, any."""
    for wanted in _wanted(start):
        number = _bound(wanted)
        lock = None if number is None else hold(Path(tempfile.gettempdir()) / f"rally-port-{number}.lock")
        if number is None or lock is None:
            continue
        if _bound(number) is not None:  # whoever locked it until now may have opened it
            return Port(number, lock)
        lock.release()
    where = "of this machine" if start is None else f"from rollout.port_start={start} on"
    raise EngineError(f"none of the ports {where} is free; choose another rollout.port_start")


def _wanted(start: int | None) -> Iterator[int]:
    return repeat(0, PORTS) if start is None else iter(range(start, min(start + PORTS, 65536)))


def _bound(port: int) -> int | None:
    """The port, or for 0 any, if it can be opened."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


NOWHERE = "http://127.0.0.1:0"
Command = Callable[[str, int], list[str]]
"""The command line of a server over the model in a folder, at a port."""


class LaunchedServer(ServerReplica):
    """A `ServerReplica` whose process is ours."""

    def __init__(
        self,
        dialect: ServerApi,
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
            log_tail = self.process.log_tail()
            await self.down()
            raise ReplicaGone(f"{problem}; {log_tail}") from None

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


FIND = """
import importlib.util, pathlib, sys
found = importlib.util.find_spec(sys.argv[1])
if found is None:
    sys.exit(3)
root = pathlib.Path(found.submodule_search_locations[0])
"""


def ask(python: str, package: str, question: str = "") -> str:
    """What `question` prints; it may use `root`, the folder of `package`, which must be there."""
    try:
        asked = subprocess.run(
            [python, "-c", FIND + question, package], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as problem:
        raise EngineError(f"rollout.server.python={python} cannot be run ({problem.strerror}); name a Python") from None
    if asked.returncode:
        raise EngineError(
            f"{python} has no {package}; install it into an environment of its own (python -m venv DIR && DIR/bin/pip "
            f"install {package}) and set rollout.server.python=DIR/bin/python"
        )
    return asked.stdout.strip()
