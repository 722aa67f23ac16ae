"""The engine server: an embedded engine over HTTP, with Rally's token protocol and OpenAI's API.

    POST /generate, GET /health                              Rally's protocol, see rally/engines/remote/rally_api.py
    POST /v1/completions, /v1/chat/completions, /v1/responses, GET /v1/models    OpenAI's API
    POST /v1/messages, /v1/messages/count_tokens             Anthropic's API
    POST /prompt_logprobs {"ids", "start", "top"}            log-probabilities of ids[start:] at temperature 1
    GET  /tokenizer                                          the ids of all tokens, and the rows of the embedding
    POST /load_weights {"folder", "deltas", "version", "in_flight"}
        new weights of the same model, if enabled; with a token: those of a folder, deltas to the current ones, or both
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
from rally.engines.remote.weight_deltas import DeltaError, StoredTensor, apply_in_place, read_delta, stored_tensors
from rally.platforms import on_accelerator
from rally.services.admission import Admission, Refused, SamplingAsk, Served, unless_gone
from rally.services.http_server import ServeError, carries
from rally.services.openai_api import OpenAI
from rally.services.openai_errors import HANDLERS, refuse
from rally.types import SamplingParams

TWO_NAMES = (("max_tokens", "max_new_tokens"), ("stop_ids", "stop_token_ids"))


class LoadRequest(BaseModel):
    model_config = ConfigDict(extra="forbid")

    folder: Path | None = None
    deltas: list[Path] = Field(default=[], max_length=1000)
    """Files that are applied, in this order, to the weights of `folder` or, without one, to the current ones."""
    version: int = Field(ge=0, lt=2**63, strict=True)
    in_flight: Literal["abort", "keep", "recompute"]


def load_weights(engine: EmbeddedEngine, request: LoadRequest) -> None:
    """Load weights between two steps of the engine; its settings determine what happens to requests in flight."""
    in_flight = engine.core.settings.in_flight
    if request.in_flight != in_flight:
        raise Refused(
            400, f"requests in flight follow {in_flight!r} here, not {request.in_flight!r}; set rollout.in_flight to it"
        )
    ours = engine.core.model.state_dict()
    loaded = _with_deltas(request, ours) if request.deltas else _from_folder(request.folder)
    if misfit := next(_mismatches(ours, loaded), None):
        where = request.folder or request.deltas[0]
        raise Refused(400, f"the weights in {where} do not fit this model: {misfit}; serve the model of the run")
    with torch.no_grad(), engine.updating(request.version):
        for name, weight in loaded.items():
            ours[name].copy_(weight)


def _from_folder(folder: Path | None) -> dict[str, Tensor]:
    if folder is None:
        raise Refused(400, "name a folder with weights, or deltas to the current ones")
    loaded: dict[str, Tensor] = {}
    try:
        for file in sorted(folder.glob("*.safetensors")):
            loaded |= load_file(file)
    except (OSError, SafetensorError, ValueError) as problem:
        raise Refused(400, f"the weights in {folder} cannot be read: {problem}") from problem
    return loaded


def _with_deltas(request: LoadRequest, ours: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights after all deltas. Those that the engine samples from are only read."""
    try:
        deltas = [read_delta(path) for path in request.deltas]
        if request.folder is not None:
            stored = stored_tensors(request.folder)
        else:
            stored = {one.name: _stored(ours[one.name]) for one in deltas[0].weights if one.name in ours}
        for delta in deltas:
            apply_in_place(delta, stored)
    except (OSError, ValueError, LookupError, DeltaError) as problem:
        raise Refused(400, f"the deltas cannot be applied: {problem}", code="wrong_base") from problem
    if deltas[-1].version != request.version:
        raise Refused(
            400, f"the deltas end at version {deltas[-1].version}, not {request.version}; send the others too"
        )
    return {name: _tensor(one) for name, one in stored.items()}


DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64}
NAMES = {dtype: name for name, dtype in DTYPES.items()}


def _stored(weight: Tensor) -> StoredTensor:
    """A copy of a weight as bytes."""
    data = weight.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy()
    return StoredTensor(
        NAMES[weight.dtype], tuple(weight.shape), data if on_accelerator(weight.device) else data.copy()
    )


def _tensor(stored: StoredTensor) -> Tensor:
    return torch.from_numpy(stored.data).view(DTYPES[stored.dtype]).reshape(stored.shape)


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


class PromptRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    ids: list[int] = Field(min_length=2)
    start: int = 1
    top: int = 0


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
            Route("/prompt_logprobs", service.prompt_logprobs, methods=["POST"]),
            Route("/tokenizer", service.tokenizer),
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
        self._loading = asyncio.Lock()

    async def generate(self, request: Request) -> Response:
        body = GenerateRequest.model_validate_json(await request.body())
        for pair in TWO_NAMES:
            if body.sampling.keys() >= set(pair):
                raise Refused(400, f"{pair[0]} and {pair[1]} are two names of one parameter; give one of them")
        ask = SamplingAsk(body.prompt_ids, SamplingParams.of(body.sampling))
        if ask.params.grammar:
            raise Refused(400, "/generate accepts no grammar; send a chat request with response_format or tool_choice")
        return JSONResponse(generation_to_wire(await unless_gone(request, self.admission.generate(ask))))

    async def prompt_logprobs(self, request: Request) -> Response:
        body = PromptRequest.model_validate_json(await request.body())
        version = self._served.engine.weight_version
        work = self.admission.prompt_logprobs(body.ids, body.start, body.top)
        found = await unless_gone(request, work)
        if self._served.engine.weight_version != version:
            raise Refused(503, "the engine loaded new weights meanwhile; try again", code="aborted", retry_after=1)
        return JSONResponse(found._asdict() | {"weight_version": version})

    async def tokenizer(self, request: Request) -> Response:
        weight = self._served.engine.core.model.get_input_embeddings().weight
        assert isinstance(weight, Tensor)
        rows = len(weight)
        return JSONResponse({"vocab": self._served.tokenizer.get_vocab(), "rows": rows})

    async def load_weights(self, request: Request) -> Response:
        body = LoadRequest.model_validate_json(await request.body())
        async with self._loading:  # a delta must not be applied while its base is replaced
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
            headers = dict(scope["headers"])
            header = headers.get(b"authorization", b"")
            if b"x-api-key" in headers and not header:  # as Anthropic's clients send it
                header = b"Bearer " + headers[b"x-api-key"]
            if not carries(self._token, header.decode("latin-1")):
                error = Refused(401, "this server requires its token as the API key", code="invalid_api_key")
                await refuse(Request(scope), error)(scope, receive, send)
                return
        await self._app(scope, receive, send)
