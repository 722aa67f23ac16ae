"""A search index over HTTP: Search-R1's `/retrieve`, field for field, for many clients at once.

    POST /retrieve  {"queries": [text, ...], "topk": number or null, "return_scores": bool}
      -> {"result": [[{"document": {...}, "score": number}, ...], ...]}     with return_scores: true
      -> {"result": [[{...}, ...], ...]}                                   without
    GET  /health    {"status": "ok", "kind": "bm25", "passages": 4947, "topk": 3}

One list per query, in order, best passage first; a query that fewer than `topk` passages fit gets fewer. `topk` that is
null, 0 or absent is the server's own. A document is the line of the corpus, whole, and always has `contents`.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from pydantic import BaseModel, Field, ValidationError
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rally.retrieval import Batcher, Overloaded, ScoredPassage, SearchIndex
from rally.services.http_server import carries

MAX_TOPK = 1000


class RetrieveRequest(BaseModel):
    queries: list[str]
    topk: int | None = Field(default=None, ge=0, le=MAX_TOPK)
    return_scores: bool = False


def create_app(index: SearchIndex, topk: int = 3, token: str | None = None) -> Starlette:
    """The server as an ASGI application; with a token, `/retrieve` wants it as `Authorization: Bearer TOKEN`."""
    service = _RetrievalService(index, topk, token)
    routes = [Route("/retrieve", service.retrieve, methods=["POST"]), Route("/health", service.health)]
    return Starlette(routes=routes, lifespan=service.lifespan)


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
        if not self._may_ask(request):
            return _refusal(401, "this server wants its token", {"WWW-Authenticate": "Bearer"})
        try:
            wanted = RetrieveRequest.model_validate_json(await request.body())
            found = await self._batcher.search(wanted.queries, wanted.topk or self._topk)
        except ValidationError as error:
            return _refusal(422, error.errors(include_url=False, include_context=False, include_input=False))
        except Overloaded as error:
            return _refusal(503, str(error), {"Retry-After": "1"})
        return Response(answer(found, wanted.return_scores), media_type="application/json")

    async def health(self, request: Request) -> Response:
        facts = {"status": "ok", "kind": self._index.kind, "passages": len(self._index), "topk": self._topk}
        return JSONResponse(facts)

    def _may_ask(self, request: Request) -> bool:
        return carries(self._token, request.headers.get("Authorization", ""))


def answer(found: Sequence[Sequence[ScoredPassage]], scores: bool) -> bytes:
    """The body of an answer. Passages are JSON already, so they are joined and never parsed."""
    lists = [b",".join(_scored(hit) if scores else hit.raw for hit in hits) for hits in found]
    return b'{"result":[' + b",".join(b"[" + hits + b"]" for hits in lists) + b"]}"


def _scored(hit: ScoredPassage) -> bytes:
    return b'{"document":%b,"score":%b}' % (hit.raw, repr(hit.score).encode())


def _refusal(status: int, detail: object, headers: dict[str, str] | None = None) -> Response:
    return JSONResponse({"detail": detail}, status, headers)
