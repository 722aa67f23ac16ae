"""Starts vLLM or SGLang such that every request must carry the run's token:

    RALLY_ENGINE_TOKEN=... python rally_server_launcher.py MODULE ARGUMENTS...

It runs `python -m MODULE ARGUMENTS` and needs only the standard library. The token is never on the command line, which
every user of the machine can read. vLLM's own key leaves most control routes open, so vLLM is given `TokenCheck` as
middleware. SGLang's key covers all routes but /health and /metrics.
"""

from __future__ import annotations

import hmac
import os
import runpy
import sys
from collections.abc import Awaitable, Callable
from typing import Any

VARIABLE = "RALLY_ENGINE_TOKEN"
MIDDLEWARE = "rally_server_launcher.TokenCheck"  # as vLLM imports it, in each of its processes
REFUSAL = b'{"error": {"message": "this server belongs to a training run and requires its token", "code": 401}}'

Receive = Callable[[], Awaitable[Any]]
Send = Callable[[dict[str, Any]], Awaitable[None]]


class TokenCheck:
    """ASGI middleware that refuses requests without the token, except to /health."""

    def __init__(self, app: Callable[..., Awaitable[None]]) -> None:
        self._app = app
        self._expected = f"Bearer {os.environ[VARIABLE]}".encode()

    async def __call__(self, scope: dict[str, Any], receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or scope.get("path") == "/health" or self._allowed(scope):
            await self._app(scope, receive, send)
        elif scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1008})
        else:
            headers = [(b"content-type", b"application/json"), (b"connection", b"close")]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": REFUSAL})

    def _allowed(self, scope: dict[str, Any]) -> bool:
        given = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        return len(given) == 1 and hmac.compare_digest(given[0], self._expected)


def main(module: str, arguments: list[str]) -> None:
    token = os.environ[VARIABLE]
    sys.path[0] = os.getcwd()  # as for python -m
    sys.path.append(os.path.dirname(os.path.abspath(__file__)))  # child processes get it too
    package = module.partition(".")[0]
    extra = ["--api-key", token] if package == "sglang" else ["--middleware", MIDDLEWARE]
    sys.argv = [module, *arguments, *extra]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
