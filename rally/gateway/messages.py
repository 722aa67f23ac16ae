"""Two spellings of one conversation are one conversation, and two conversations that differ in a word are two.

Clients rewrite what they send back: no content becomes empty content, the JSON of arguments is written anew, fields
that hold nothing come and go, call ids are made up again. Nobody said any of that, so the canonical form leaves it out.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from rally.types import Message, RallyError


class MessageError(RallyError):
    """A message that is none, in one sentence."""


@dataclass(frozen=True)
class Conversation:
    """What an agent sent: its messages in their canonical form, and the tools it offered with them."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    call_ids: tuple[str, ...] = field(default=(), compare=False)  # as the client has them, of all calls in the messages

    @classmethod
    def of(cls, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] = ()) -> Conversation:
        ids = [str(call.get("id")) for message in messages for call in _calls(message)]
        return cls(canonical(messages), tuple(tools), tuple(ids))

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """One for the beginning, and one for each message: equal where all said up to it, and offered, is equal."""
        keys = [_digest(b"", self.tools)]
        for message in self.messages:
            keys.append(_digest(keys[-1], _said(message)))
        return tuple(keys)

    @property
    def answered(self) -> int:
        """How many messages there are up to the assistant's last, that one included."""
        return max((i for i, m in enumerate(self.messages, 1) if m["role"] == "assistant"), default=0)

    def followed_by(self, message: Mapping[str, Any]) -> Conversation:
        said = Conversation.of([message])
        return Conversation(self.messages + said.messages, self.tools, self.call_ids + said.call_ids)


def canonical(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages as templates want them. A call is known by its place among those of its turn, as the tool loop knows
    it, and the tool that answers it by its name: clients leave the name out, and some templates print it."""
    result: list[Message] = []
    calls: dict[str, tuple[str, str]] = {}
    for at, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise MessageError(f"messages.{at} has no role; give it one, such as user")
        rest = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls") and v}
        plain: Message = {"role": "system" if role == "developer" else role, "content": _content(message, at), **rest}
        if role == "assistant":
            written = [_call(call, number, at) for number, call in enumerate(_calls(message))]
            ids = [str(call.get("id")) for call in _calls(message)]
            calls = {i: (call["id"], call["function"]["name"]) for i, call in zip(ids, written, strict=True)}
            plain |= {"tool_calls": written} if written else {}
        elif role == "tool" and (known := calls.get(str(message.get("tool_call_id")))):
            plain |= {"tool_call_id": known[0], "name": known[1]}
        result.append(plain)
    return tuple(result)


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise MessageError("tool_calls must be a list of calls, each with an id, a type and a function")
    return calls


def _content(message: Mapping[str, Any], at: int) -> str:
    """Text where there is nothing but text."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise MessageError(f"messages.{at}.content must be a text or a list of parts")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise MessageError(f"messages.{at}.content has a part of type {part.get('type')}; send text alone")
    return "".join(part["text"] for part in content)


def _call(call: Mapping[str, Any], number: int, at: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(
            f"messages.{at}.tool_calls.{number} names no function; only calls of functions are known here"
        )
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError):  # what is not JSON is the text it is
            arguments = json.loads(arguments)
    return {"id": f"call_{number}", "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _said(message: Message) -> Message:
    """What a message says. The assistant's name and the space around its words are not compared: some clients add the
    one and cut off the other, and what was sampled is what counts."""
    if message["role"] != "assistant":
        return message
    content = message["content"]
    unnamed = {key: value for key, value in message.items() if key != "name"}
    return {**unnamed, "content": content.strip() if isinstance(content, str) else content}


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(_numbers(value), sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _numbers(value: Any) -> Any:
    """1.0 is 1: JSON knows one kind of number, and some clients write the one for the other."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list | tuple) else value
