"""Formats that write each call as a JSON object, or all calls as a list of them, after a mark.

Hermes and Qwen are `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`. Every opening mark gives a call,
malformed or not. A valid JSON value determines where the call ends, so a closing mark inside a string argument is text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

from rally.chat.formats.base import (
    CallKeys,
    FoundCall,
    Schemas,
    ToolFormat,
    argument_object,
    call_of,
    first_words,
    malformed,
)
from rally.chat.formats.plain_call import find_plain
from rally.chat.formats.tolerant_json import read_json
from rally.types import ToolCall

_FENCE = re.compile(r"\s*```(?:json)?", re.IGNORECASE)
# An extra closing brace is the most common mistake and is harmless.
_CLUTTER = re.compile(r"[\s}\];,]*(?:```)?\s*")


class Tagged(NamedTuple):
    """The calls behind one opening mark, and where the marked part ends."""

    calls: list[ToolCall]
    end: int


class JsonCalls(ToolFormat):
    """JSON after `opening`, up to `closing` or, if that is empty, the end of the value.

    `layout` is how several calls are written: each after its own mark, one list after one mark, or one object a line
    after one mark. A `keyed` call is `{"tool name": {"parameter": "value"}}`. `before` is a pattern that must follow an
    opening that is also an ordinary word.
    """

    def __init__(
        self,
        name: str,
        opening: str,
        closing: str = "",
        *,
        layout: Literal["each", "list", "lines"] = "each",
        keys: CallKeys = CallKeys(),  # noqa: B008
        keyed: bool = False,
        margin: str = "\n",
        before: str = "",
    ) -> None:
        self.name, self.opening, self.closing = name, opening, closing
        self.marks = (opening,)
        self.begins = first_words(opening, closing)
        self._layout, self._keys, self._keyed, self._margin = layout, keys, keyed, margin
        ahead = rf"(?={before})" if before else ""
        marks = [rf"(?P<open>{spaced(opening)}{ahead})", *([rf"(?P<close>{spaced(closing)})"] if closing else [])]
        self._mark = re.compile("|".join(marks))
        example = {"tool name": {"parameter": "value"}}
        if not keyed:
            example = {keys.name: "tool name", keys.arguments: {"parameter": "value"}}  # type: ignore[dict-item]
        shown = json.dumps([example] if layout == "list" else example)
        # Without the marks' brackets: marks are escaped where the model reads this.
        words = " and ".join(dict.fromkeys(re.sub(r"\W+", " ", mark).strip() for mark in (opening, closing) if mark))
        self.shape = f"{shown} between {words} tags" if closing else f"{shown} after {words}"

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        found: list[FoundCall] = []
        at = 0
        while (mark := self._mark.search(text, at)) is not None:
            if mark.lastgroup == "close":
                reason = f"{self.closing} without {self.opening} before it"
                calls, at = Tagged([malformed(reason, mark.group(), self.shape)], mark.end())
            else:
                calls, at = self.read(text, mark.end(), schemas)
            first = calls[0] if calls[1:] else replace(calls[0], raw=text[mark.start() : at])
            found.append(FoundCall(mark.start(), at, first))
            found += [FoundCall(at, at, call) for call in calls[1:]]
        return found

    def read(self, text: str, start: int, schemas: Schemas) -> Tagged:
        """The calls after an opening mark."""
        calls: list[ToolCall] = []
        at = start
        while not calls or (text.startswith(("{", "["), at) and not self._mark.match(text, at)):
            begin = fence.end() if (fence := _FENCE.match(text, at)) else at
            try:
                value, at = read_json(text, begin)
                items = value if isinstance(value, list) and value else [value]
                calls += [self._call(item, schemas, text[begin:at].strip()) for item in items]
            except ValueError as error:
                rest = self._not_json(text, begin, str(error), schemas)
                return Tagged(calls + rest.calls, rest.end)
            clutter = _CLUTTER.match(text, at)
            at = clutter.end() if clutter else at
        following = self._mark.search(text, at) if self.closing else None
        return Tagged(calls, following.end() if following and following.lastgroup == "close" else at)

    def _call(self, value: Any, schemas: Schemas, raw: str) -> ToolCall:
        if self._keyed and isinstance(value, dict) and len(value) == 1:
            [(name, arguments)] = value.items()
            return ToolCall(name=name, arguments=argument_object(arguments, schemas.get(name, {})), raw=raw)
        return call_of(value, schemas, raw, self._keys)

    def _not_json(self, text: str, start: int, reason: str, schemas: Schemas) -> Tagged:
        following = self._mark.search(text, start)
        stop = following.start() if following else len(text)
        end = following.end() if following and following.lastgroup == "close" else stop
        body = text[start:stop].strip()
        plain = find_plain(body, schemas)
        if len(plain) == 1 and plain[0].start == 0 and plain[0].end == len(body):
            return Tagged([plain[0].call], end)
        nothing = "there is nothing between the tags" if self.closing else f"nothing follows {self.opening}"
        return Tagged([malformed(reason if body else nothing, body, self.shape)], end)

    def render(self, calls: Sequence[ToolCall]) -> str:
        objects = [json.dumps(self._object(call), ensure_ascii=False) for call in calls]
        if not objects:
            return ""
        if self._layout == "list":
            return f"{self.opening}[{', '.join(objects)}]{self.closing}"
        if self._layout == "lines":
            objects = ["\n".join(objects)]
        return "\n".join(f"{self.opening}{self._margin}{one}{self._margin}{self.closing}".rstrip() for one in objects)

    def _object(self, call: ToolCall) -> dict[str, Any]:
        if self._keyed:
            return {call.name: call.arguments}
        named: dict[str, Any] = {self._keys.name: call.name, self._keys.arguments: call.arguments}
        return {**named, self._keys.id: call.id} if self._keys.id and call.id else named


def spaced(literal: str) -> str:
    """A pattern for the text, in which whitespace may differ, also between tags."""
    return r"\s*".join(re.escape(part) for part in re.split(r"\s+|(?<=>)(?=<)", literal))
