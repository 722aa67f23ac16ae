"""Keeps a connection to an MCP server and reconnects, with growing pauses, when it is lost.

After too many failures in a row, calls fail at once for LEFT_ALONE seconds. A call that the server has not seen is sent
a second time; one that it may have seen is not. A server that lets a call time out and then does not list its tools
either is killed and restarted; over HTTP, the session is opened anew. All connections of a process live in one thread
with its own event loop (`Hub`), so tools can be listed before the event loop of the run exists, and servers are served
during an update.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import random
import threading
from collections.abc import Coroutine
from contextlib import suppress
from functools import cache
from typing import Any, TypeVar

import mcp_types as types

from rally.tools.mcp.config import Server
from rally.tools.mcp.connection import CLOSING_SECONDS, CannotStart, McpConnection, McpFailure, Unsent

ATTEMPTS = 8  # failures in a row after which calls fail at once
FIRST_ATTEMPTS = 2  # the same for a program that has never started: one for each handshake
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0  # seconds before the second attempt, doubled for each further one
LEFT_ALONE = 15.0  # seconds without a new attempt at a server that keeps failing
CHECK_SECONDS = 5.0  # for a server to list its tools after a call was given up

STATE_LOST = "; its state from earlier calls is lost, and the next call finds it restarted"

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class Hub:
    """The thread in which connections live."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._connections: set[McpConnection] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rally-mcp", daemon=True)
        self._thread.start()
        atexit.register(self._close_all)

    def connect(self, server: Server, *, old_handshake: bool) -> McpConnection:
        """Must be called in the hub's thread."""
        connection = McpConnection(server, old_handshake=old_handshake)
        self._connections.add(connection)
        connection.owner.add_done_callback(lambda _: self._connections.discard(connection))
        return connection

    def run(self, work: Coroutine[Any, Any, Value], seconds: float | None = None) -> Value:
        """Run `work` in the hub, wait for it here."""
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(seconds)

    async def ask(self, work: Coroutine[Any, Any, Value]) -> Value:
        """Run `work` in the hub, wait for it in any event loop; cancelling here cancels there."""
        return await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(work, self._loop))

    def start(self, work: Coroutine[Any, Any, Any]) -> None:
        """Run `work` in the hub, wait for nothing."""
        asyncio.run_coroutine_threadsafe(work, self._loop)

    def _close_all(self) -> None:
        async def close() -> None:
            await asyncio.gather(*(connection.close() for connection in list(self._connections)))

        with suppress(TimeoutError):  # the program ends in any case
            self.run(close(), CLOSING_SECONDS + 1)


@cache
def hub() -> Hub:
    return Hub()


class McpClient:
    """A connection to one server, opened when needed and reopened when lost. Its methods run in the hub.

    `keeps_state`: later calls depend on earlier ones, so the model is told when the server was restarted.
    `old_handshake`: the server is not asked which protocols it knows. Some servers exit on that request, so until an
    attempt has succeeded, each attempt uses the other handshake than the last.
    """

    def __init__(self, server: Server, *, keeps_state: bool, old_handshake: bool = False) -> None:
        self.server = server
        self.old_handshake = old_handshake
        self._keeps_state = keeps_state
        self._opening: asyncio.Task[McpConnection] | None = None
        self._current: McpConnection | None = None
        self._check: asyncio.Task[None] | None = None
        self._endings: set[asyncio.Task[None]] = set()
        self._failures = 0
        self._has_run = False
        self._left_alone_until = 0.0
        self._last_failure = ""
        self._closed = False

    async def list_tools(self) -> list[types.Tool]:
        return (await self._connected()).tools

    async def call(self, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        connection = await self._connected()
        try:
            result = await self._checked_call(connection, tool, arguments)
        except Unsent as unsent:
            self._lost(connection)
            if self._keeps_state:
                raise McpFailure(f"{unsent}{STATE_LOST}") from None
            result = await (await self._connected()).call(tool, arguments)
        except McpFailure as failure:
            if not connection.closed:
                self._failures = 0
                raise
            self._lost(connection)
            raise McpFailure(f"{failure}{STATE_LOST if self._keeps_state else ''}") from None
        self._failures = 0
        return result

    async def close(self) -> None:
        self._closed = True
        for task in (self._opening, self._check):
            if task is not None:
                task.cancel()
                await asyncio.wait({task})
        if self._current is not None:
            await self._current.close()
        if self._endings:
            await asyncio.wait(self._endings)

    async def _connected(self) -> McpConnection:
        if self._check is not None:
            await asyncio.wait({self._check})  # a call to a server that hangs would be lost
        if self._closed:
            raise McpFailure(f"the MCP server {self.server.name!r} was closed with its run")
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._refuse_while_left_alone()
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_seen)
        # Shielded: the deadline of one call must not cancel a connection that another call waits for.
        return await asyncio.shield(self._opening)

    async def _open(self) -> McpConnection:
        while True:
            if 0 < self._failures < self._attempts:
                pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2 ** (self._failures - 1))
                await asyncio.sleep(pause * random.uniform(0.5, 1.0))
            connection = hub().connect(self.server, old_handshake=self.old_handshake)
            try:
                await connection.ready()
                self._current = connection
                self._has_run = True
                return connection
            except asyncio.CancelledError:
                await connection.close()
                raise
            except McpFailure as failure:
                self._failed(str(failure))
                if not self._has_run:
                    self.old_handshake = not self.old_handshake
                if isinstance(failure, CannotStart) or self._failures >= self._attempts:
                    self._left_alone_until = asyncio.get_running_loop().time() + LEFT_ALONE
                    raise

    @property
    def _attempts(self) -> int:
        return ATTEMPTS if self._has_run or self.server.transport != "stdio" else FIRST_ATTEMPTS

    async def _checked_call(
        self, connection: McpConnection, tool: str, arguments: dict[str, Any]
    ) -> types.CallToolResult:
        calling = asyncio.create_task(connection.call(tool, arguments))
        try:
            await asyncio.wait({calling})
        except asyncio.CancelledError:  # a deadline has passed; the next call must already wait for the check
            calling.cancel()
            self._start_check(connection)
            raise
        return calling.result()

    def _start_check(self, connection: McpConnection) -> None:
        if connection is self._current and not connection.closed and self._check is None and not self._closed:
            self._check = asyncio.create_task(self._restart_if_stuck(connection))

    async def _restart_if_stuck(self, connection: McpConnection) -> None:
        """End a connection whose server does not answer. Its running calls fail, the next call opens a new one."""
        try:
            if not await connection.answers(CHECK_SECONDS):
                self._lost(connection)
                ending = asyncio.create_task(connection.close())  # a new server need not wait for the end of the old
                self._endings.add(ending)
                ending.add_done_callback(self._endings.discard)
        finally:
            self._check = None

    def _lost(self, connection: McpConnection) -> None:
        """Count the loss once, however many calls notice it; the others wait for the new connection."""
        connection.retire()
        if connection is self._current:
            self._current = self._opening = None
            self._failed(connection.ending())
            if self._failures >= self._attempts:
                self._left_alone_until = asyncio.get_running_loop().time() + LEFT_ALONE

    def _failed(self, problem: str) -> None:
        self._failures += 1
        self._last_failure = problem
        _warn_once(problem)

    def _refuse_while_left_alone(self) -> None:
        seconds = self._left_alone_until - asyncio.get_running_loop().time()
        if seconds > 0:
            raise McpFailure(f"{self._last_failure}; the next attempt is in {seconds:.0f} seconds")


def _seen(opening: asyncio.Task[McpConnection]) -> None:
    """Retrieve the exception: if all waiting calls were cancelled, asyncio would log it as never retrieved."""
    if not opening.cancelled():
        opening.exception()


@cache
def _warn_once(problem: str) -> None:
    """Log each problem once: a run makes thousands of calls."""
    _log.warning("%s", problem)
