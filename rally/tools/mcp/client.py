"""A call to an MCP server outlives the server: it is opened again, with growing pauses, and given up for a while.

A call that the server has not seen is sent once more; one that it may have seen never is. All connections of a process
live in one thread with an event loop of its own (`Hub`). So tools can be listed before a run's event loop exists, and a
server is heard while the run computes an update.
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

ATTEMPTS = 8  # failures in a row after which a server is left alone
FIRST_ATTEMPTS = 2  # the same for a program that has never run: one for each handshake
FIRST_PAUSE, LONGEST_PAUSE = 0.25, 4.0  # seconds before the second attempt; doubled for each after it
LEFT_ALONE = 15.0  # seconds for which calls to a server that keeps failing fail at once

STATE_LOST = "; what it kept from earlier calls is lost, and the next call finds it started anew"

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
    """A connection to one server that is opened when needed and opened again when lost. Lives in the hub.

    `keeps_state`: earlier calls matter to later ones, so a server that was started anew must be told to the model.
    `old_handshake`: the server is not asked first which protocols it knows. Some end when they are, so as long as no
    attempt went well, the next one tries the other way.
    """

    def __init__(self, server: Server, *, keeps_state: bool, old_handshake: bool = False) -> None:
        self.server = server
        self.old_handshake = old_handshake
        self._keeps_state = keeps_state
        self._opening: asyncio.Task[McpConnection] | None = None
        self._current: McpConnection | None = None
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
            result = await connection.call(tool, arguments)
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
        if self._opening is not None:
            self._opening.cancel()
            await asyncio.wait({self._opening})
        if self._current is not None:
            await self._current.close()

    async def _connected(self) -> McpConnection:
        if self._closed:
            raise McpFailure(f"the MCP server {self.server.name!r} was closed with its run")
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._refuse_while_left_alone()
            self._opening = asyncio.create_task(self._open())
            self._opening.add_done_callback(_seen)
        # Shielded, because one call's deadline must not undo what another still waits for.
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

    def _lost(self, connection: McpConnection) -> None:
        """Whoever notices first counts it; the others find a new connection under way."""
        connection.retire()
        if connection is self._current:
            self._current = self._opening = None
            self._failed(connection.ending())

    def _failed(self, problem: str) -> None:
        self._failures += 1
        self._last_failure = problem
        _tell_once(problem)

    def _refuse_while_left_alone(self) -> None:
        seconds = self._left_alone_until - asyncio.get_running_loop().time()
        if seconds > 0:
            raise McpFailure(f"{self._last_failure}; it is tried again in {seconds:.0f} seconds")


def _seen(opening: asyncio.Task[McpConnection]) -> None:
    """Whoever waited for it may have given up, and asyncio would print a traceback for an error nobody looks at."""
    if not opening.cancelled():
        opening.exception()


@cache
def _tell_once(problem: str) -> None:
    """Each kind of trouble once: a run makes thousands of calls."""
    _log.warning("%s", problem)
