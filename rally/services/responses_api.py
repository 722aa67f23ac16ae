"""OpenAI's `/v1/responses`, translated into chat requests.

A streaming client gets text as it is sampled, and calls when the turn is complete. Nothing is stored beyond the life of
an episode: behind the gateway `previous_response_id` continues a response of the same episode, and a server refuses it.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
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
from rally.services.openai_errors import error_body
from rally.services.openai_requests import ChatRequest
from rally.services.openai_responses import Json, StreamBegin, call_key
from rally.types import Message, RallyError

HARMLESS = frozenset(
    {
        *("metadata", "client_metadata", "user", "store", "safety_identifier"),
        *("prompt_cache_key", "prompt_cache_retention"),
    }
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "background": (False,),
    "include": ([], ["reasoning.encrypted_content"]),  # no reasoning item is ever written
    "service_tier": ("auto", "default"),
    "stream_options": ({}, {"include_obfuscation": False}, {"include_obfuscation": True}),
    "top_logprobs": (0,),
    "truncation": ("disabled",),
}
REASONING: dict[str, tuple[str, ...]] = {
    "effort": (),
    "summary": (),  # of reasoning items, which are never written
    "generate_summary": (),
    "context": ("auto",),
    "mode": ("standard",),
}
"""Fields of `reasoning`, and the values that each may have; none: all."""
TEXT_PARTS = ("input_text", "output_text", "text")


class ResponsesRequest(TranslatedRequest):
    model: str
    input: str | list[dict[str, Any]]
    instructions: str | None = None
    tools: list[dict[str, Any]] = Field([])
    tool_choice: Any = "auto"
    parallel_tool_calls: bool = True
    text: dict[str, Any] = Field({})
    reasoning: dict[str, Any] = Field({})
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    previous_response_id: str | None = None
    stream: bool = False

    def chat(self, earlier: list[Message]) -> ChatRequest:
        """The chat request. `earlier` are the messages of the response that it continues."""
        self.refuse_unknown(HARMLESS, NEUTRAL)
        if self.max_tool_calls is not None:
            raise Refused(400, "max_tool_calls counts built-in tools, which do not exist here; leave it out")
        for name, value in self.reasoning.items():
            if name not in REASONING or (REASONING[name] and value not in (None, *REASONING[name])):
                raise Refused(400, f"reasoning.{name} is not supported; leave it out", param=f"reasoning.{name}")
        items = [{"role": "user", "content": self.input}] if isinstance(self.input, str) else self.input
        opening = [{"role": "system", "content": self.instructions}] if self.instructions else []
        fields = {
            "model": self.model,
            "messages": [*opening, *earlier, *messages_of_items(items)],
            "tools": [_chat_tool(tool, at) for at, tool in enumerate(self.tools)] or None,
            "tool_choice": _chat_choice(self.tool_choice),
            "parallel_tool_calls": self.parallel_tool_calls,
            "response_format": self._response_format,
            "reasoning_effort": self.reasoning.get("effort"),
            "max_completion_tokens": self.max_output_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
        }
        return chat_request(fields)

    @property
    def _response_format(self) -> Json | None:
        if unknown := [name for name, value in self.text.items() if name != "format" and value not in (None, "medium")]:
            raise Refused(400, f"text.{unknown[0]} is not supported; leave it out", param=f"text.{unknown[0]}")
        wanted = self.text.get("format")
        if wanted is None:
            return None
        if not isinstance(wanted, dict):
            raise Refused(400, "text.format must be an object with a type", param="text.format")
        if wanted.get("type") != "json_schema":
            return wanted
        return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}


def messages_of_items(items: list[dict[str, Any]]) -> list[Message]:
    """Input items as chat messages. A message of the assistant and the calls right after it are one turn."""
    messages: list[Message] = []
    open_turn = False  # whether calls belong to the last message
    for at, item in enumerate(items):
        kind = item.get("type", "message")
        if kind == "message":
            role = item.get("role")
            content = text_of(item.get("content"), f"input.{at}.content", TEXT_PARTS)
            messages.append({"role": role, "content": content})
            open_turn = role == "assistant"
        elif kind == "function_call":
            if not open_turn:
                messages.append({"role": "assistant", "content": ""})
            function = {"name": item.get("name"), "arguments": item.get("arguments")}
            call = {"id": item.get("call_id"), "type": "function", "function": function}
            messages[-1].setdefault("tool_calls", []).append(call)
            open_turn = True
        elif kind == "function_call_output":
            output = text_of(item.get("output"), f"input.{at}.output", TEXT_PARTS)
            messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": output})
            open_turn = False
        else:
            raise Refused(400, f"input.{at} has type {kind}, which is not supported; leave it out", param=f"input.{at}")
    return messages


def _chat_tool(tool: Mapping[str, Any], at: int) -> Json:
    if tool.get("type") != "function":
        problem = f"tools.{at} has type {tool.get('type')}; only tools of type function are supported"
        raise Refused(400, f"{problem}, so leave it out", param=f"tools.{at}")
    check_tool(tool, at)
    kept = {key: tool[key] for key in ("name", "description", "parameters") if tool.get(key) is not None}
    return {"type": "function", "function": kept}


def _chat_choice(choice: Any) -> Any:
    if isinstance(choice, dict) and choice.get("type") == "function" and "function" not in choice:
        return {"type": "function", "function": {"name": choice.get("name")}}
    return choice


def response_of(answer: Json, body: ResponsesRequest) -> Json:
    """The response that a chat completion becomes."""
    choice, usage = answer["choices"][0], answer["usage"]
    cut = choice["finish_reason"] == "length"
    tokens = {"input_tokens": usage["prompt_tokens"], "output_tokens": usage["completion_tokens"]}
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return {
        "id": f"resp_{call_key(answer['id'])}",
        "object": "response",
        "created_at": answer["created"],
        "status": "incomplete" if cut else "completed",
        "incomplete_details": {"reason": "max_output_tokens"} if cut else None,
        "error": None,
        "model": answer["model"],
        "output": list(_output(choice["message"], "incomplete" if cut else "completed", call_key(answer["id"]))),
        "instructions": body.instructions,
        "max_output_tokens": body.max_output_tokens,
        "metadata": (body.model_extra or {}).get("metadata") or {},
        "parallel_tool_calls": body.parallel_tool_calls,
        "previous_response_id": body.previous_response_id,
        "reasoning": {"effort": body.reasoning.get("effort"), "summary": None},
        "store": False,
        "temperature": body.temperature,
        "text": body.text or {"format": {"type": "text"}},
        "tool_choice": body.tool_choice,
        "tools": body.tools,
        "top_p": body.top_p,
        "truncation": "disabled",
        "usage": {
            **tokens,
            "total_tokens": usage["total_tokens"],
            "input_tokens_details": {"cached_tokens": cached},
            "output_tokens_details": {"reasoning_tokens": 0},
        },
    }


def _output(message: Message, status: str, key: str) -> Iterator[Json]:
    calls = message.get("tool_calls") or ()
    if message.get("content") or not calls:
        part: Json = {"type": "output_text", "text": message.get("content") or "", "annotations": [], "logprobs": []}
        own = {"type": "message", "id": f"msg_{key}", "role": "assistant", "status": status}
        yield {**own, "content": [part]}
    for number, call in enumerate(calls):
        own = {"type": "function_call", "id": f"fc_{key}_{number}", "call_id": call["id"], "status": "completed"}
        yield {**own, **call["function"]}


async def events_of(
    parts: AsyncIterator[StreamPart], body: ResponsesRequest, finished: Callable[[Json], Json]
) -> AsyncIterator[Json]:
    """The events of a stream. `finished` makes the response of the whole chat completion, and stores it."""
    number, text, item = 0, "", dict[str, Any]()
    async for part in parts:
        if isinstance(part, StreamBegin):
            started = {**response_of(_empty(part), body), "status": "in_progress", "output": [], "usage": None}
            events: Iterable[Json] = (
                {"type": f"response.{k}", "response": started} for k in ("created", "in_progress")
            )
            item = next(_output({"content": ""}, "in_progress", call_key(part.id)))
        elif is_whole(part):
            events = _final_events(finished(part), text)
        else:
            piece = text_of_chunk(part)
            opening = _message_opening(item) if piece and not text else ()
            delta = {"type": "response.output_text.delta", **_place(item), "delta": piece, "logprobs": []}
            events, text = [*opening, *([delta] if piece else [])], text + piece
        for one in events:
            yield {**one, "sequence_number": number}
            number += 1


def _empty(begin: StreamBegin) -> Json:
    """A chat completion of which nothing was sampled yet."""
    usage = {"prompt_tokens": begin.prompt_tokens, "completion_tokens": 0, "total_tokens": begin.prompt_tokens}
    choice = {"finish_reason": "stop", "message": {"content": ""}}
    head = {"id": begin.id, "created": begin.created, "model": begin.model, "choices": [choice]}
    return {**head, "usage": {**usage, "prompt_tokens_details": {"cached_tokens": 0}}}


def _final_events(response: Json, text: str) -> Iterator[Json]:
    """The events at the end; `text` was sent."""
    for at, item in enumerate(response["output"]):
        if item["type"] == "function_call":
            yield from _call_events(item, at)
        else:
            yield from () if text else _message_opening(item)
            (part,) = item["content"]
            assert part["text"] == text, "the whole text was sent"
            yield {"type": "response.output_text.done", **_place(item), "text": text, "logprobs": []}
            yield {"type": "response.content_part.done", **_place(item), "part": part}
        yield {"type": "response.output_item.done", "output_index": at, "item": item}
    yield {"type": f"response.{response['status']}", "response": response}


def _place(item: Json) -> Json:
    """A message is the first item."""
    return {"output_index": 0, "item_id": item["id"], "content_index": 0}


def _message_opening(item: Json) -> Iterator[Json]:
    (part,) = item["content"]
    opened = {**item, "status": "in_progress", "content": []}
    yield {"type": "response.output_item.added", "output_index": 0, "item": opened}
    yield {"type": "response.content_part.added", **_place(item), "part": {**part, "text": ""}}


def _call_events(item: Json, at: int) -> Iterator[Json]:
    place, name = {"output_index": at, "item_id": item["id"]}, "response.function_call_arguments"
    opened = {**item, "status": "in_progress", "arguments": ""}
    yield {"type": "response.output_item.added", "output_index": at, "item": opened}
    yield {"type": f"{name}.delta", **place, "delta": item["arguments"]}
    yield {"type": f"{name}.done", **place, "name": item["name"], "arguments": item["arguments"]}


def _failed(error: RallyError) -> Json:
    own = error_body(error)["error"]
    return {"type": "error", "code": own["code"] or own["type"], "message": own["message"], "param": own["param"]}


class Responses:
    """The endpoint; an application mounts `routes`."""

    def __init__(self, backend: ChatBackend) -> None:
        self._backend = backend

    @property
    def routes(self) -> list[Route]:
        return [Route("/v1/responses", self.create, methods=["POST"])]

    async def create(self, request: Request) -> Response:
        self._backend.admit(request)
        body = ResponsesRequest.model_validate_json(await request.body())
        stored = self._backend.stored_responses(request)
        earlier = self._earlier(stored, body.previous_response_id)
        chat = body.chat(earlier)

        def finished(answer: Json) -> Json:
            response = response_of(answer, body)
            if stored is not None:
                # Instructions are not part of what a later response continues.
                own = chat.messages[1:] if body.instructions else chat.messages
                stored[response["id"]] = [*own, answer["choices"][0]["message"]]
            return response

        if body.stream:
            parts = await begun(request, self._backend.stream(request, chat))
            return event_stream(events_of(parts, body, finished), _failed)
        return JSONResponse(finished(await unless_gone(request, self._backend.complete(request, chat))))

    def _earlier(self, stored: dict[str, list[Message]] | None, previous: str | None) -> list[Message]:
        if previous is None:
            return []
        if stored is None:
            problem = "this server stores no responses; send the whole conversation as input"
            raise Refused(400, f"previous_response_id is not supported: {problem}", param="previous_response_id")
        if previous not in stored:
            problem = f"there is no response {previous} in this episode"
            raise Refused(404, problem, param="previous_response_id", code="previous_response_not_found")
        return stored[previous]
