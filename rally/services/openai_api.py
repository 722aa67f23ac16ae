"""OpenAI's and Anthropic's endpoints over an embedded engine, for unmodified clients.

Text and chat completions and models are here; `/v1/responses` and `/v1/messages` are translated into chat requests.

Tools are rendered and calls parsed by the chat codec of training, so a trained agent is served with the same prompts.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from functools import lru_cache

from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from rally.chat import ChatCodec
from rally.chat.grammars import grammar_of
from rally.engines.base import SampledTokens
from rally.services.admission import Admission, Refused, RequestEvent, SamplingAsk, unless_gone
from rally.services.anthropic_api import Messages
from rally.services.api_translation import NO_CACHE, StreamPart, begun
from rally.services.openai_errors import error_body
from rally.services.openai_requests import COMPLETION_TOKENS, ChatRequest, CompletionRequest, SamplingRequest
from rally.services.openai_responses import (
    CompletionResponse,
    CompletionShape,
    Json,
    ResponseOptions,
    Shape,
    chat_shape,
)
from rally.services.responses_api import Responses
from rally.services.token_scores import (
    NOTHING_SAMPLED,
    EchoedPrompt,
    TokenScorer,
    chat_alternatives,
    check_alternatives,
    echoed_choice,
    token_offsets,
)
from rally.types import Generation, Message, RallyError

TOOL_LISTS = 64  # the number of codecs that are cached


class OpenAI:
    """The endpoints; an application mounts `routes`."""

    def __init__(self, admission: Admission) -> None:
        self._admission, self._served = admission, admission.served
        self._scorer = TokenScorer(admission)
        self._started = int(time.time())
        self._codec = lru_cache(maxsize=TOOL_LISTS)(self._codec_for)

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/models", self.models),
            Route("/v1/models/{name:path}", self.model),
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            *Responses(self).routes,
            *Messages(self).routes,
        ]

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._model]})

    async def model(self, request: Request) -> Response:
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model)

    @property
    def _model(self) -> Json:
        model = {"id": self._served.name, "object": "model", "created": self._started, "owned_by": "rally"}
        return model | {"max_model_len": self._served.engine.max_model_len}

    async def completions(self, request: Request) -> Response:
        body = CompletionRequest.model_validate_json(await request.body())
        self._check(body)
        check_alternatives(body.logprobs or 0, "logprobs", stream=body.stream)
        prompts = [self._encoded(prompt) for prompt in body.prompts]
        limit = body.max_tokens if body.max_tokens is not None else COMPLETION_TOKENS
        asks = [
            SamplingAsk(prompt, body.sampling(choice, limit or int(body.echo), self._served.eos_ids))
            for prompt in prompts
            for choice in range(body.n)
        ]
        shape = CompletionShape(self._decode)
        if not (body.echo or body.logprobs):
            return await self._answer(request, body, asks, shape)
        if body.stream:
            raise Refused(400, "echo cannot be streamed; leave stream out", param="echo")
        return JSONResponse(await unless_gone(request, self._scored(body, asks, shape, sample=limit != 0)))

    async def _scored(
        self, body: CompletionRequest, asks: Sequence[SamplingAsk], shape: CompletionShape, *, sample: bool
    ) -> Json:
        """A whole completion with its prompts or with alternatives. Without `sample` the prompts are only scored."""
        if not all(ask.prompt_ids for ask in asks):
            raise Refused(400, "an empty prompt cannot be continued; give at least one token", param="prompt")
        generations = await self._whole(asks) if sample else [NOTHING_SAMPLED] * len(asks)
        answer = CompletionResponse(shape, self._options(body), asks).whole(generations)
        echoes = [self._echoed(prompt) for prompt in body.prompts for _ in range(body.n)] if body.echo else []
        for index, (ask, generation) in enumerate(zip(asks, generations, strict=True)):
            scores = None
            if body.logprobs is not None:
                scores = await self._scorer.scores(ask, generation, prompt=body.echo, alternatives=body.logprobs)
            echo = echoes[index] if echoes else EchoedPrompt("", [])
            begins = token_offsets(generation.ids, self._decode)
            answer["choices"][index] = echoed_choice(answer["choices"][index], echo, begins, scores, self._decode_all)
        return answer

    def _echoed(self, prompt: str | list[int]) -> EchoedPrompt:
        if isinstance(prompt, str):
            if self._served.tokenizer.is_fast:
                pairs = self._served.tokenizer(prompt, return_offsets_mapping=True)["offset_mapping"]
                return EchoedPrompt(prompt, [start for start, _ in pairs])
            return EchoedPrompt(prompt, token_offsets(self._encoded(prompt), self._decode_all))
        return EchoedPrompt(self._decode_all(prompt), token_offsets(prompt, self._decode_all))

    async def chat(self, request: Request) -> Response:
        body = ChatRequest.model_validate_json(await request.body())
        asks, shape = self._chat_asks(body)
        if not body.top_logprobs:
            return await self._answer(request, body, asks, shape)
        return JSONResponse(await unless_gone(request, self._with_alternatives(body, asks, shape)))

    async def _with_alternatives(self, body: ChatRequest, asks: Sequence[SamplingAsk], shape: Shape) -> Json:
        """A whole chat completion with the likeliest tokens at each position."""
        generations = await self._whole(asks)
        answer = CompletionResponse(shape, self._options(body), asks).whole(generations)
        for choice, ask, generation in zip(answer["choices"], asks, generations, strict=True):
            scores = await self._scorer.scores(ask, generation, prompt=False, alternatives=body.top_logprobs)
            for entry, score in zip(choice["logprobs"]["content"], scores, strict=True):
                entry["top_logprobs"] = chat_alternatives(score, self._decode_all)
        return answer

    def admit(self, request: Request) -> None:
        """The application has checked the token."""

    async def complete(self, request: Request, chat: ChatRequest) -> Json:
        asks, shape = self._chat_asks(chat)
        return CompletionResponse(shape, self._options(chat), asks).whole(await self._whole(asks))

    async def count_tokens(self, request: Request, chat: ChatRequest) -> int:
        self._check(chat)
        chat.check_messages()
        codec = self._chat_codec(chat)
        return len(codec.encode_prompt(chat.messages_for(codec)))

    def stored_responses(self, request: Request) -> None:
        """Nothing is stored between requests."""

    def _chat_asks(self, body: ChatRequest) -> tuple[list[SamplingAsk], Shape]:
        """What a chat request asks of the engine, and the shape of its answer."""
        self._check(body)
        body.check_messages()
        codec = self._chat_codec(body)
        if body.offered_tools and (problem := codec.format_problem("--tool-format")):
            raise Refused(400, problem, param="tools")
        messages = body.messages_for(codec)
        prompt = codec.encode_prompt(messages)
        if not self._served.hidden_tools and (missing := left_out(codec, messages)):
            problem = (
                f"the model's chat template leaves out {missing}, so the model would answer without it; serve the "
                "model with a template that shows tools (--chat-template FILE), or, if it was trained without seeing "
                "them, with --hidden-tools"
            )
            raise Refused(400, problem, param="tools")
        requested = body.length_limit
        limit = requested if requested is not None else max(1, self._served.engine.max_model_len - len(prompt))
        grammar = grammar_of(body.constraint, codec)
        check_alternatives(body.top_logprobs, "top_logprobs", stream=body.stream, grammar=grammar)
        if body.top_logprobs and not body.logprobs:
            raise Refused(400, "top_logprobs needs logprobs=true", param="top_logprobs")
        asks = [SamplingAsk(prompt, body.sampling(choice, limit, codec.stop_ids, grammar)) for choice in range(body.n)]
        return asks, chat_shape(codec, body.constraint)

    async def _answer(
        self, request: Request, body: CompletionRequest | ChatRequest, asks: Sequence[SamplingAsk], shape: Shape
    ) -> Response:
        answer = CompletionResponse(shape, self._options(body), asks)
        if not body.stream:
            return JSONResponse(answer.whole(await unless_gone(request, self._whole(asks))))
        updates = await begun(request, self._admission.follow(asks, as_sampled=True))
        events = self._events(answer, updates, len(asks))
        return StreamingResponse(events, media_type="text/event-stream", headers=NO_CACHE)

    def _options(self, body: CompletionRequest | ChatRequest) -> ResponseOptions:
        return ResponseOptions(
            model=self._served.name,
            logprobs=body.wants_logprobs,
            token_ids=body.return_token_ids,
            usage_in_stream=body.stream_options is not None and body.stream_options.include_usage,
            choices=body.n,
        )

    async def _whole(self, asks: Sequence[SamplingAsk]) -> list[Generation]:
        ends: dict[int, Generation] = {}
        async with aclosing(self._admission.follow(asks, as_sampled=False)) as updates:
            async for index, update in updates:
                assert isinstance(update, Generation)
                ends[index] = update
        return [ends[index] for index in range(len(asks))]

    async def stream(self, request: Request, chat: ChatRequest) -> AsyncGenerator[StreamPart, None]:
        asks, shape = self._chat_asks(chat)
        answer = CompletionResponse(shape, self._options(chat), asks)
        async with aclosing(self._admission.follow(asks, as_sampled=True)) as updates:
            async for _, update in updates:
                for begin in answer.opening():
                    yield begin
                if isinstance(update, SampledTokens):
                    for piece in answer.pieces(0, update):
                        yield piece
                else:
                    for piece in answer.ending(0, update):
                        yield piece
                    yield answer.whole([update])

    async def _events(
        self, answer: CompletionResponse, updates: AsyncGenerator[RequestEvent, None], count: int
    ) -> AsyncIterator[bytes]:
        ends: dict[int, Generation] = {}
        try:
            async with aclosing(updates):
                async for index, update in updates:
                    if isinstance(update, SampledTokens):
                        pieces = answer.pieces(index, update)
                    else:
                        ends[index] = update
                        pieces = answer.ending(index, update)
                    for piece in pieces:
                        yield event(piece)
            for piece in answer.usage_piece([ends[index] for index in range(count)]):
                yield event(piece)
            yield b"data: [DONE]\n\n"
        except RallyError as error:  # the status has been sent already, so the error goes into the stream
            yield event(error_body(error))

    def _check(self, body: SamplingRequest) -> None:
        body.refuse_unknown()
        self._check_name(body.model)

    def _check_name(self, name: str) -> None:
        if name != self._served.name:
            message = f"there is no model {name!r} here; use {self._served.name!r}"
            raise Refused(404, message, param="model", code="model_not_found")

    def _encoded(self, prompt: str | list[int]) -> list[int]:
        if isinstance(prompt, str):
            ids: list[int] = self._served.tokenizer.encode(prompt)
            return ids
        return prompt

    def _decode(self, ids: Sequence[int], skip_special: bool = True) -> str:
        text = self._served.tokenizer.decode(
            list(ids), skip_special_tokens=skip_special, clean_up_tokenization_spaces=False
        )
        assert isinstance(text, str)
        return text

    def _decode_all(self, ids: Sequence[int]) -> str:
        """The text with its special tokens."""
        return self._decode(ids, skip_special=False)

    def _chat_codec(self, body: ChatRequest) -> ChatCodec:
        codec = self._codec(json.dumps(body.offered_tools))
        return codec.with_variables(body.variables_of(codec))

    def _codec_for(self, tools: str) -> ChatCodec:
        served = self._served
        return ChatCodec(served.tokenizer, served.tool_format, json.loads(tools), stop_ids=served.eos_ids)


def left_out(codec: ChatCodec, messages: Sequence[Message]) -> str | None:
    """A tool, a parameter or a call of the request that the rendered prompt does not show; None if it shows all.

    A word of a tool must occur more often than in the prompt without tools, where a message may mention it.
    """
    shown = codec.decode(codec.encode_prompt(messages))
    without = codec.decode(codec.with_tools([]).encode_prompt(messages)) if codec.tools else shown
    for tool in codec.tools:
        name = str(tool["function"]["name"])
        if shown.count(name) <= without.count(name):
            return f"the tool {name}"
        for parameter in (tool["function"].get("parameters") or {}).get("properties") or {}:
            # Templates escape other characters, each in its own way.
            if re.fullmatch(r"[\w.-]+", parameter, re.ASCII) and shown.count(parameter) <= without.count(parameter):
                return f"the parameter {parameter} of the tool {name}"
    calls = [call["function"]["name"] for message in messages for call in message.get("tool_calls") or ()]
    return next((f"the call of {name} in the messages" for name in calls if name not in shown), None)


def event(body: Json) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(body, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"
