"""Runs untrusted programs behind the strongest isolation that this machine has.

    async with Sandbox() as sandbox:
        outcome = await sandbox.run(Program(code="print(1)"))
        outcome.run.stdout, outcome.isolation

A level weaker than bubblewrap is used only if bubblewrap does not work; it is named in the log and in every outcome.
Programs run unprotected only if `isolation: unprotected` is set. A sandbox may be used from several event loops, one
after the other.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple, Self

from rally.sandbox import json_socket
from rally.sandbox.fork_server import ForkServer
from rally.sandbox.inside.confine import LevelName
from rally.sandbox.isolation_levels import Isolation, strongest
from rally.sandbox.languages import plan
from rally.sandbox.memory_cgroups import MemoryCgroup
from rally.sandbox.program_messages import all_memory, outcome_of, request_message, scratch_folder
from rally.sandbox.types import Limits, Outcome, Program, SandboxError
from rally.util.rate_limit import RateLimiter

END_SECONDS = 5.0  # for a supervisor without a pid namespace to kill its process tree


class ProgramConnection:
    """The host's connection to one execution. Call `end` in a finally block."""

    def __init__(self, stream: socket.socket, pidfd: int, fork_server: ForkServer) -> None:
        self._stream = stream
        self._pidfd = pidfd
        self._own_namespace = fork_server.level == "bubblewrap"
        self._cgroups = fork_server.cgroups
        self._cgroup: MemoryCgroup | None = None

    @classmethod
    async def open(cls, fork_server: ForkServer) -> ProgramConnection:
        try:
            stream = fork_server.connect()
        except OSError as error:
            raise SandboxError(f"the sandbox's fork server cannot be reached ({error}); try again") from None
        stream.setblocking(False)
        try:
            await _readable(stream.fileno())
            greeting, pidfds, _, _ = socket.recv_fds(stream, 1024, 1)
            if not pidfds:
                reason = greeting[1:].decode("utf-8", "replace") or "its fork server has ended"
                raise SandboxError(f"the sandbox could not start an execution: {reason}")
        except BaseException:
            stream.close()
            raise
        return cls(stream, pidfds[0], fork_server)

    def limit_memory(self, fork_server: ForkServer, limit: int) -> None:
        """Before the request: limit the program's memory, its files included."""
        self._cgroup = fork_server.send_cgroup(self._stream, limit)

    async def send(self, message: json_socket.Message) -> None:
        await asyncio.get_running_loop().sock_sendall(self._stream, json_socket.pack(message))

    async def receive(self, seconds: float) -> json_socket.Message:
        """The next message; SandboxError if there is none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                header = await self._exactly(json_socket.LENGTH.size)
                message = json_socket.unpack(await self._exactly(json_socket.length_of(header)))
        except TimeoutError:
            raise SandboxError(
                f"the sandbox did not answer within {seconds:g} seconds; run fewer programs at once"
            ) from None
        except ConnectionError as error:
            raise SandboxError(
                f"the sandbox ended without an answer ({error}); the machine may be out of memory"
            ) from None
        if "failed" in message:
            raise SandboxError(f"the sandbox could not be set up: {message['failed']}")
        return message

    async def end(self) -> None:
        """Kill the execution if it still runs. Safe at any time, also during cancellation."""
        self._stream.close()
        try:
            if not self._own_namespace:
                async with asyncio.timeout(END_SECONDS):
                    await _readable(self._pidfd)
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._pidfd, signal.SIGKILL)
            os.close(self._pidfd)
            if self._cgroups is not None and self._cgroup is not None:
                await self._cgroups.remove(self._cgroup)

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._stream, min(size - len(parts), 1 << 20))
            if not part:
                raise json_socket.SocketClosed("the other side closed the connection")
            parts += part
        return bytes(parts)


async def _readable(end: int) -> None:
    loop = asyncio.get_running_loop()
    ready: asyncio.Future[Any] = loop.create_future()

    def settle() -> None:
        if not ready.done():
            ready.set_result(None)

    loop.add_reader(end, settle)
    try:
        await ready
    finally:
        loop.remove_reader(end)


GRACE_SECONDS = 15.0  # beyond a program's own deadlines: for forking and transferring files on a busy machine


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """At most `max_concurrent` executions run at once, others wait; by default twice the number of processors."""

    isolation: Isolation = "auto"
    limits: Limits = field(default_factory=Limits)
    max_concurrent: int | None = None


class _Execution(NamedTuple):
    connection: ProgramConnection
    level: LevelName


class Sandbox:
    """Runs programs, each in a fork of one warm fork server."""

    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self._fork_server: ForkServer | None = None
        self._starting = threading.Lock()
        self.at_once = self.settings.max_concurrent or 2 * (os.cpu_count() or 1)
        self.limiter = RateLimiter(max_concurrency=self.at_once)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def start(self) -> LevelName:
        """Start the fork server, if it is not running, and return its level of isolation. `run` does this if needed."""
        return (await self._running()).level

    def start_now(self) -> LevelName:
        """The same, blocking for a second or two, for callers outside of an event loop."""
        return self._start().level

    async def run(self, program: Program) -> Outcome:
        """Run a program. SandboxError is raised only if the sandbox fails, never for what the program does."""
        seconds = program.timeout + program.compile_timeout + GRACE_SECONDS
        async with self.limiter.slot(), self._execution(program) as (connection, level):
            return outcome_of(await connection.receive(seconds), level)

    def session(self, program: Program | None = None) -> SandboxSession:
        """A Python interpreter that keeps its variables. `program` sets its files and limits; its code is not run."""
        return SandboxSession(self, program or Program(code=""))

    def close(self) -> None:
        """End the fork server and all executions."""
        fork_server, self._fork_server = self._fork_server, None
        if fork_server is not None:
            fork_server.stop()

    async def _running(self) -> ForkServer:
        fork_server = self._fork_server
        return fork_server if fork_server is not None and fork_server.alive else await asyncio.to_thread(self._start)

    def _start(self) -> ForkServer:
        with self._starting:
            if self._fork_server is None or not self._fork_server.alive:
                self.close()
                self._fork_server = strongest(self.settings.isolation)
            return self._fork_server

    @asynccontextmanager
    async def _execution(self, program: Program, session: bool = False) -> AsyncIterator[_Execution]:
        steps = plan(program)  # first, because it may raise
        fork_server = await self._running()
        with scratch_folder(fork_server.level) as folder:
            connection = await ProgramConnection.open(fork_server)
            try:
                limits = self.settings.limits
                connection.limit_memory(fork_server, all_memory(program, limits))
                await connection.send(request_message(program, steps, limits, folder, session))
                yield _Execution(connection, fork_server.level)
            finally:
                await connection.end()


class SandboxSession:
    """A Python interpreter in its own sandbox. `close` ends it; a later `run` starts a new one."""

    def __init__(self, sandbox: Sandbox, program: Program) -> None:
        self._sandbox = sandbox
        self._program = replace(program, language="python")
        self._execution: _Execution | None = None
        self._ending = AsyncExitStack()
        self._lock = asyncio.Lock()

    async def run(self, code: str, timeout: float | None = None) -> Outcome:
        """Run `code` in the interpreter. After the timeout it is interrupted, and killed only if that fails."""
        seconds = timeout or self._program.timeout
        async with self._lock, self._sandbox.limiter.slot():
            if self._execution is None:
                entering = self._sandbox._execution(self._program, session=True)
                self._execution = await self._ending.enter_async_context(entering)
            connection, level = self._execution
            kept = False
            try:
                await connection.send({"code": code, "timeout": seconds})
                result = outcome_of(await connection.receive(seconds + GRACE_SECONDS), level)
                kept = not result.state_lost
            finally:
                if not kept:
                    await self.close()
            return result

    async def close(self) -> None:
        self._execution = None
        await self._ending.aclose()


@cache
def shared_sandbox(settings: SandboxSettings) -> Sandbox:
    """The sandbox that this process shares for these settings."""
    return Sandbox(settings)
