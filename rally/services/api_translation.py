"""What the translations of OpenAI's Responses and Anthropic's Messages into chat requests share.

Both become a `ChatRequest`, and their answers are made of its chat completion. So the three APIs continue the same
conversations, and what one refuses the others refuse.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from typing import Any, Protocol, TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from rally.services.admission import Refused, unless_gone
from rally.services.openai_requests import ChatRequest
from rally.services.openai_responses import ChatShape, Json, StreamBegin
from rally.types import Message, RallyError

T = TypeVar("T")
StreamPart = StreamBegin | Json
NO_CACHE = {"Cache-Control": "no-cache"}


class ChatBackend(Protocol):
    """Who answers chat requests: an episode behind the gateway, or a server."""

    def admit(self, request: Request) -> None:
        """Raises Refused for a request without a valid key."""
        ...

    async def complete(self, request: Request, chat: ChatRequest) -> Json:
        """The whole chat completion."""
        ...

    def stream(self, request: Request, chat: ChatRequest) -> AsyncGenerator[StreamPart, None]:
        """Its begin, its chunks as they are sampled, and the whole chat completion, whose text they add up to."""
        ...

    async def count_tokens(self, request: Request, chat: ChatRequest) -> int:
        """The tokens of its prompt."""
        ...

    def stored_responses(self, request: Request) -> dict[str, list[Message]] | None:
        """The conversations that `previous_response_id` may continue; None if nothing is stored."""
        ...


class TranslatedRequest(BaseModel):
    """A request of another API. Fields that are not supported are refused by name."""

    model_config = ConfigDict(extra="allow", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _drop_nulls(cls, body: Any) -> Any:
        return {name: value for name, value in body.items() if value is not None} if isinstance(body, dict) else body

    def refuse_unknown(self, harmless: frozenset[str], neutral: Mapping[str, Sequence[Any]]) -> None:
        for name, value in (self.model_extra or {}).items():
            if name not in harmless and value not in neutral.get(name, ()):
                shown = json.dumps(value)
                shown = shown if len(shown) <= 80 else f"{shown[:80]}..."
                raise Refused(400, f"{name}={shown} is not supported; leave it out", param=name)


def chat_request(fields: Mapping[str, Any]) -> ChatRequest:
    """The chat request of translated fields."""
    try:
        return ChatRequest.model_validate({name: value for name, value in fields.items() if value is not None})
    except ValidationError as problem:
        first = problem.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise Refused(400, f"{where}: {first['msg']}", param=where) from None


def text_of(content: Any, where: str, kinds: Sequence[str]) -> str:
    """The text of a content that is a text or a list of parts with text."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise Refused(400, f"{where} must be a text or a list of parts", param=where)
    texts = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind not in kinds or not isinstance(part.get("text"), str):
            raise Refused(400, f"{where} has a part of type {kind}; send only text", param=where)
        texts.append(part["text"])
    return "".join(texts)


TOOL_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "allowed_callers": ([], ["direct"]),
    "async": (False,),
    "defer_loading": (False,),
    "input_examples": ([],),
    "output_schema": ({},),
}
"""Fields of a tool that would change what the model is shown or may do, and their values that change nothing."""


def check_tool(tool: Mapping[str, Any], at: int) -> None:
    for name, neutral in TOOL_NEUTRAL.items():
        if tool.get(name) is not None and tool[name] not in neutral:
            where = f"tools.{at}.{name}"
            raise Refused(400, f"{where} is not supported; leave it out", param=where)


def is_whole(part: StreamPart) -> bool:
    """Whether a part of a stream is the whole completion, which is the last."""
    return not isinstance(part, StreamBegin) and part["object"] == ChatShape.kind


def text_of_chunk(chunk: Json) -> str:
    """The text that a chunk of a chat completion adds."""
    return chunk["choices"][0]["delta"].get("content") or ""


async def begun(request: Request, parts: AsyncGenerator[T, None]) -> AsyncGenerator[T, None]:
    """The parts of a stream after its first was made: an error until then gets a status of its own."""
    first = await unless_gone(request, anext(parts))

    async def all_parts() -> AsyncGenerator[T, None]:
        async with aclosing(parts):
            yield first
            async for part in parts:
                yield part

    return all_parts()


def event_stream(events: AsyncIterator[Json], failed: Callable[[RallyError], Json]) -> Response:
    """Server-sent events that are named by their `type`. An error in the middle is an event too: the status has been
    sent."""

    async def written() -> AsyncIterator[bytes]:
        try:
            async for one in events:
                yield _named(one)
        except RallyError as error:
            yield _named(failed(error))

    return StreamingResponse(written(), media_type="text/event-stream", headers=NO_CACHE)


def _named(one: Json) -> bytes:
    data = json.dumps(one, ensure_ascii=False, separators=(",", ":"))
    return f"event: {one['type']}\ndata: {data}\n\n".encode()
