"""An embedded engine over HTTP: our token protocol for other Rally processes, OpenAI's for everybody else.

    POST /generate, GET /health                              as told in rally/engines/token_protocol.py
    POST /v1/completions, /v1/chat/completions, GET /v1/models     as OpenAI's
    POST /load_weights {"folder", "version", "in_flight"}    other weights of the same model, where that is allowed
    GET  /metrics                                            as Prometheus reads it

Guarantees: ids in are the ids that are continued, ids out are the ids that were sampled, with their logprobs; a request
whose client has gone is cancelled; every refusal has OpenAI's shape. With a token, everything but `/health` wants it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from rally.engines.exposition import CONTENT_TYPE, exposition
from rally.engines.token_protocol import generation_to_wire
from rally.services.desk import Ask, Desk, Refused, Served, unless_gone
from rally.services.openai_api import OpenAI
from rally.services.refusals import HANDLERS, refuse
from rally.services.serving import carries
from rally.services.weights import LoadRequest, load_weights
from rally.types import SamplingParams


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt_ids: list[int]
    sampling: dict[str, Any] = {}


def create_app(served: Served, token: str | None = None, *, accepts_weights: bool = False) -> Starlette:
    """The server as an ASGI application. The engine is closed when the server stops."""
    service = _Service(served)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        yield
        await served.engine.close()

    return Starlette(
        routes=[
            Route("/generate", service.generate, methods=["POST"]),
            Route("/health", service.health),
            Route("/metrics", service.metrics),
            *([Route("/load_weights", service.load_weights, methods=["POST"])] if accepts_weights else []),
            *OpenAI(service.desk).routes,
        ],
        lifespan=lifespan,
        middleware=[Middleware(_TokenGate, token=token)],
        exception_handlers=HANDLERS,
    )


class _Service:
    def __init__(self, served: Served) -> None:
        self.desk = Desk(served)
        self._served = served

    async def generate(self, request: Request) -> Response:
        asked = GenerateRequest.model_validate_json(await request.body())
        ask = Ask(asked.prompt_ids, SamplingParams.of(asked.sampling))
        return JSONResponse(generation_to_wire(await unless_gone(request, self.desk.generate(ask))))

    async def load_weights(self, request: Request) -> Response:
        asked = LoadRequest.model_validate_json(await request.body())
        await asyncio.to_thread(load_weights, self._served.engine, asked)
        return JSONResponse({"success": True, "weight_version": asked.version})

    async def health(self, request: Request) -> Response:
        engine = self._served.engine
        if engine.failure is not None:
            raise Refused(500, f"the engine has stopped because a step failed: {engine.failure}", code="engine_stopped")
        facts = {"status": "ok", "model": self._served.name, "weight_version": engine.weight_version}
        return JSONResponse(facts | {"max_model_len": engine.max_model_len})

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self.desk.metrics()), headers={"Content-Type": CONTENT_TYPE})


class _TokenGate:
    """Turns away who does not know the token; whether the server lives, anybody may ask."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            said = dict(scope["headers"]).get(b"authorization", b"")
            if not carries(self._token, said.decode("latin-1")):
                refusal = Refused(401, "this server wants its token as the API key", code="invalid_api_key")
                await refuse(Request(scope), refusal)(scope, receive, send)
                return
        await self._app(scope, receive, send)
