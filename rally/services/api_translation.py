"""What the translations of OpenAI's Responses and Anthropic's Messages into chat requests share.

Both become a `ChatRequest`, and their answers are made of its chat completion. So the three APIs continue the same
conversations, and what one refuses the others refuse.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any, Protocol

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator
from starlette.requests import Request

from rally.services.admission import Refused
from rally.services.openai_requests import ChatRequest
from rally.services.openai_responses import Json
from rally.types import Message


class ChatBackend(Protocol):
    """Who answers chat requests: an episode behind the gateway, or a server."""

    def admit(self, request: Request) -> None:
        """Raises Refused for a request without a valid key."""
        ...

    async def complete(self, request: Request, chat: ChatRequest) -> Json:
        """The whole chat completion."""
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


async def named_events(events: Sequence[Json]) -> AsyncIterator[bytes]:
    """Server-sent events that are named by their `type`."""
    for one in events:
        data = json.dumps(one, ensure_ascii=False, separators=(",", ":"))
        yield f"event: {one['type']}\ndata: {data}\n\n".encode()
