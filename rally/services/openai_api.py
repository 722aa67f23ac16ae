"""OpenAI's `/v1/completions`, `/v1/chat/completions` and `/v1/models` over an embedded engine, for clients as they are.

Tools are rendered and calls parsed by the chat codec that training uses, so an agent that was trained here is served
with the very prompts it was trained on.
"""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import lru_cache

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rally.chat import ChatCodec
from rally.engines.embedded.request_slots import SampledTokens
from rally.services.admission import Admission, Refused, RequestEvent, SamplingAsk, unless_gone
from rally.services.openai_errors import error_body
from rally.services.openai_requests import COMPLETION_TOKENS, ChatRequest, CompletionRequest, SamplingRequest
from rally.services.openai_responses import ChatShape, CompletionResponse, CompletionShape, Json, ResponseOptions, Shape
from rally.types import Generation, RallyError

TOOL_LISTS = 64  # whose codecs are kept


class OpenAI:
    """The endpoints; `routes` is what an application mounts."""

    def __init__(self, desk: Admission) -> None:
        self._desk, self._served = desk, desk.served
        self._started = int(time.time())
        self._codec = lru_cache(maxsize=TOOL_LISTS)(self._codec_for)

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
        ]

    async def models(self, request: Request) -> Response:
        model = {"id": self._served.name, "object": "model", "created": self._started, "owned_by": "rally"}
        model["max_model_len"] = self._served.engine.max_model_len
        return JSONResponse({"object": "list", "data": [model]})

    async def completions(self, request: Request) -> Response:
        asked = CompletionRequest.model_validate_json(await request.body())
        self._check(asked)
        prompts = [self._encoded(prompt) for prompt in asked.prompts]
        limit = asked.max_tokens if asked.max_tokens is not None else COMPLETION_TOKENS
        asks = [
            SamplingAsk(prompt, asked.sampling(choice, limit, self._served.eos_ids))
            for prompt in prompts
            for choice in range(asked.n)
        ]
        return await self._answer(request, asked, asks, CompletionShape(self._decode))

    async def chat(self, request: Request) -> Response:
        asked = ChatRequest.model_validate_json(await request.body())
        self._check(asked)
        codec = self._codec(json.dumps(asked.offered_tools))
        prompt = codec.encode_prompt(asked.messages)
        given = asked.max_completion_tokens if asked.max_completion_tokens is not None else asked.max_tokens
        limit = given if given is not None else max(1, self._served.engine.max_model_len - len(prompt))
        asks = [SamplingAsk(prompt, asked.sampling(choice, limit, codec.stop_ids)) for choice in range(asked.n)]
        return await self._answer(request, asked, asks, ChatShape(codec, bool(asked.offered_tools)))

    async def _answer(
        self, request: Request, asked: CompletionRequest | ChatRequest, asks: Sequence[SamplingAsk], shape: Shape
    ) -> Response:
        wishes = ResponseOptions(
            model=self._served.name,
            logprobs=asked.wants_logprobs,
            token_ids=asked.return_token_ids,
            usage_in_stream=asked.stream_options is not None and asked.stream_options.include_usage,
            choices=asked.n,
        )
        answer = CompletionResponse(shape, wishes, asks)
        if not asked.stream:
            return JSONResponse(answer.whole(await unless_gone(request, self._whole(asks))))
        news = self._desk.follow(asks, as_sampled=True)
        first = await unless_gone(request, anext(news))  # what is refused is refused before the answer begins
        events = self._events(answer, first, news, len(asks))
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    async def _whole(self, asks: Sequence[SamplingAsk]) -> list[Generation]:
        ends: dict[int, Generation] = {}
        async with aclosing(self._desk.follow(asks, as_sampled=False)) as news:
            async for index, said in news:
                assert isinstance(said, Generation)
                ends[index] = said
        return [ends[index] for index in range(len(asks))]

    async def _events(
        self, answer: CompletionResponse, first: RequestEvent, news: AsyncGenerator[RequestEvent, None], count: int
    ) -> AsyncIterator[bytes]:
        ends: dict[int, Generation] = {}
        try:
            async with aclosing(_after(first, news)) as all_news:
                async for index, said in all_news:
                    if isinstance(said, SampledTokens):
                        pieces = answer.pieces(index, said)
                    else:
                        ends[index] = said
                        pieces = answer.ending(index, said)
                    for piece in pieces:
                        yield event(piece)
            for piece in answer.usage_piece([ends[index] for index in range(count)]):
                yield event(piece)
            yield b"data: [DONE]\n\n"
        except RallyError as error:  # the status has been sent; the client must still learn that this is not the end
            yield event(error_body(error))

    def _check(self, asked: SamplingRequest) -> None:
        asked.refuse_unknown()
        if asked.model != self._served.name:
            sentence = f"there is no model {asked.model!r} here; the one that is served is {self._served.name!r}"
            raise Refused(404, sentence, param="model", code="model_not_found")

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._served.tokenizer.encode(prompt)
            return ids
        return prompt

    def _decode(self, ids: Sequence[int]) -> str:
        text = self._served.tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def _codec_for(self, tools: str) -> ChatCodec:
        return ChatCodec(self._served.tokenizer, self._served.tool_format, json.loads(tools))


async def _after(first: RequestEvent, rest: AsyncGenerator[RequestEvent, None]) -> AsyncGenerator[RequestEvent, None]:
    """All of it, the first included; closing it closes the rest."""
    async with aclosing(rest):
        yield first
        async for news in rest:
            yield news


def event(body: Json) -> bytes:
    """One piece of an answer as it goes over the wire."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
