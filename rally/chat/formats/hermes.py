"""The format of Hermes and Qwen: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`.

Every opening tag gives a call, malformed or not. A valid JSON value determines where the call ends, so a closing tag
inside a string argument is text.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import NamedTuple

from rally.chat.formats.base import FoundCall, Schemas, ToolFormat, call_of, malformed
from rally.chat.formats.plain_call import find_plain
from rally.chat.formats.tolerant_json import read_json
from rally.types import ToolCall

OPEN, CLOSE = "<tool_call>", "</tool_call>"
# Without the tags themselves, which are escaped where the model reads this.
SHAPE = '{"name": "tool name", "arguments": {"parameter": "value"}} between tool_call tags'
_TAG = re.compile(r"</?tool_call>")
_FENCE = re.compile(r"\s*```(?:json)?", re.IGNORECASE)
# An extra closing brace is the most common mistake and is harmless.
_CLUTTER = re.compile(r"[\s}\];,]*(?:```)?\s*")


class Tagged(NamedTuple):
    """The calls behind one opening tag, and where the tagged part ends."""

    calls: list[ToolCall]
    end: int


def find_hermes(text: str, schemas: Schemas) -> list[FoundCall]:
    found: list[FoundCall] = []
    at = 0
    while (tag := _TAG.search(text, at)) is not None:
        if tag.group() == CLOSE:
            calls, at = Tagged([malformed(f"{CLOSE} without {OPEN} before it", CLOSE, SHAPE)], tag.end())
        else:
            calls, at = _tagged(text, tag.end(), schemas)
        found.append(
            FoundCall(tag.start(), at, calls[0] if calls[1:] else replace(calls[0], raw=text[tag.start() : at]))
        )
        found += [FoundCall(at, at, call) for call in calls[1:]]
    return found


def _tagged(text: str, start: int, schemas: Schemas) -> Tagged:
    calls: list[ToolCall] = []
    at = start
    while not calls or text.startswith(("{", "["), at):
        begin = fence.end() if (fence := _FENCE.match(text, at)) else at
        try:
            value, at = read_json(text, begin)
            items = value if isinstance(value, list) and value else [value]
            calls += [call_of(item, schemas, raw=text[begin:at].strip()) for item in items]
        except ValueError as error:
            rest = _not_json(text, begin, str(error), schemas)
            return Tagged(calls + rest.calls, rest.end)
        clutter = _CLUTTER.match(text, at)
        at = clutter.end() if clutter else at
    closing = _TAG.search(text, at)
    return Tagged(calls, closing.end() if closing and closing.group() == CLOSE else at)


def _not_json(text: str, start: int, reason: str, schemas: Schemas) -> Tagged:
    following = _TAG.search(text, start)
    stop = following.start() if following else len(text)
    end = following.end() if following and following.group() == CLOSE else stop
    body = text[start:stop].strip()
    plain = find_plain(body, schemas)
    if len(plain) == 1 and plain[0].start == 0 and plain[0].end == len(body):
        return Tagged([plain[0].call], end)
    return Tagged([malformed(reason if body else "there is nothing between the tags", body, SHAPE)], end)


HERMES = ToolFormat("hermes", find_hermes)
