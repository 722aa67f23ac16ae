"""A search index over HTTP: Search-R1's `/retrieve`, field for field, for many clients at once.

    POST /retrieve  {"queries": [text, ...], "topk": number or null, "return_scores": bool}
      -> {"result": [[{"document": {...}, "score": number}, ...], ...]}     with return_scores: true
      -> {"result": [[{...}, ...], ...]}                                   without
    GET  /health    {"status": "ok", "kind": "bm25", "passages": 4947, "topk": 3}

One list per query, in order, best passage first; a query that fewer than `topk` passages fit gets fewer. `topk` that is
null, 0 or absent is the server's own. A document is the line of the corpus, whole, and always has `contents`.
"""

from __future__ import annotations

import hmac
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from ipaddress import ip_address
from typing import Annotated

from fastapi import Depends, FastAPI, Header, HTTPException, Response
from pydantic import BaseModel, Field

from rally.retrieval import Batcher, Found, Overloaded, RetrievalError, SearchIndex

MAX_TOPK = 1000


class RetrieveRequest(BaseModel):
    queries: list[str]
    topk: int | None = Field(default=None, ge=0, le=MAX_TOPK)
    return_scores: bool = False


def create_app(index: SearchIndex, topk: int = 3, token: str | None = None) -> FastAPI:
    """The server as an ASGI application; with a token, `/retrieve` wants it as `Authorization: Bearer TOKEN`."""
    batcher = Batcher(index)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        yield
        batcher.close()

    app = FastAPI(title="Rally retrieval", lifespan=lifespan)
    guards = [] if token is None else [Depends(_bearer(token))]

    @app.post("/retrieve", dependencies=guards)
    async def retrieve(request: RetrieveRequest) -> Response:
        try:
            found = await batcher.search(request.queries, request.topk or topk)
        except Overloaded as error:
            raise HTTPException(503, str(error), headers={"Retry-After": "1"}) from None
        return Response(answer(found, request.return_scores), media_type="application/json")

    @app.get("/health")
    async def health() -> dict[str, str | int]:
        return {"status": "ok", "kind": index.kind, "passages": len(index), "topk": topk}

    return app


def answer(found: Sequence[Sequence[Found]], scores: bool) -> bytes:
    """The body of an answer. Passages are JSON already, so they are joined and never parsed."""
    lists = [b",".join(_scored(hit) if scores else hit.raw for hit in hits) for hits in found]
    return b'{"result":[' + b",".join(b"[" + hits + b"]" for hits in lists) + b"]}"


def check_exposure(host: str, token: str | None) -> None:
    """Without a token, only this machine may ask."""
    if token is None and not _is_loopback(host):
        raise RetrievalError(
            f"{host} can be reached from other machines; set RALLY_RETRIEVAL_TOKEN to a secret that clients must send, "
            "or serve on 127.0.0.1"
        )


def _is_loopback(host: str) -> bool:
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _scored(hit: Found) -> bytes:
    return b'{"document":%b,"score":%b}' % (hit.raw, repr(hit.score).encode())


def _bearer(token: str) -> Callable[..., None]:
    expected = f"Bearer {token}".encode()

    # Headers are bytes that Starlette reads as Latin-1; a token is UTF-8.
    def check(authorization: Annotated[str, Header()] = "") -> None:
        if not hmac.compare_digest(authorization.encode("latin-1"), expected):
            raise HTTPException(401, "this server wants its token", headers={"WWW-Authenticate": "Bearer"})

    return check
