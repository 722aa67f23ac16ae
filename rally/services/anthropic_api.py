"""Anthropic's `/v1/messages` and `/v1/messages/count_tokens`, translated into chat requests.

A streaming client gets text as it is sampled, and calls when the turn is complete.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

from pydantic import Field
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from rally.services.admission import Refused, unless_gone
from rally.services.api_translation import (
    ChatBackend,
    StreamPart,
    TranslatedRequest,
    begun,
    chat_request,
    check_tool,
    event_stream,
    is_whole,
    text_of,
    text_of_chunk,
)
from rally.services.openai_errors import anthropic_error, status_of
from rally.services.openai_requests import ChatRequest
from rally.services.openai_responses import Json, StreamBegin, call_key
from rally.types import Message

HARMLESS = frozenset({"metadata", "cache_control", "inference_geo"})
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "service_tier": ("auto", "standard_only"),
    "container": (),
}
KEEPS_THINKING = {"type": "clear_thinking_20251015", "keep": "all"}
DEFAULT_EFFORT = "high"  # as if it were left out, by the API's own definition


class MessagesRequest(TranslatedRequest):
    model: str
    messages: list[dict[str, Any]] = Field(min_length=1)
    max_tokens: int | None = None  # count_tokens has none
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: dict[str, Any] = Field({})
    stop_sequences: list[str] = Field([])
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stream: bool = False
    output_format: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    context_management: dict[str, Any] | None = None

    def chat(self) -> ChatRequest:
        self.refuse_unknown(HARMLESS, NEUTRAL)
        edits = (self.context_management or {}).get("edits", [])
        if edits not in ([], [KEEPS_THINKING]):
            problem = "context_management would change the messages, which only the client may do here"
            raise Refused(400, f"{problem}; leave it out", param="context_management")
        system = "" if self.system is None else text_of(self.system, "system", ("text",))
        opening = [{"role": "system", "content": system}] if system else []
        fields = {
            "model": self.model,
            "messages": [*opening, *(m for at, one in enumerate(self.messages) for m in _chat_messages(one, at))],
            "tools": [_chat_tool(tool, at) for at, tool in enumerate(self.tools)] or None,
            "tool_choice": self._choice,
            "parallel_tool_calls": not self.tool_choice.get("disable_parallel_tool_use", False),
            "response_format": self._response_format,
            "reasoning_effort": None
            if (effort := (self.output_config or {}).get("effort")) == DEFAULT_EFFORT
            else effort,
            "thinking": self.thinking,
            "max_tokens": self.max_tokens,
            "stop": self.stop_sequences or None,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
        }
        return chat_request(fields)

    def check_answerable(self) -> None:
        if self.max_tokens is None:
            raise Refused(400, "max_tokens is missing; give the most tokens of the answer", param="max_tokens")
        if self.messages[-1].get("role") == "assistant":
            problem = "the last message is the assistant's, and a reply here does not continue it"
            raise Refused(400, f"{problem}; end with a message of the user", param="messages")

    @property
    def _choice(self) -> Any:
        kind = self.tool_choice.get("type", "auto")
        if kind == "tool":
            return {"type": "function", "function": {"name": self.tool_choice.get("name")}}
        known = {"auto": "auto", "any": "required", "none": "none"}
        if not isinstance(kind, str) or kind not in known:
            raise Refused(400, "tool_choice.type must be auto, any, tool or none", param="tool_choice")
        return known[kind]

    @property
    def _response_format(self) -> Json | None:
        config = self.output_config or {}
        if unknown := sorted(config.keys() - {"format", "effort"}):
            raise Refused(400, f"output_config.{unknown[0]} is not supported; leave it out", param="output_config")
        wanted = self.output_format or config.get("format")
        if wanted is None:
            return None
        if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
            raise Refused(400, "the output format must have type json_schema and a schema", param="output_config")
        return {"type": "json_schema", "json_schema": {"name": "output", "schema": wanted.get("schema")}}


def _chat_messages(message: Mapping[str, Any], at: int) -> Iterator[Message]:
    """A message as chat messages: results of tools become messages of their own, before the text."""
    role, content, where = message.get("role"), message.get("content"), f"messages.{at}"
    if role not in ("user", "assistant", "system"):
        raise Refused(400, f"{where}.role must be user or assistant", param=f"{where}.role")
    if isinstance(content, str):
        yield {"role": role, "content": content}
        return
    if not isinstance(content, list) or not all(isinstance(block, dict) for block in content):
        raise Refused(400, f"{where}.content must be a text or a list of blocks", param=f"{where}.content")
    texts: list[str] = []
    calls: list[Json] = []
    results: list[Message] = []
    for number, block in enumerate(content):
        kind, place = block.get("type"), f"{where}.content.{number}"
        if kind == "text":
            texts.append(text_of([block], place, ("text",)))
        elif kind == "tool_use" and role == "assistant":
            function = {"name": block.get("name"), "arguments": json.dumps(block.get("input") or {})}
            calls.append({"id": block.get("id"), "type": "function", "function": function})
        elif kind == "tool_result" and role == "user":
            text = text_of(block.get("content") or "", f"{place}.content", ("text",))
            results.append({"role": "tool", "tool_call_id": block.get("tool_use_id"), "content": text})
        else:
            raise Refused(400, f"{place} has type {kind}, which is not supported; leave it out", param=place)
    yield from results
    if texts or calls or not results:
        yield {"role": role, "content": "".join(texts), **({"tool_calls": calls} if calls else {})}


def _chat_tool(tool: Mapping[str, Any], at: int) -> Json:
    if tool.get("type", "custom") != "custom" or not isinstance(tool.get("input_schema"), dict):
        problem = f"tools.{at} is not a tool with a name and an input_schema; only such tools are supported"
        raise Refused(400, f"{problem}, so leave it out", param=f"tools.{at}")
    check_tool(tool, at)
    kept = {key: tool[key] for key in ("name", "description") if tool.get(key) is not None}
    return {"type": "function", "function": {**kept, "parameters": tool["input_schema"]}}


def message_of(answer: Json) -> Json:
    """The message that a chat completion becomes."""
    choice, usage = answer["choices"][0], answer["usage"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    stopped = choice.get("stop_reason")
    reasons = {"length": "max_tokens", "tool_calls": "tool_use"}
    return {
        "id": f"msg_{call_key(answer['id'])}",
        "type": "message",
        "role": "assistant",
        "model": answer["model"],
        "content": list(_blocks(choice["message"])),
        "stop_reason": reasons.get(choice["finish_reason"], "stop_sequence" if stopped else "end_turn"),
        "stop_sequence": stopped,
        "usage": {
            "input_tokens": usage["prompt_tokens"] - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
            "output_tokens": usage["completion_tokens"],
        },
    }


def _blocks(message: Message) -> Iterator[Json]:
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        yield {"type": "text", "text": message.get("content") or ""}
    for call in calls:
        function = call["function"]
        arguments = json.loads(function["arguments"])
        yield {"type": "tool_use", "id": call["id"], "name": function["name"], "input": arguments}


async def events_of(parts: AsyncIterator[StreamPart]) -> AsyncIterator[Json]:
    """The events of a stream."""
    text = ""
    async for part in parts:
        if isinstance(part, StreamBegin):
            yield {"type": "message_start", "message": _begun(part)}
        elif is_whole(part):
            for one in _final_events(message_of(part), text):
                yield one
        elif piece := text_of_chunk(part):
            if not text:
                yield {"type": "content_block_start", "index": 0, "content_block": {"type": "text", "text": ""}}
            text += piece
            yield {"type": "content_block_delta", "index": 0, "delta": {"type": "text_delta", "text": piece}}


def _begun(begin: StreamBegin) -> Json:
    """A message of which nothing was sampled yet. How much of the prompt was cached is told at the end."""
    return {
        "id": f"msg_{call_key(begin.id)}",
        "type": "message",
        "role": "assistant",
        "model": begin.model,
        "content": [],
        "stop_reason": None,
        "stop_sequence": None,
        "usage": {"input_tokens": begin.prompt_tokens, "output_tokens": 0},
    }


def _final_events(message: Json, text: str) -> Iterator[Json]:
    """The events at the end; `text` was sent."""
    for at, block in enumerate(message["content"]):
        if block["type"] == "tool_use":
            yield {"type": "content_block_start", "index": at, "content_block": {**block, "input": {}}}
            delta = {"type": "input_json_delta", "partial_json": json.dumps(block["input"])}
            yield {"type": "content_block_delta", "index": at, "delta": delta}
        else:
            assert block["text"] == text, "the whole text was sent"
            if not text:
                yield {"type": "content_block_start", "index": at, "content_block": block}
        yield {"type": "content_block_stop", "index": at}
    end = {"stop_reason": message["stop_reason"], "stop_sequence": message["stop_sequence"]}
    yield {"type": "message_delta", "delta": end, "usage": message["usage"]}
    yield {"type": "message_stop"}


class Messages:
    """The endpoints; an application mounts `routes`."""

    def __init__(self, backend: ChatBackend) -> None:
        self._backend = backend

    @property
    def routes(self) -> list[Route]:
        return [
            Route("/v1/messages", self.create, methods=["POST"]),
            Route("/v1/messages/count_tokens", self.count_tokens, methods=["POST"]),
        ]

    async def create(self, request: Request) -> Response:
        self._backend.admit(request)
        body = MessagesRequest.model_validate_json(await request.body())
        body.check_answerable()
        chat = body.chat()
        if body.stream:
            parts = await begun(request, self._backend.stream(request, chat))
            return event_stream(events_of(parts), lambda error: anthropic_error(error, status_of(error)))
        return JSONResponse(message_of(await unless_gone(request, self._backend.complete(request, chat))))

    async def count_tokens(self, request: Request) -> Response:
        self._backend.admit(request)
        body = MessagesRequest.model_validate_json(await request.body())
        return JSONResponse({"input_tokens": await self._backend.count_tokens(request, body.chat())})
