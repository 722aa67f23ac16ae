"""A request that fails on its way to an MCP server fails alone, and says whether the server can have seen it.

The SDK ends a whole session, with every call under way, when one request meets a refused connection. So the client it
is given answers such a request itself, with a JSON-RPC error of a code below, which only that call gets to see.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import urlsplit

import httpx2

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
