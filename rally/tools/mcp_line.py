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

from rally.tools.mcp_config import Server
from rally.tools.mcp_connection import CLOSING_SECONDS, CannotStart, Connection, McpFailure, Unsent

ATTEMPTS = 5  # failures in a row after which a server is left alone
FIRST_PAUSE = 0.25  # seconds before the second attempt; doubled for each after it
LEFT_ALONE = 30.0  # seconds for which calls to a server that keeps failing fail at once

STATE_LOST = "; what it kept from earlier calls is lost, and the next call finds it started anew"

Value = TypeVar("Value")

_log = logging.getLogger(__name__)


class Hub:
    """The thread in which connections live."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._connections: set[Connection] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="rally-mcp", daemon=True)
        self._thread.start()
        atexit.register(self._close_all)

    def connect(self, server: Server) -> Connection:
        """Must be called in the hub's thread."""
        connection = Connection(server)
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


class Line:
    """A connection to one server that is opened when needed and opened again when lost. Lives in the hub.

    `keeps_state`: earlier calls matter to later ones, so a server that was started anew must be told to the model.
    """

    def __init__(self, server: Server, *, keeps_state: bool) -> None:
        self.server = server
        self._keeps_state = keeps_state
        self._opening: asyncio.Task[Connection] | None = None
        self._current: Connection | None = None
        self._failures = 0
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

    async def _connected(self) -> Connection:
        if self._closed:
            raise McpFailure(f"the MCP server {self.server.name!r} was closed with its run")
        if self._opening is None or (self._opening.done() and self._opening.exception() is not None):
            self._refuse_while_left_alone()
            self._opening = asyncio.create_task(self._open())
        # Shielded, because one call's deadline must not undo what another still waits for.
        return await asyncio.shield(self._opening)

    async def _open(self) -> Connection:
        while True:
            if 0 < self._failures < ATTEMPTS:
                await asyncio.sleep(FIRST_PAUSE * 2 ** (self._failures - 1) * random.uniform(0.5, 1.0))
            connection = hub().connect(self.server)
            try:
                await connection.ready()
                self._current = connection
                return connection
            except asyncio.CancelledError:
                await connection.close()
                raise
            except McpFailure as failure:
                self._failed(str(failure))
                if isinstance(failure, CannotStart) or self._failures >= ATTEMPTS:
                    self._left_alone_until = asyncio.get_running_loop().time() + LEFT_ALONE
                    raise

    def _lost(self, connection: Connection) -> None:
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


@cache
def _tell_once(problem: str) -> None:
    """Each kind of trouble once: a run makes thousands of calls."""
    _log.warning("%s", problem)
