"""Any number of requests at once over HTTP, each on a connection of its own, which a later one finds again.

httpx's own pool looks, for every request and every answer, at each of its connections and from there at all others:
with 256 in flight a request took 20 ms of this process, several times what a GPU needs for it.
"""

from __future__ import annotations

import ssl

import httpx

IDLE_SECONDS = 3.0  # servers hang up after 5, and a request must not meet that


class Lines(httpx.AsyncBaseTransport):
    """A transport for one event loop; how many ask at once is up to who asks. Answers are read whole."""

    def __init__(self, *, secure: bool) -> None:
        # Without TLS there is nothing to verify, and reading all certificates of this world takes half a second.
        self._tls = httpx.create_ssl_context() if secure else ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        self._idle: list[httpx.AsyncHTTPTransport] = []  # the one used last is taken first, so that the others expire

    async def handle_async_request(self, request: httpx.Request) -> httpx.Response:
        line = self._idle.pop() if self._idle else self._open()
        try:
            return await _whole(line, request)
        finally:
            self._idle.append(line)  # also after a failure: it opens a new connection when it needs one

    async def aclose(self) -> None:
        idle, self._idle = self._idle, []
        for line in idle:
            await line.aclose()

    def _open(self) -> httpx.AsyncHTTPTransport:
        limits = httpx.Limits(max_connections=1, max_keepalive_connections=1, keepalive_expiry=IDLE_SECONDS)
        return httpx.AsyncHTTPTransport(verify=self._tls, limits=limits, trust_env=False)


async def _whole(line: httpx.AsyncHTTPTransport, request: httpx.Request) -> httpx.Response:
    answer = await line.handle_async_request(request)
    assert isinstance(answer.stream, httpx.AsyncByteStream)
    try:
        body = b"".join([part async for part in answer.stream])
    finally:
        await answer.aclose()
    return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(body))
