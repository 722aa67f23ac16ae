"""Holds one session with an MCP server, over stdio, streamable HTTP or SSE, in one task.

The task opens, holds and closes the session, because the SDK's task groups must be exited by the task that entered
them. Calls may come from any task of the same event loop. A failed call raises `Unsent` if the server has not seen it,
and `McpFailure` otherwise; the reason why a session ended is kept.
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
CUT_OFF = 2  # the request was sent, and the connection broke before the answer
SESSION_UNKNOWN = 3  # the server was restarted and rejects the old session; it has not handled the request
REFUSED = 4  # a token is missing or wrong

SESSION_HEADER = "mcp-session-id"
BAD_SESSION = -32000  # the code of TypeScript SDK servers, with HTTP 400, for an unknown session


class McpHttpClient(httpx2.AsyncClient):
    """The HTTP client for one server. Transport errors become JSON-RPC errors with the codes above.

    Only connecting has a timeout of its own; the rest is bounded by the deadline of the call.
    """

    def __init__(self, url: str, headers: Mapping[str, str]) -> None:
        local = urlsplit(url).hostname in ("localhost", "127.0.0.1", "::1")
        super().__init__(
            headers=dict(headers),
            timeout=httpx2.Timeout(None, connect=30.0),
            limits=httpx2.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=5.0),
            verify=url.startswith("https:"),  # reading the certificates takes half a second
            trust_env=not local,  # requests to this machine must not go through a proxy
        )

    async def send(self, request: httpx2.Request, **options: Any) -> httpx2.Response:
        try:
            response = await super().send(request, **options)
        except (httpx2.ConnectError, httpx2.ConnectTimeout) as error:
            return _failure(request, NOT_SENT, str(error) or type(error).__name__)
        except httpx2.TransportError as error:
            return _failure(request, CUT_OFF, str(error) or type(error).__name__)
        return await _classified(request, response)


async def _classified(request: httpx2.Request, response: httpx2.Response) -> httpx2.Response:
    if response.status_code in (401, 403):
        await response.aclose()
        return _failure(request, REFUSED, f"HTTP {response.status_code}, so its token or headers are wrong")
    if SESSION_HEADER not in request.headers or response.status_code not in (400, 404):
        return response
    body = await response.aread()
    if response.status_code == 404 or _code(body) == BAD_SESSION:
        return _failure(request, SESSION_UNKNOWN, "it was restarted")
    return response


def _code(body: bytes) -> int | None:
    try:
        code = json.loads(body)["error"]["code"]
    except (ValueError, KeyError, TypeError):
        return None
    return code if isinstance(code, int) else None


def _failure(request: httpx2.Request, code: int, message: str) -> httpx2.Response:
    if request.method == "DELETE":  # ends a session that no longer exists
        return httpx2.Response(204, request=request)
    error = {"jsonrpc": "2.0", "id": None, "error": {"code": code, "message": message}}
    return httpx2.Response(503, json=error, request=request)


MAX_TOOLS = 10_000  # bounds the listing of a server that pages without end
STDERR_TAIL = 400  # characters of a server's stderr to keep
CLOSING_SECONDS = 8.0  # the SDK kills a process within 6.5 s; a web server may hang while closing
IDLE_SECONDS = 86_400.0  # the SDK's default ends an event stream after five silent minutes, as during an update

_log = logging.getLogger(__name__)
# The SDK logs a traceback for every line that is not a message; McpConnection warns once instead.
logging.getLogger("mcp.client.stdio").addFilter(lambda record: not str(record.msg).startswith("Failed to parse"))


class McpFailure(RallyError):
    """An MCP server failed to answer a call. The text goes to the model."""

    outage = True


class McpRefusal(McpFailure):
    """The server works, and its answer is an error."""

    outage = False


class Unsent(McpFailure):
    """The server has not seen the call, so it may be sent again."""


class CannotStart(McpFailure):
    """The server cannot be started; another attempt would fail too."""


class McpConnection:
    """One session. Its task starts to open it at once; `ready` waits until it is open."""

    def __init__(self, server: Server, *, old_handshake: bool = False) -> None:
        self.server = server
        self._mode = "legacy" if old_handshake else "auto"
        self.closed = False
        self.tools: list[types.Tool] = []
        self._reason = "its connection was closed"
        self._stderr = _StderrTail()
        self._noise = 0
        self._calls = 0
        self._stop = asyncio.Event()
        self._client: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self.owner = asyncio.create_task(self._hold(), name=f"mcp {server.name}")
        # A start that hangs in the SDK may not even end when it is cancelled; nobody must wait for it.
        late = server.startup_timeout + CLOSING_SECONDS
        watch = asyncio.get_running_loop().call_later(late, self._give_up)
        self._client.add_done_callback(lambda _: watch.cancel())

    async def ready(self) -> None:
        """Wait for the session. Raises CannotStart, or McpFailure when another attempt may succeed."""
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

    async def answers(self, seconds: float) -> bool:
        """Whether the server lists its tools within `seconds`; an error is an answer too. Newer protocols have no
        ping."""
        client = await asyncio.shield(self._client)
        try:
            async with asyncio.timeout(seconds):
                await client.session.list_tools()
        except TimeoutError:
            self._reason = f"it did not answer within {seconds:g} seconds after a call had timed out"
            return False
        except MCPError as error:
            if error.code in (NOT_SENT, CUT_OFF, SESSION_UNKNOWN, types.CONNECTION_CLOSED):
                self._reason = error.message
                return False
        except Exception as error:  # noqa: BLE001 - a stream of the SDK that is closed raises its own types
            self._reason = str(error) or type(error).__name__
            return False
        return True

    def retire(self) -> None:
        """Accept no more calls. The session ends after the last running one."""
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
        """Why the session ended."""
        text = self._stderr.text()
        stderr = f", stderr ends with: {text}" if text else ""
        return redact(f"the MCP server {self.server.name!r} is gone ({self._reason}{stderr})")

    async def _hold(self) -> None:
        try:
            async with AsyncExitStack() as stack:
                async with asyncio.timeout(self.server.startup_timeout):
                    client = await stack.enter_async_context(Client(self._transport(), mode=self._mode))
                    self.tools = await _list_tools(client)
                if self._client.done():  # it was given up meanwhile
                    return
                self._client.set_result(client)
                await self._stop.wait()
        except TimeoutError:
            self._fail(CannotStart, f"no answer within {self.server.startup_timeout:g} seconds of its start")
        except OSError as error:
            self._fail(CannotStart, error.strerror or str(error))
        except Exception as error:  # noqa: BLE001 - any error that ends a session goes to the waiting calls
            self._fail(_kind(error), _reason(error))
        finally:
            self.closed = True
            self._client.cancel()  # wakes calls that wait for a cancelled start
            self._stderr.close()

    def _give_up(self) -> None:
        self._fail(CannotStart, f"no answer within {self.server.startup_timeout:g} seconds of its start")
        self.closed = True
        self.owner.cancel()

    def _fail(self, kind: type[McpFailure], reason: str) -> None:
        self._reason = reason
        if not self._client.done():
            self._client.set_exception(kind(self.ending()))
            self._client.exception()  # marks it as retrieved, in case no call waits any more

    def _meaning(self, error: MCPError) -> RallyError:
        """The exception for an error answer."""
        name, text = self.server.name, redact(error.message.rstrip("."))
        if error.code in (NOT_SENT, SESSION_UNKNOWN):
            self._reason = error.message
            return Unsent(self.ending())
        if error.code == types.CONNECTION_CLOSED and error.message == "Connection closed":  # the SDK's message
            self.stream_ended()
        if error.code == CUT_OFF or (error.code == types.CONNECTION_CLOSED and self.closed):
            return McpFailure(f"the MCP server {name!r} ended during this call, which may have had its effect")
        if error.code == types.INVALID_PARAMS:
            return BadArguments(text)
        return McpRefusal(f"the MCP server {name!r} refused the call: {text} (code {error.code})")

    @asynccontextmanager
    async def _transport(self) -> AsyncIterator[tuple[Any, Any]]:
        async with self._streams() as (read, write):
            yield _ObservedStream(read, self), write

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
            encoding_error_handler="replace",  # invalid UTF-8 breaks one line and not the session
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
            _log.warning("the MCP server %r writes lines to stdout that are not messages; skipped", self.server.name)


class _ObservedStream:
    """The SDK's stream of incoming messages. It notifies its connection of its end and of lines that do not parse."""

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


class _StderrTail(asyncio.Protocol):
    """Reads a server's stderr, so that the server never blocks on it, and keeps its end."""

    def __init__(self) -> None:
        self._tail = b""
        self._pipe: asyncio.ReadTransport | None = None

    async def open(self) -> TextIO:
        """The file for the server to write to. The caller closes it once the server has started."""
        read, write = os.pipe()
        reading, _ = await asyncio.get_running_loop().connect_read_pipe(lambda: self, os.fdopen(read, "rb", 0))
        self._pipe = reading
        return os.fdopen(write, "w")

    def data_received(self, data: bytes) -> None:
        self._tail = (self._tail + data)[-4 * STDERR_TAIL :]

    def text(self) -> str:
        return " ".join(self._tail.decode("utf-8", "replace").split())[-STDERR_TAIL:]

    def close(self) -> None:
        if self._pipe is not None:
            self._pipe.close()


async def _list_tools(client: Client) -> list[types.Tool]:
    """All pages of the list. Later changes are ignored: the tools of a run must not change."""
    tools: list[types.Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += page.tools
        cursor = page.next_cursor
        if not cursor:
            return tools
        if len(tools) > MAX_TOOLS:
            raise McpFailure(f"it lists more than {MAX_TOOLS} tools")


def _root(error: BaseException) -> BaseException:
    """The innermost first exception of the SDK's nested groups."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error


def _kind(error: Exception) -> type[McpFailure]:
    root = _root(error)
    return CannotStart if isinstance(root, MCPError) and root.code == REFUSED else McpFailure


def _reason(error: Exception) -> str:
    root = _root(error)
    if isinstance(root, MCPError) and root.code == types.CONNECTION_CLOSED:
        return "it ended"
    return str(root) or type(root).__name__
