"""A rollout server that the run launches: its node, its port, its process, and the environment it runs in.

A server that fails to start is reported with the end of its log. The process ends with the run. Each server has a
random token, without which it answers no request: others can connect to its port. The token is passed in the
environment of the process, which only its owner can read. On another node it listens on that node's address only.
"""

from __future__ import annotations

import asyncio
import secrets
import socket
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from rally.engines.base import EngineError, ReplicaGone
from rally.engines.remote.client import ClientSettings, ServerReplica
from rally.engines.remote.server_api import TOKEN_VARIABLE, ServerApi
from rally.nodes import LOCAL, Node, NodeError, NodeProcess
from rally.types import Generation, ImageSpan, SamplingParams
from rally.util.locks import Lock, hold
from rally.util.subprocesses import POLL_SECONDS

PORTS = 1000  # how many are tried


class Port(NamedTuple):
    """A port that is reserved until its lock is released."""

    number: int
    lock: Lock


def reserve_port(start: int | None) -> Port:
    """The first port from `start` on that is neither in use nor reserved; any free port if `start` is None."""
    for candidate in _candidates(start):
        number = _free_port(candidate)
        lock = None if number is None else hold(Path(tempfile.gettempdir()) / f"rally-port-{number}.lock")
        if number is None or lock is None:
            continue
        if _free_port(number) is not None:  # the previous holder of the lock may have opened it
            return Port(number, lock)
        lock.release()
    where = "of this machine" if start is None else f"from rollout.port_start={start} on"
    raise EngineError(f"none of the ports {where} is free; choose another rollout.port_start")


def _candidates(start: int | None) -> Iterator[int]:
    return repeat(0, PORTS) if start is None else iter(range(start, min(start + PORTS, 65536)))


def _free_port(port: int) -> int | None:
    """The port if it can be opened (for 0, any free port), else None."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])


NO_URL = "http://127.0.0.1:0"
Command = Callable[[str, int], list[str]]
"""Makes the command line of a server from a model folder and a port."""


class LaunchedServer(ServerReplica):
    """A `ServerReplica` whose process this run starts and ends."""

    def __init__(
        self,
        api: ServerApi,
        command: Command,
        log: Path,
        *,
        port_start: int | None = None,
        environment: Mapping[str, str] | None = None,
        settings: ClientSettings | None = None,
        node: Node = LOCAL,
    ) -> None:
        token = secrets.token_urlsafe(32)
        super().__init__(NO_URL, api, settings, token)
        self.node = node
        self.process: NodeProcess | None = None
        self._command = command
        self._log = log
        self._port_start = port_start
        self._port: Port | None = None
        self._environment = {**(api.environment() if environment is None else environment), TOKEN_VARIABLE: token}

    @property
    def name(self) -> str:
        return self._log.stem

    @property
    def alive(self) -> bool:
        return self.process is not None and self.process.alive

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, images: Sequence[ImageSpan] = ()
    ) -> Generation:
        try:
            return await super().generate(prompt_ids, params, images=images)
        except ReplicaGone as problem:
            await asyncio.sleep(2 * POLL_SECONDS)  # if its process died, the watcher notices before the caller
            raise ReplicaGone(f"{problem}; its log is {self._log}") from None

    async def up(self, folder: str) -> None:
        """Start it, on the next free port: an earlier process may still hold the old one."""
        await self.down()
        self.asleep = False
        self._woken.clear()
        try:
            await self._launch(folder)
        except NodeError as problem:
            raise ReplicaGone(f"{self.name} cannot be started: {problem}") from None
        assert self.process is not None
        try:
            await self._wait_until_healthy(self._check_alive)
        except ReplicaGone as problem:
            log_tail = self.process.log_tail()
            await self.down()
            raise ReplicaGone(f"{problem}; {log_tail}") from None

    async def _launch(self, folder: str) -> None:
        if self.node is LOCAL:
            self._port = reserve_port(self._port_start)
            number = self._port.number
            self.process = self.node.launch(self._command(folder, number), self._environment, self._log)
        else:
            number = await asyncio.to_thread(self.node.free_port)
            command = self._command(folder, number)
            self.process = await asyncio.to_thread(self.node.launch, command, self._environment, self._log)
        self.url = f"http://{self.node.address}:{number}"

    async def close(self) -> None:
        await super().close()
        await self.down()

    def _check_alive(self) -> None:
        if not self.alive:
            raise ReplicaGone(f"{self.name} ended while it was starting")

    async def down(self) -> None:
        """End the process; `up` starts it again."""
        self.serving = False
        self.version = None
        if self.process is not None:
            await self.process.stop()
            self.process = None
        self.url = NO_URL  # another server may use the port from now on
        if self._port is not None:
            self._port.lock.release()
            self._port = None


FIND = """
import importlib.util, pathlib, sys
spec = importlib.util.find_spec(sys.argv[1])
if spec is None:
    sys.exit(3)
root = pathlib.Path(spec.submodule_search_locations[0])
"""


def probe_package(python: str, package: str, script: str = "") -> str:
    """Check that `package` is installed for an interpreter; returns what `script` prints there. `root` is the package's
    folder in it. EngineError if the interpreter or the package is missing."""
    try:
        result = subprocess.run(
            [python, "-c", FIND + script, package], capture_output=True, text=True, timeout=60, check=False
        )
    except OSError as problem:
        raise EngineError(
            f"rollout.server.python={python} cannot be run ({problem.strerror}); set it to a Python interpreter"
        ) from None
    if result.returncode:
        raise EngineError(
            f"{python} does not have {package}; install it into a separate environment (python -m venv DIR && "
            f"DIR/bin/pip install {package}) and set rollout.server.python=DIR/bin/python"
        )
    return result.stdout.strip()
