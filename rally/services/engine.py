"""The engine server: an embedded engine over HTTP, with Rally's token protocol and OpenAI's API.

    POST /generate, GET /health                              Rally's protocol, see rally/engines/remote/rally_api.py
    POST /v1/completions, /v1/chat/completions, GET /v1/models     OpenAI's API
    POST /load_weights {"folder", "version", "in_flight"}    new weights of the same model, if enabled; with a token
    GET  /metrics                                            Prometheus metrics

Token ids are passed unchanged in both directions, with the logprobs of sampled tokens. A request whose client
disconnects is cancelled. Errors have OpenAI's format. With a token, everything except `/health` requires it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from safetensors import SafetensorError
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
from rally.services.http_server import ServeError, carries
from rally.services.openai_api import OpenAI
from rally.services.openai_errors import HANDLERS, refuse
from rally.types import SamplingParams

TWO_NAMES = (("max_tokens", "max_new_tokens"), ("stop_ids", "stop_token_ids"))


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    folder: Path
    version: int = Field(ge=0, lt=2**63, strict=True)
    in_flight: Literal["abort", "keep", "recompute"]


def load_weights(engine: EmbeddedEngine, request: LoadRequest) -> None:
    """Load weights between two steps of the engine; its settings determine what happens to requests in flight."""
    in_flight = engine.core.settings.in_flight
    if request.in_flight != in_flight:
        raise Refused(
            400, f"requests in flight follow {in_flight!r} here, not {request.in_flight!r}; set rollout.in_flight to it"
        )
    loaded: dict[str, Tensor] = {}
    try:
        for file in sorted(request.folder.glob("*.safetensors")):
            loaded |= load_file(file)
    except (OSError, SafetensorError, ValueError) as problem:
        raise Refused(400, f"the weights in {request.folder} cannot be read: {problem}") from problem
    ours = engine.core.model.state_dict()
    if misfit := next(_mismatches(ours, loaded), None):
        raise Refused(
            400, f"the weights in {request.folder} do not fit this model: {misfit}; serve the model of the run"
        )
    with torch.no_grad(), engine.updating(request.version):
        for name, weight in loaded.items():
            ours[name].copy_(weight)


def _mismatches(ours: Mapping[str, Tensor], loaded: Mapping[str, Tensor]) -> Iterator[str]:
    """Names and shapes that differ. One of several tied weights is enough."""
    covered = {ours[name].data_ptr() for name in loaded if name in ours}
    yield from (f"it has no {name}" for name in loaded if name not in ours)
    yield from (f"{name} is missing" for name, weight in ours.items() if weight.data_ptr() not in covered)
    for name, weight in loaded.items():
        if weight.shape != ours[name].shape:
            yield f"{name} is {tuple(weight.shape)} there and {tuple(ours[name].shape)} here"


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt_ids: list[int]
    sampling: dict[str, Any] = {}


def create_app(served: Served, token: str | None = None, *, accepts_weights: bool = False) -> Starlette:
    """The server as an ASGI application. The engine is closed when the server stops. Only a server with a token
    accepts weights: they decide what a training run learns from."""
    if accepts_weights and token is None:
        raise ServeError("a server that accepts weights needs a token; set RALLY_ENGINE_TOKEN")
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
            *OpenAI(service.admission).routes,
        ],
        lifespan=lifespan,
        middleware=[Middleware(_TokenCheck, token=token)],
        exception_handlers=HANDLERS,
    )


class _EngineService:
    def __init__(self, served: Served) -> None:
        self.admission = Admission(served)
        self._served = served

    async def generate(self, request: Request) -> Response:
        body = GenerateRequest.model_validate_json(await request.body())
        for pair in TWO_NAMES:
            if body.sampling.keys() >= set(pair):
                raise Refused(400, f"{pair[0]} and {pair[1]} are two names of one parameter; give one of them")
        ask = SamplingAsk(body.prompt_ids, SamplingParams.of(body.sampling))
        return JSONResponse(generation_to_wire(await unless_gone(request, self.admission.generate(ask))))

    async def load_weights(self, request: Request) -> Response:
        body = LoadRequest.model_validate_json(await request.body())
        await asyncio.to_thread(load_weights, self._served.engine, body)
        return JSONResponse({"success": True, "weight_version": body.version})

    async def health(self, request: Request) -> Response:
        engine = self._served.engine
        if engine.failure is not None:
            problem = f"the engine cannot sample, because a step failed: {engine.failure}"
            raise Refused(500, problem, code="engine_stopped")
        facts = {"status": "ok", "model": self._served.name, "weight_version": engine.weight_version}
        return JSONResponse(facts | {"max_model_len": engine.max_model_len})

    async def metrics(self, request: Request) -> Response:
        return Response(exposition(self.admission.metrics()), headers={"Content-Type": CONTENT_TYPE})


class _TokenCheck:
    """Rejects requests without the token, except to `/health`."""

    def __init__(self, app: ASGIApp, token: str | None) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["path"] != "/health":
            header = dict(scope["headers"]).get(b"authorization", b"")
            if not carries(self._token, header.decode("latin-1")):
                error = Refused(401, "this server requires its token as the API key", code="invalid_api_key")
                await refuse(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
