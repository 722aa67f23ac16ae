"""A session with an MCP server is opened, held and closed by one task, ends by name, and says what was never sent.

The SDK's task groups must be left by the task that entered them; calls may come from any task of the same event loop.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from types import TracebackType
from typing import Any, Self, TextIO
from urllib.parse import urlsplit

import httpx2
import mcp_types as types
from mcp import Client, MCPError, StdioServerParameters
from mcp.client.sse import sse_client
from mcp.client.stdio import stdio_client
from mcp.client.streamable_http import streamable_http_client

from rally.redact import redact
from rally.tools.mcp.config import Server
from rally.tools.schema import BadArguments
from rally.types import RallyError

NOT_SENT = 1  # the server cannot be reached
CUT_OFF = 2  # the request was sent, and the connection broke before an answer came
SESSION_UNKNOWN = 3  # the server was started anew and refuses the session of the old one, the request unseen
REFUSED = 4  # a token is missing or wrong

SESSION_HEADER = "mcp-session-id"
BAD_SESSION = -32000  # what servers on the TypeScript SDK answer, with HTTP 400, to a session they do not know


class McpHttpClient(httpx2.AsyncClient):
    """A client for one server. It has no time limits but for connecting: the call's deadline is the only one."""

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        super().__init__(
            headers=dict(headers),
            timeout=httpx2.Timeout(None, connect=30.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=5.0),
            verify=url.startswith("https:"),  # reading the certificates takes half a second
            trust_env=not local,  # a proxy for the world outside must not swallow what is asked of this machine
        )

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _failure(request, NOT_SENT, str(error) or type(error).__name__)
        except httpx2.TransportError as error:
            return _failure(request, CUT_OFF, str(error) or type(error).__name__)
        return await _judged(request, response)


async def _judged(request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
    if response.status_code in (401, 403):
        await response.aclose()
        return _failure(request, REFUSED, f"HTTP {response.status_code}, so its token or headers are not right")
    if SESSION_HEADER not in request.headers or response.status_code not in (400, 404):
        return response
    body = await response.aread()
    if response.status_code == 404 or _code(body) == BAD_SESSION:
        return _failure(request, SESSION_UNKNOWN, "it was started anew")
    return response


def _code(body: bytes) -> int | None:
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, int) else None


def _failure(request: httpx2.Request, code: int, message: str) -> httpx2.Response:
    if request.method == "DELETE":  # it ends a session, which by now is gone in any case
        return httpx2.Response(204, request=request)
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return httpx2.Response(503, json=error, request=request)


MAX_TOOLS = 10_000  # a server whose list has no end must not hold up the start
LAST_WORDS = 400  # characters of a server's stderr that are worth telling
CLOSING_SECONDS = 8.0  # the SDK kills a process within 6.5; a web server may hang on the good-bye
IDLE_SECONDS = 86_400.0  # the SDK would end an event stream that is silent for five minutes, as during an update

_log = logging.getLogger(__name__)
# A traceback for every line that is no message would fill the log; a Connection tells of it once, in a sentence.
logging.getLogger("mcp.client.stdio").addFilter(lambda record: not str(record.msg).startswith("Failed to parse"))


class McpFailure(RallyError):
    """A call that an MCP server did not answer as asked. The text is told to the model."""


class Unsent(McpFailure):
    """The server has not seen the call, so it may be sent again."""


class CannotStart(McpFailure):
    """A server that another attempt would not start either."""


class McpConnection:
    """One session. It opens at once, in a task of its own; `ready` waits for it."""

    def __init__(self, server: Server, *, old_handshake: bool = False) -> None:
        self.server = server
        self._mode = "legacy" if old_handshake else "auto"
        self.closed = False
        self.tools: list[types.Tool] = []
        self._reason = "its connection was closed"
        self._stderr = _LastWords()
        self._noise = 0
        self._calls = 0
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.owner = asyncio.create_task(self._hold(), name=f"mcp {server.name}")

    async def ready(self) -> None:
        """Raises why there is no session: CannotStart, or McpFailure where another attempt may go better."""
        await asyncio.shield(self._client)

    async def call(self, tool: str, arguments: dict[str, Any]) -> types.CallToolResult:
        client = await asyncio.shield(self._client)
        if self.closed:
            raise Unsent(self.ending())
        self._calls += 1
        try:
            return await client.call_tool(tool, arguments)
        except MCPError as error:
            raise self._meaning(error) from None
        finally:
            self._calls -= 1
            if self.closed and not self._calls:
                self._stop.set()

    def retire(self) -> None:
        """No call is accepted any more; the session ends after the last one under way."""
        self.closed = True
        if not self._calls:
            self._stop.set()

    async def close(self) -> None:
        """End the session and what was started for it: stdin closed, then SIGTERM, then SIGKILL."""
        self.closed = True
        self._stop.set()
        if not self._client.done():
            self.owner.cancel()
        done, _ = await asyncio.wait({self.owner}, timeout=CLOSING_SECONDS)
        if not done:
            self.owner.cancel()

    def ending(self) -> str:
        """Why there is no session any more."""
        words = self._stderr.text()
        said = f", and its last words were: {words}" if words else ""
        return redact(f"the MCP server {self.server.name!r} is gone ({self._reason}{said})")

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.server.startup_timeout):
                    client = await stack.enter_async_context(Client(self._transport(), mode=self._mode))
                    self.tools = await _list_tools(client)
                self._client.set_result(client)
                await self._stop.wait()
        except TimeoutError:
            self._fail(CannotStart, f"no answer within {self.server.startup_timeout:g} seconds of its start")
        except OSError as error:
            self._fail(CannotStart, error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - whatever ends a session is told to who waits for it
            self._fail(_kind(error), _words(error))
        finally:
            self.closed = True
            self._client.cancel()  # who still waits for a start that was broken off need not
            self._stderr.close()

    def _fail(self, kind: type[McpFailure], reason: str) -> None:
        self._reason = reason
        if not self._client.done():
            self._client.set_exception(kind(self.ending()))
            self._client.exception()  # looked at here: nobody may be waiting any more

    def _meaning(self, error: MCPError) -> RallyError:
        """What an error answer says about the call."""
        name, words = self.server.name, redact(error.message.rstrip("."))
        if error.code in (NOT_SENT, SESSION_UNKNOWN):
            self._reason = error.message
            return Unsent(self.ending())
        if error.code == types.CONNECTION_CLOSED and error.message == "Connection closed":  # the SDK's own words
            self.stream_ended()
        if error.code == CUT_OFF or (error.code == types.CONNECTION_CLOSED and self.closed):
            return McpFailure(f"the MCP server {name!r} ended during this call, which may have had its effect")
        if error.code == types.INVALID_PARAMS:
            return BadArguments(words)
        return McpFailure(f"the MCP server {name!r} refused the call: {words} (code {error.code})")

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[Any, Any]]:
        async with self._streams() as (read, write):
            yield _Watched(read, self), write

    def _streams(self) -> Any:
        server = self.server
        if server.transport == "stdio":
            return self._process()
        if server.transport == "sse":
            return sse_client(server.url, headers=dict(server.headers), sse_read_timeout=IDLE_SECONDS)
        return self._http()

    @asynccontextmanager
    async def _http(self) -> AsyncIterator[tuple[Any, Any]]:
        async with (
            McpHttpClient(self.server.url, self.server.headers) as client,
            streamable_http_client(self.server.url, http_client=client) as streams,
        ):
            yield streams

    @asynccontextmanager
    async def _process(self) -> AsyncIterator[tuple[Any, Any]]:
        server = self.server
        parameters = StdioServerParameters(
            command=server.command,
            args=list(server.args),
            env=dict(server.env),
            cwd=server.cwd,
            encoding_error_handler="replace",  # a byte that is no UTF-8 spoils its line, not the session
        )
        async with AsyncExitStack() as stack:
            with await self._stderr.open() as stderr:
                streams = await stack.enter_async_context(stdio_client(parameters, stderr))
            yield streams

    def stream_ended(self) -> None:
        self._reason = "it ended"
        self.retire()

    def stray_line(self) -> None:
        self._noise += 1
        if self._noise == 1:
            _log.warning("the MCP server %r writes lines to stdout that are no messages; skipped", self.server.name)


class _Watched:
    """The SDK's stream of incoming messages, which also tells its connection of its end and of lines that are none."""

    def __init__(self, read: Any, connection: McpConnection) -> None:
        self._read = read
        self._connection = connection

    def __getattr__(self, name: str) -> Any:
        return getattr(self._read, name)

    async def __aenter__(self) -> Self:
        await self._read.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> Any:
        return await self._read.__aexit__(kind, error, trace)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await self._read.__anext__()
        except StopAsyncIteration:
            self._connection.stream_ended()
            raise
        if isinstance(item, Exception):
            self._connection.stray_line()
        return item


class _LastWords(asyncio.Protocol):
    """Reads a server's stderr to its end, so that it never blocks, and keeps the last of it."""

    def __init__(self) -> None:
        self._tail = b""
        self._pipe: asyncio.ReadTransport | None = None

    async def open(self) -> TextIO:
        """The end to write to; it must be closed here once the server has it."""
        read, write = os.pipe()
        reading, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(read, "rb", 0))
        self._pipe = reading
        return os.fdopen(write, "w")

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-4 * LAST_WORDS :]

    def text(self) -> str:
        return " ".join(self._tail.decode("utf-8", "replace").split())[-LAST_WORDS:]

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()


async def _list_tools(client: Client) -> list[types.Tool]:
    """All pages. Later changes of the list are ignored: what the model is shown must not change during a run."""
    tools: list[types.Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools
        if len(tools) > MAX_TOOLS:
            raise McpFailure(f"its list of tools has no end (over {MAX_TOOLS})")


def _root(error: BaseException) -> BaseException:
    """What is at the bottom of the SDK's nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _kind(error: Exception) -> type[McpFailure]:
    root = _root(error)
    return CannotStart if isinstance(root, MCPError) and root.code == REFUSED else McpFailure


def _words(error: Exception) -> str:
    root = _root(error)
    if isinstance(root, MCPError) and root.code == types.CONNECTION_CLOSED:
        return "it ended"
    return str(root) or type(root).__name__
