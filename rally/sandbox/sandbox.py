"""Guarantees: code of a stranger runs and its outcome comes back, behind the strongest isolation this machine has.

    async with Sandbox() as sandbox:
        outcome = await sandbox.run(Program(code="print(1)"))
        outcome.run.stdout, outcome.isolation

A weaker level than bubblewrap is only taken where that cannot run, is named in the log and in every outcome; running
unprotected happens only when that word is written. Usable from one event loop after another.
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
from rally.sandbox.messages import order, outcome, scratch_folder
from rally.sandbox.program import Limits, Outcome, Program, SandboxError
from rally.util.rate_limit import RateLimiter

END_SECONDS = 5.0  # for a supervisor without a namespace to take its tree down by itself


class ProgramConnection:
    """The host's end of one execution. Use `end` in a finally."""

    def __init__(self, stream: socket.socket, handle: int, own_namespace: bool) -> None:
        self._stream = stream
        self._handle = handle
        self._own_namespace = own_namespace

    @classmethod
    async def open(cls, jail: ForkServer) -> ProgramConnection:
        try:
            stream = jail.connect()
        except OSError as error:
            raise SandboxError(f"the sandbox's fork server cannot be reached ({error}); try again") from None
        stream.setblocking(False)
        try:
            await _readable(stream.fileno())
            word, handles, _, _ = socket.recv_fds(stream, 1024, 1)
            if not handles:
                said = word[1:].decode("utf-8", "replace") or "its fork server is gone"
                raise SandboxError(f"the sandbox could not start an execution: {said}")
        except BaseException:
            stream.close()
            raise
        return cls(stream, handles[0], jail.level == "bubblewrap")

    async def send(self, message: json_socket.Message) -> None:
        await asyncio.get_running_loop().sock_sendall(self._stream, json_socket.pack(message))

    async def receive(self, seconds: float) -> json_socket.Message:
        """The answer; SandboxError when there is none within `seconds`."""
        try:
            async with asyncio.timeout(seconds):
                header = await self._exactly(json_socket.LENGTH.size)
                message = json_socket.unpack(await self._exactly(json_socket.length_of(header)))
        except TimeoutError:
            raise SandboxError(f"the sandbox did not answer within {seconds:g} seconds; run fewer at once") from None
        except ConnectionError as error:
            raise SandboxError(f"the sandbox ended without an answer ({error}); was it out of memory?") from None
        if "failed" in message:
            raise SandboxError(f"the sandbox could not be set up: {message['failed']}")
        return message

    async def end(self) -> None:
        """End whatever still runs. Safe at any time, also while being cancelled."""
        self._stream.close()
        try:
            if not self._own_namespace:
                async with asyncio.timeout(END_SECONDS):
                    await _readable(self._handle)
        except TimeoutError:
            pass
        finally:
            with suppress(ProcessLookupError):
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)
            os.close(self._handle)

    async def _exactly(self, size: int) -> bytes:
        loop = asyncio.get_running_loop()
        parts = bytearray()
        while len(parts) < size:
            part = await loop.sock_recv(self._stream, min(size - len(parts), 1 << 20))
            if not part:
                raise json_socket.SocketClosed("the other side is gone")
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


GRACE_SECONDS = 15.0  # over a program's own deadlines: to be forked, to hand over files, on a busy machine


@dataclass(frozen=True, kw_only=True)
class SandboxSettings:
    """`max_concurrent` executions run at once, others wait; without it twice as many as there are processors."""

    isolation: Isolation = "auto"
    limits: Limits = field(default_factory=Limits)
    max_concurrent: int | None = None


class _Execution(NamedTuple):
    connection: ProgramConnection
    level: LevelName


class Sandbox:
    def __init__(self, settings: SandboxSettings | None = None) -> None:
        self.settings = settings or SandboxSettings()
        self._jail: ForkServer | None = None
        self._starting = threading.Lock()
        self.at_once = self.settings.max_concurrent or 2 * (os.cpu_count() or 1)
        self.limiter = RateLimiter(max_concurrency=self.at_once)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def start(self) -> LevelName:
        """Start the fork server unless it runs; the level of isolation it has. Otherwise the first run does this."""
        return (await self._running()).level

    def start_now(self) -> LevelName:
        """The same for callers outside of an event loop; takes a second or two."""
        return self._start().level

    async def run(self, program: Program) -> Outcome:
        """What came of the program. SandboxError when the sandbox itself failed, never for what the program did."""
        seconds = program.timeout + program.compile_timeout + GRACE_SECONDS
        async with self.limiter.slot(), self._execution(program) as (connection, level):
            return outcome(await connection.receive(seconds), level)

    def session(self, program: Program | None = None) -> SandboxSession:
        """An interpreter that keeps its variables; `program` gives its files and limits, its code is not run."""
        return SandboxSession(self, program or Program(code=""))

    def close(self) -> None:
        """End the fork server and all that still runs."""
        jail, self._jail = self._jail, None
        if jail is not None:
            jail.stop()

    async def _running(self) -> ForkServer:
        jail = self._jail
        return jail if jail is not None and jail.alive else await asyncio.to_thread(self._start)

    def _start(self) -> ForkServer:
        with self._starting:
            if self._jail is None or not self._jail.alive:
                self.close()
                self._jail = strongest(self.settings.isolation)
            return self._jail

    @asynccontextmanager
    async def _execution(self, program: Program, session: bool = False) -> AsyncIterator[_Execution]:
        steps = plan(program)  # before anything is started: it may refuse
        jail = await self._running()
        with scratch_folder(jail.level) as folder:
            connection = await ProgramConnection.open(jail)
            try:
                await connection.send(order(program, steps, self.settings.limits, folder, session))
                yield _Execution(connection, jail.level)
            finally:
                await connection.end()


class SandboxSession:
    """One interpreter in a sandbox of its own. `close` ends it; a later `run` starts a fresh one."""

    def __init__(self, sandbox: Sandbox, program: Program) -> None:
        self._sandbox = sandbox
        self._program = replace(program, language="python")
        self._execution: _Execution | None = None
        self._ending = AsyncExitStack()
        self._turn = asyncio.Lock()

    async def run(self, code: str, timeout: float | None = None) -> Outcome:
        """Run `code` after all that ran before. When time is up it is interrupted, and only if that fails, ended."""
        seconds = timeout or self._program.timeout
        async with self._turn, self._sandbox.limiter.slot():
            if self._execution is None:
                entering = self._sandbox._execution(self._program, session=True)
                self._execution = await self._ending.enter_async_context(entering)
            connection, level = self._execution
            kept = False
            try:
                await connection.send({"code": code, "timeout": seconds})
                came = outcome(await connection.receive(seconds + GRACE_SECONDS), level)
                kept = not came.state_lost
            finally:
                if not kept:
                    await self.close()
            return came

    async def close(self) -> None:
        self._execution = None
        await self._ending.aclose()


@cache
def shared_sandbox(settings: SandboxSettings) -> Sandbox:
    """The one sandbox of this process with these settings: a fork server is worth sharing."""
    return Sandbox(settings)
