"""The viewer's web server. It rejects requests for foreign hosts, and serves runs by number and files by known names.

The page may load nothing from other origins.
"""

from __future__ import annotations

import hmac
import re
import sqlite3
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any
from urllib.parse import parse_qs, quote, unquote

from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request, cookie_parser
from starlette.responses import RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from rally.redact import redacted_json
from rally.types import RallyError
from rally.view.page import INDEX, MIME, page_files
from rally.view.run_data import NotRecorded, RunData

POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "cross-origin-resource-policy": "same-origin",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-store",
}
COOKIE = "rally_view"
LOOPBACK = re.compile(r"(localhost|127\.0\.0\.1|\[::1\])(:\d+)?")


class HostCheck:
    """Guards all requests. Without a token, only requests for a local host name are accepted, which prevents DNS
    rebinding. With a token, the first link carries it, and a cookie does afterwards."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app, self._token = app, token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return

        async def send_guarded(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in HEADERS.items()]
                message["headers"] = [*message.get("headers", ()), *more]
            await send(message)

        answer = self._refusal(scope) or self._app
        await answer(scope, receive, send_guarded)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = {name: value.decode("latin-1") for name, value in scope["headers"]}
        if scope["method"] not in ("GET", "HEAD"):
            return _text("this server only shows", 405)
        if self._token is None:
            own = LOOPBACK.fullmatch(headers.get(b"host", ""))
            return None if own else _text("this page is only served to the machine it runs on", 403)
        if self._is_token(parse_qs(scope["query_string"].decode("latin-1")).get("token", [""])[0]):
            return self._welcome()
        # Browsers also send cookies of other local servers, at which the standard library's parser stops.
        if self._is_token(unquote(cookie_parser(headers.get(b"cookie", "")).get(COOKIE, ""))):
            return None
        return _text("open the link that `rally view` printed; it carries the token", 401)

    def _is_token(self, value: str) -> bool:
        assert self._token is not None
        return hmac.compare_digest(value.encode(), self._token.encode())

    def _welcome(self) -> Response:
        assert self._token is not None
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(COOKIE, quote(self._token, safe=""), httponly=True, samesite="strict")
        return answer


def create_app(runs: Sequence[RunData], token: str | None = None) -> Starlette:
    """The application over these runs. Their indexes follow the folders while it runs."""
    files = page_files()

    @asynccontextmanager
    async def lifespan(_: Starlette) -> AsyncIterator[None]:
        for run in runs:
            run.indexer.start()
        yield
        for run in runs:
            run.indexer.close()

    def static(request: Request) -> Response:
        name = request.path_params.get("name", INDEX)
        if name not in files:
            return _text("there is no such file", 404)
        return Response(files[name], media_type=MIME[name.rpartition(".")[2]])

    def state(_: Request) -> Any:
        return {"runs": [run.state() for run in runs]}

    def image(request: Request) -> Response:
        try:
            found = _run(runs, request).image(request.path_params["name"])
        except NotRecorded as problem:
            return _text(str(problem), 404)
        return Response(found.data, media_type=found.mime)

    routes = [
        Route("/", static),
        Route("/api/runs/{run:int}/images/{name}", image),
        Route("/page/{name}", static),
        Route("/api/state", _json(state)),
        Route("/api/runs/{run:int}/metrics", _json(lambda r: _run(runs, r).metrics(r.query_params.getlist("name")))),
        Route("/api/runs/{run:int}/facets", _json(lambda r: _run(runs, r).facets())),
        Route("/api/runs/{run:int}/config", _json(lambda r: _run(runs, r).config())),
        Route("/api/runs/{run:int}/rewards", _json(lambda r: _run(runs, r).rewards(r.query_params.get("kind", "")))),
        Route(
            "/api/runs/{run:int}/tasks",
            _json(lambda r: _run(runs, r).tasks(r.query_params.get("kind", ""), r.query_params.get("pass", ""))),
        ),
        Route("/api/runs/{run:int}/rows", _json(lambda r: _run(runs, r).rows(dict(r.query_params)))),
        Route("/api/runs/{run:int}/beside", _json(lambda r: _run(runs, r).beside(dict(r.query_params)))),
        Route(
            "/api/runs/{run:int}/timeline/{step:int}", _json(lambda r: _run(runs, r).timeline(r.path_params["step"]))
        ),
        Route("/api/runs/{run:int}/episode", _json(lambda r: _run(runs, r).episode(r.query_params.get("id", "")))),
    ]
    middleware = [Middleware(HostCheck, token=token), Middleware(GZipMiddleware, minimum_size=4096, compresslevel=1)]
    return Starlette(routes=routes, middleware=middleware, lifespan=lifespan)


def _run(runs: Sequence[RunData], request: Request) -> RunData:
    number: int = request.path_params["run"]
    if number >= len(runs):
        raise NotRecorded(f"there is no run {number}; there are {len(runs)}")
    return runs[number]


def _json(answer: Callable[[Request], Any]) -> Callable[[Request], Response]:
    def endpoint(request: Request) -> Response:
        try:
            return _answered(answer(request), 200)
        except NotRecorded as problem:
            return _answered({"error": str(problem)}, 404)
        except RallyError as problem:
            return _answered({"error": str(problem)}, 400)
        except sqlite3.DatabaseError as problem:
            return _answered({"error": f"the index cannot be read now ({problem}); it is rebuilt if it is gone"}, 503)

    return endpoint


def _answered(value: Any, status: int) -> Response:
    # Escaped to ASCII, because recorded text may hold lone surrogates, which have no UTF-8.
    return Response(redacted_json(value), status, media_type="application/json")


def _text(text: str, status: int) -> Response:
    return Response(text, status, media_type="text/plain")
