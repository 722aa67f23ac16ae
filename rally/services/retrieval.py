"""The retrieval server: a search index over HTTP, with Search-R1's `/retrieve`, field for field.

    POST /retrieve  {"queries": [text, ...], "topk": number or null, "return_scores": bool}
      -> {"result": [[{"document": {...}, "score": number}, ...], ...]}     with return_scores: true
      -> {"result": [[{...}, ...], ...]}                                   without
    GET  /health    {"status": "ok", "kind": "bm25", "passages": 4947, "topk": 3}

There is one list per query, in order, best passage first, of at most `topk` passages. If `topk` is null, 0 or absent,
the server's default applies. A document is the whole line of the corpus, and always has `contents`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rally.retrieval import Batcher, Overloaded, ScoredPassage, SearchIndex
from rally.services.http_guard import http_error
from rally.services.http_server import carries

MAX_TOPK, MAX_QUERIES, MAX_HITS = 1000, 8192, 200_000


class RetrieveRequest(BaseModel):
    queries: list[str] = Field(max_length=MAX_QUERIES)
    topk: int | None = Field(default=None, ge=0, le=MAX_TOPK)
    return_scores: bool = False


def create_app(index: SearchIndex, topk: int = 3, token: str | None = None) -> Starlette:
    """The server as an ASGI application; with a token, `/retrieve` requires it as `Authorization: Bearer TOKEN`."""
    service = _RetrievalService(index, topk, token)
    routes = [Route("/retrieve", service.retrieve, methods=["POST"]), Route("/health", service.health)]
    return Starlette(routes=routes, lifespan=service.lifespan, exception_handlers={HTTPException: http_error})


class _RetrievalService:
    def __init__(self, index: SearchIndex, topk: int, token: str | None) -> None:
        self._index = index
        self._topk = topk
        self._token = token
        self._batcher = Batcher(index)

    @asynccontextmanager
    async def lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        self._batcher.close()

    async def retrieve(self, request: Request) -> Response:
        if not self._authorized(request):
            return _error(401, "this server requires its token", {"WWW-Authenticate": "Bearer"})
        try:
            body = RetrieveRequest.model_validate_json(await request.body())
            topk = body.topk or self._topk
            if len(body.queries) * topk > MAX_HITS:
                return _error(
                    422, f"{len(body.queries)} queries of {topk} hits are more than {MAX_HITS} hits; ask for fewer"
                )
            results = await self._batcher.search(body.queries, topk)
        except ValidationError as error:
            return _error(422, error.errors(include_url=False, include_context=False, include_input=False))
        except Overloaded as error:
            return _error(503, str(error), {"Retry-After": "1"})
        return Response(response_body(results, body.return_scores), media_type="application/json")

    async def health(self, request: Request) -> Response:
        facts = {"status": "ok", "kind": self._index.kind, "passages": len(self._index), "topk": self._topk}
        return JSONResponse(facts)

    def _authorized(self, request: Request) -> bool:
        return carries(self._token, request.headers.get("Authorization", ""))


def response_body(results: Sequence[Sequence[ScoredPassage]], scores: bool) -> bytes:
    """The body of a response. Passages are stored as JSON, so they are joined without parsing."""
    lists = [b",".join(_scored(hit) if scores else hit.raw for hit in hits) for hits in results]
    return b'{"result":[' + b",".join(b"[" + hits + b"]" for hits in lists) + b"]}"


def _scored(hit: ScoredPassage) -> bytes:
    return b'{"document":%b,"score":%b}' % (hit.raw, repr(hit.score).encode())


def _error(status: int, detail: object, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail}, status, headers)
