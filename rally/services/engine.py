"""An embedded engine over HTTP: our token protocol for other Rally processes, OpenAI's for everybody else.

    POST /generate, GET /health                              as told in rally/engines/remote/server_api.py
    POST /v1/completions, /v1/chat/completions, GET /v1/models     as OpenAI's
    POST /load_weights {"folder", "version", "in_flight"}    other weights of the same model, where that is allowed
    GET  /metrics                                            as Prometheus reads it

Guarantees: ids in are the ids that are continued, ids out are the ids that were sampled, with their logprobs; a request
whose client has gone is cancelled; every refusal has OpenAI's shape. With a token, everything but `/health` wants it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors.torch import load_file
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from rally.engines.embedded.engine import EmbeddedEngine
from rally.engines.prometheus import CONTENT_TYPE, exposition
from rally.engines.remote.server_api import generation_to_wire
from rally.services.admission import Admission, Refused, SamplingAsk, Served, unless_gone
from rally.services.http_server import carries
from rally.services.openai_api import OpenAI
from rally.services.openai_errors import HANDLERS, refuse
from rally.types import SamplingParams


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    folder: Path
    version: int = Field(ge=0)
    in_flight: Literal["abort", "keep", "recompute"]


def load_weights(engine: EmbeddedEngine, asked: LoadRequest) -> None:
    """Between two steps of the engine; requests in flight are treated as its settings say."""
    settled = engine.core.settings.in_flight
    if asked.in_flight != settled:
        raise Refused(
            400, f"requests in flight follow {settled!r} here, not {asked.in_flight!r}; set rollout.in_flight to it"
        )
    found: dict[str, Tensor] = {}
    for file in sorted(asked.folder.glob("*.safetensors")):
        found |= load_file(file)
    ours = engine.core.model.state_dict()
    if problem := next(_misfits(ours, found), None):
        raise Refused(400, f"the weights in {asked.folder} are not this model's: {problem}; start it from the same one")
    with torch.no_grad(), engine.updating(asked.version):
        for name, weight in found.items():
            ours[name].copy_(weight)


def _misfits(ours: Mapping[str, Tensor], found: Mapping[str, Tensor]) -> Iterator[str]:
    """What does not fit. Of names that share a memory one is enough."""
    given = {ours[name].data_ptr() for name in found if name in ours}
    yield from (f"it has no {name}" for name in found if name not in ours)
    yield from (f"{name} is missing" for name, weight in ours.items() if weight.data_ptr() not in given)
    for name, weight in found.items():
        if weight.shape != ours[name].shape:
            yield f"{name} is {tuple(weight.shape)} there and {tuple(ours[name].shape)} here"


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    prompt_ids: list[int]
    sampling: dict[str, Any] = {}


def create_app(served: Served, token: str | None = None, *, accepts_weights: bool = False) -> Starlette:
    """The server as an ASGI application. The engine is closed when the server stops."""
    service = _EngineService(served)

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


class _EngineService:
    def __init__(self, served: Served) -> None:
        self.desk = Admission(served)
        self._served = served

    async def generate(self, request: Request) -> Response:
        asked = GenerateRequest.model_validate_json(await request.body())
        ask = SamplingAsk(asked.prompt_ids, SamplingParams.of(asked.sampling))
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
