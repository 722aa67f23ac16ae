"""The engine server: an embedded engine over HTTP, with Rally's token protocol and OpenAI's API.

    POST /generate, GET /health                              Rally's protocol, see rally/engines/remote/rally_api.py
    POST /v1/completions, /v1/chat/completions, /v1/responses, GET /v1/models    OpenAI's API
    POST /v1/messages, /v1/messages/count_tokens             Anthropic's API
    POST /prompt_logprobs {"ids", "start", "top"}            log-probabilities of ids[start:] at temperature 1
    GET  /tokenizer                                          the ids of all tokens, and the rows of the embedding
    POST /load_weights {"folder", "deltas", "broadcast", "version", "in_flight"}
        new weights of the same model, if enabled; with a token: those of a folder, deltas to the current ones, or both,
        or those that a trainer broadcasts
    POST /join_weights {"place", "name", "rank", "size", "secret", "seconds"}
        join the group in which a trainer broadcasts weights
    GET  /metrics                                            Prometheus metrics

Token ids are passed unchanged in both directions, with the logprobs of sampled tokens, the masks of a grammar and, if
the engine records them, the experts of tokens. A request whose client
disconnects is cancelled. Errors have OpenAI's format. With a token, everything except `/health` requires it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from pydantic import BaseModel, ConfigDict, Field
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send
from torch import Tensor

from rally.engines.prometheus import CONTENT_TYPE, exposition
from rally.engines.remote.token_protocol import GRAMMAR_CODE, generation_to_wire, images_of_wire
from rally.models.token_masks import GrammarError
from rally.services.admission import Admission, Refused, SamplingAsk, Served, unless_gone
from rally.services.http_server import ServeError, carries
from rally.services.openai_api import OpenAI
from rally.services.openai_errors import HANDLERS, refuse
from rally.services.weight_loading import JoinRequest, LoadRequest, WeightService
from rally.types import SamplingParams

TWO_NAMES = (("max_tokens", "max_new_tokens"), ("stop_ids", "stop_token_ids"))


class ImageOfRequest(BaseModel):
    """An image of a prompt: rows x columns tokens from `start` on. `data` are its bytes in base64."""

    model_config = ConfigDict(extra="forbid", strict=True)

    start: int = Field(ge=0)
    rows: int = Field(ge=1)
    columns: int = Field(ge=1)
    hash: str
    data: str


class GenerateRequest(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    prompt_ids: list[int]
    sampling: dict[str, Any] = {}
    images: list[ImageOfRequest] = []


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
            *(service.weight_routes if accepts_weights else ()),
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
        self._weights = WeightService(served.engine)

    @property
    def weight_routes(self) -> tuple[Route, ...]:
        return (
            Route("/load_weights", self.load_weights, methods=["POST"]),
            Route("/join_weights", self.join_weights, methods=["POST"]),
        )

    async def generate(self, request: Request) -> Response:
        body = GenerateRequest.model_validate_json(await request.body())
        for pair in TWO_NAMES:
            if body.sampling.keys() >= set(pair):
                raise Refused(400, f"{pair[0]} and {pair[1]} are two names of one parameter; give one of them")
        params = SamplingParams.of(body.sampling)
        if params.grammar:
            self._check_ends(params)
        images = [one.model_dump() for one in body.images]
        spans = await asyncio.to_thread(images_of_wire, images) if images else []
        ask = SamplingAsk(body.prompt_ids, params, spans)
        try:
            generation = await unless_gone(request, self.admission.generate(ask))
        except GrammarError as problem:
            raise Refused(400, str(problem), code=GRAMMAR_CODE) from problem
        return JSONResponse(generation_to_wire(generation))

    def _check_ends(self, params: SamplingParams) -> None:
        """A grammar ends with the ends of turns that this engine knows, and the caller must know them too."""
        grammars = self._served.engine.core.grammars
        ends = set() if grammars is None else set(grammars.end_ids)
        if unknown := sorted(ends - set(params.stop_ids)):
            raise Refused(
                400,
                f"this server ends a generation under a grammar with the tokens {sorted(ends)}, and stop_ids has no "
                f"{', '.join(map(str, unknown))}; add them, or serve the model with the tokenizer of the run",
                param="sampling.stop_ids",
            )

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
            await asyncio.to_thread(self._weights.load, body)
        return JSONResponse({"success": True, "weight_version": body.version})

    async def join_weights(self, request: Request) -> Response:
        body = JoinRequest.model_validate_json(await request.body())
        async with self._loading:
            await asyncio.to_thread(self._weights.join, body)
        return JSONResponse({"success": True})

    async def health(self, request: Request) -> Response:
        engine = self._served.engine
        if engine.failure is not None:
            problem = f"the engine cannot sample: {engine.failure}"
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
