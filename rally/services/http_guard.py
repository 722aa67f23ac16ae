"""The guard in front of every HTTP server of Rally: who may connect, with which headers, how much and for how long.

Web pages can send requests to servers of the machine on which they are shown. A request is therefore refused unless its
`Host` is one of the server's names (a page may point its own name at this machine), its `Origin`, if it has one, is the
server itself, and its body is declared as JSON, which a page cannot send to another origin without asking first.

`Guard` checks requests (ASGI). `uvicorn_options` bounds connections: their number, the size of a request's head, and
the time until it is complete.
"""

from __future__ import annotations

import asyncio
import resource
from collections.abc import Collection
from dataclasses import dataclass
from ipaddress import ip_address
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

MEBIBYTE = 1 << 20
BODIES = 16  # full-size bodies that are held at once
SPARE_FILES = 128  # file descriptors for everything but connections
CHUNK_BYTES = 8  # for the sizes of chunks, by byte of a body
READS = ("GET", "HEAD", "OPTIONS")
CLOSE = {"Connection": "close"}


@dataclass(frozen=True, kw_only=True)
class HttpLimits:
    """Sizes in bytes."""

    max_body: int = 8 * MEBIBYTE
    max_head: int = 64 << 10  # the request line and the headers
    head_seconds: float = 10.0  # from the connection, or the first byte, to the end of the headers
    body_seconds: float = 60.0
    max_connections: int = 2048
    keep_alive_seconds: int = 5


class HostNames(NamedTuple):
    """The names by which clients may call a server. Loopback names are always among them. `any_address`: so is every IP
    address, which no foreign web page can have as its name."""

    names: frozenset[str]
    any_address: bool = False

    @classmethod
    def of(cls, bound: str, others: Collection[str] = ()) -> HostNames:
        """For a server bound to an address or name: that one, and `others`."""
        address = _address(bound)
        return cls(frozenset(_bare(name) for name in (bound, *others)), address is not None and address.is_unspecified)

    def include(self, name: str) -> bool:
        address = _address(name)
        if name in self.names or name == "localhost":
            return True
        return address is not None and (address.is_loopback or self.any_address)


class Guard:
    """An ASGI application that refuses some requests to `app`, before their bodies are read, and bounds the others.
    `hosts` None: any name, for servers whose every request carries a secret."""

    def __init__(self, app: ASGIApp, hosts: HostNames | None, limits: HttpLimits) -> None:
        self._app, self._hosts, self._limits = app, hosts, limits
        self._held = 0  # bytes of the bodies of all running requests

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
        elif scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
        elif (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
        else:
            body = _BoundedBody(self, receive)
            try:
                await self._app(scope, body.receive, send)
            finally:
                self._held -= body.size

    def _refusal(self, scope: Scope) -> JSONResponse | None:
        headers: dict[bytes, list[str]] = {}
        for name, value in scope["headers"]:
            headers.setdefault(name.lower(), []).append(value.decode("latin-1"))
        hosts = headers.get(b"host", [])
        if len(hosts) != 1:
            return refused(400, f"a request needs one Host header, and this one has {len(hosts)}")
        if self._hosts is not None and not self._hosts.include(_bare(hosts[0])):
            name = _bare(hosts[0])[:100]
            return refused(403, f"this server does not answer as {name!r}; start it with --allow-host {name} if it may")
        if any(not _is_own(origin, hosts[0]) for origin in headers.get(b"origin", ())):
            return refused(403, "web pages of other origins may not use this server")
        if sum(len(name) + len(value) + 4 for name, value in scope["headers"]) > self._limits.max_head:
            return refused(431, f"the headers are larger than {self._limits.max_head} bytes")
        kinds = [kind.partition(";")[0].strip().lower() for kind in headers.get(b"content-type", ())]
        if scope["method"] not in READS and kinds != ["application/json"]:
            return refused(415, "send the body as JSON, with the header Content-Type: application/json")
        lengths = [int(length[:20]) for length in headers.get(b"content-length", ()) if length.isdecimal()]
        if max(lengths, default=0) > self._limits.max_body:
            return refused(413, self.too_large)
        return None

    @property
    def too_large(self) -> str:
        return f"the body is larger than {self._limits.max_body / MEBIBYTE:g} MiB; send less"

    def hold(self, size: int) -> None:
        """Count bytes of a body; HTTPException if too many are held."""
        if self._held + size > BODIES * self._limits.max_body:
            raise HTTPException(503, "too many large requests at once; try again later", {"Retry-After": "1", **CLOSE})
        self._held += size


class _BoundedBody:
    """Receives a body of bounded size within a bounded time. Beyond them it raises an HTTPException, which the
    application answers in its own format."""

    def __init__(self, guard: Guard, receive: Receive) -> None:
        self._guard, self._receive = guard, receive
        self._limits = guard._limits
        self._deadline: float | None = None
        self._whole = False
        self.size = 0

    async def receive(self) -> Message:
        if self._whole:  # what follows is the end of the connection, for which the application may wait
            return await self._receive()
        if self._deadline is None:
            self._deadline = asyncio.get_running_loop().time() + self._limits.body_seconds
        try:
            async with asyncio.timeout_at(self._deadline):
                message = await self._receive()
        except TimeoutError:
            problem = f"the body did not arrive within {self._limits.body_seconds:g} s"
            raise HTTPException(408, problem, CLOSE) from None
        if message["type"] == "http.request":
            size = len(message.get("body", b""))
            if self.size + size > self._limits.max_body:
                raise HTTPException(413, self._guard.too_large, CLOSE)
            self._guard.hold(size)
            self.size += size
            self._whole = not message.get("more_body", False)
        return message


def refused(status: int, sentence: str) -> JSONResponse:
    """A refusal that clients of OpenAI's API, of SandboxFusion and of Search-R1 all read."""
    error = {"message": sentence, "type": "invalid_request_error", "param": None, "code": None}
    return JSONResponse({"error": error, "detail": sentence}, status, CLOSE)


def http_error(request: Request, error: Exception) -> Response:
    """An HTTPException as `{"detail": ...}`, with its headers."""
    assert isinstance(error, HTTPException)
    return JSONResponse({"detail": error.detail}, error.status_code, dict(error.headers or {}))


def uvicorn_options(limits: HttpLimits) -> dict[str, Any]:
    """Options of uvicorn that bound its connections."""
    return {
        "http": _bounded_protocol(limits),
        "ws": "none",
        "timeout_keep_alive": limits.keep_alive_seconds,
        "access_log": False,
        "server_header": False,
    }


def _bounded_protocol(limits: HttpLimits) -> type[asyncio.Protocol]:
    """uvicorn's protocol, with a limit on connections, and on the size and time of a request's head. uvicorn itself
    waits for a head without end."""
    from uvicorn.protocols.http.auto import AutoHTTPProtocol

    files = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    most = limits.max_connections
    if files != resource.RLIM_INFINITY:
        most = max(1, min(most, files - SPARE_FILES))

    class BoundedProtocol(AutoHTTPProtocol):  # type: ignore[misc, valid-type]
        _timer: asyncio.TimerHandle | None = None
        _received = 0  # bytes since the last complete head that belong to no body: a head, chunk sizes, trailers
        _body = 0  # bytes of the body since then

        def connection_made(self, transport: Any) -> None:
            super().connection_made(transport)
            if len(self.connections) > most:
                self._turn_away(b"503 Service Unavailable")
            else:
                self._expect_head()

        def on_body(self, body: bytes) -> None:  # of httptools; h11 bounds everything but bodies itself
            if not self.cycle.response_complete:
                self._body += len(body)
            super().on_body(body)

        def data_received(self, data: bytes) -> None:
            if self.transport.is_closing():
                return
            before, body = self.cycle, self._body
            super().data_received(data)
            running = self.cycle is not None and not self.cycle.response_complete
            if self.cycle is not before or (running and not hasattr(self, "on_message_complete")):
                self._received = self._body = 0
            else:
                self._received += len(data) - (self._body - body)
            if self._received > limits.max_head + CHUNK_BYTES * self._body:
                self._turn_away(b"431 Request Header Fields Too Large")
            elif running or self.cycle is not before:
                self._stop_timer()
            else:
                self._expect_head()

        def connection_lost(self, exc: Exception | None) -> None:
            self._stop_timer()
            super().connection_lost(exc)

        def _expect_head(self) -> None:
            if self._timer is None:
                self._timer = self.loop.call_later(limits.head_seconds, self._turn_away, b"408 Request Timeout")

        def _stop_timer(self) -> None:
            if self._timer is not None:
                self._timer.cancel()
                self._timer = None

        def _turn_away(self, status: bytes) -> None:
            self._stop_timer()
            if not self.transport.is_closing():
                if self.cycle is None or self.cycle.response_complete:  # else this would become part of an answer
                    head = b"HTTP/1.1 " + status + b"\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
                    self.transport.write(head)
                self.transport.close()

    return BoundedProtocol


def _bare(host: str) -> str:
    """A host without its port, brackets and letter case."""
    host = host.strip().lower()
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host if host.count(":") > 1 else host.partition(":")[0].rstrip(".")


def _address(name: str) -> Any:
    try:
        return ip_address(name)
    except ValueError:
        return None


def _is_own(origin: str, host: str) -> bool:
    """Whether an Origin is the server itself, as the client names it."""
    try:
        parts = urlsplit(origin)
    except ValueError:
        return False
    return parts.scheme in ("http", "https") and parts.netloc.lower() == host.strip().lower()
