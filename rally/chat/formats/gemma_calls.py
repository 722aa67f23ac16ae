"""The formats of Gemma: `<|tool_call>call:search{query:<|"|>x<|"|>,topk:3}<tool_call|>`.

Keys are bare, strings stand between a quote mark of their own, and everything else is JSON. FunctionGemma uses other
marks. JSON's quotes are accepted too. A string ends at the next quote mark, so other marks inside it are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any

from rally.chat.formats.base import FoundCall, Schemas, ToolFormat, malformed
from rally.chat.formats.tolerant_json import Value, read_json, read_whole
from rally.types import ToolCall

_SPACE = re.compile(r"\s*")
_SCALAR = re.compile(r"[^,\[\]{}<>\"':\s][^,\[\]{}<>\n]*")
_CALL = re.compile(r"\s*call\s*:\s*([^{}<>\n]{1,200}?)\s*(?=\{)")
MAX_DEPTH = 64


class GemmaCalls(ToolFormat):
    """Calls between `opening` and `closing`, with strings between two `quote` marks."""

    def __init__(self, name: str, opening: str, closing: str, quote: str) -> None:
        self.name, self.opening, self.closing, self.quote = name, opening, closing, quote
        self.marks = (opening, quote)
        self.shape = f"{opening}call:tool name{{parameter:{quote}value{quote}}}{closing}"
        self._mark = re.compile(rf"(?P<open>{re.escape(opening)})|(?P<close>{re.escape(closing)})")

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        found: list[FoundCall] = []
        at = 0
        while (mark := self._mark.search(text, at)) is not None:
            if mark.lastgroup == "close":
                reason = f"{self.closing} without {self.opening} before it"
                found.append(FoundCall(mark.start(), mark.end(), malformed(reason, mark.group(), self.shape)))
            else:
                found.append(self._call_at(text, mark.start(), mark.end()))
            at = found[-1].end
        return found

    def _call_at(self, text: str, start: int, at: int) -> FoundCall:
        head = _CALL.match(text, at)
        name = head[1] if head else ""
        try:
            if head is None:
                raise ValueError("call:tool name{...} does not follow the opening mark")
            arguments, end = self._value(text, head.end(), 0)
            assert isinstance(arguments, dict)
        except ValueError as error:
            following = self._mark.search(text, at)
            end = len(text) if following is None else following.start()
            end = following.end() if following is not None and following.lastgroup == "close" else end
            return FoundCall(start, end, malformed(str(error), text[start:end], self.shape, name))
        closing = re.compile(rf"[\s}}]*{re.escape(self.closing)}").match(text, end)
        return FoundCall(start, closing.end() if closing else end, ToolCall(name=name, arguments=arguments))

    def _value(self, text: str, at: int, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        at = _skip(text, at)
        if text.startswith(self.quote, at):
            return self._string(text, at)
        char = text[at : at + 1]
        if char == "{":
            return self._object(text, at + 1, depth)
        if char == "[":
            return self._array(text, at + 1, depth)
        if char in ("'", '"'):
            return read_json(text, at)
        scalar = _SCALAR.match(text, at)
        if scalar is None:
            raise ValueError(f"expected a value at {text[at : at + 20]!r}")
        word = scalar.group().strip()
        try:
            return Value(read_whole(word), scalar.end())
        except ValueError:
            return Value(word, scalar.end())  # a text without quote marks

    def _string(self, text: str, at: int) -> Value:
        begin = at + len(self.quote)
        end = text.find(self.quote, begin)
        if end < 0:
            raise ValueError(f"a string is not closed with {self.quote}")
        return Value(text[begin:end], end + len(self.quote))

    def _object(self, text: str, at: int, depth: int) -> Value:
        result: dict[str, Any] = {}
        while (at := _skip(text, at)) < len(text) and text[at] != "}":
            if text.startswith(self.quote, at):
                key, at = self._string(text, at)
            elif text[at] in "'\"":
                key, at = read_json(text, at)
            else:
                colon = re.compile(r"[^:{}\[\],]{1,200}").match(text, at)
                if colon is None:
                    raise ValueError(f"expected a key at {text[at : at + 20]!r}")
                key, at = colon.group().strip(), colon.end()
            at = _skip(text, at)
            if not text.startswith(":", at):
                raise ValueError(f"expected ':' after {str(key)[:40]!r}")
            result[str(key)], at = self._value(text, at + 1, depth + 1)
            at = self._comma_or(text, at, "}")
        return Value(result, self._closed(text, at, "}"))

    def _array(self, text: str, at: int, depth: int) -> Value:
        items: list[Any] = []
        while (at := _skip(text, at)) < len(text) and text[at] != "]":
            item, at = self._value(text, at, depth + 1)
            items.append(item)
            at = self._comma_or(text, at, "]")
        return Value(items, self._closed(text, at, "]"))

    def _comma_or(self, text: str, at: int, closer: str) -> int:
        at = _skip(text, at)
        if text.startswith(",", at):
            return at + 1
        if at < len(text) and text[at] != closer:
            raise ValueError(f"expected ',' or {closer!r} at {text[at : at + 20]!r}")
        return at

    def _closed(self, text: str, at: int, closer: str) -> int:
        if not text.startswith(closer, at):
            raise ValueError("it ends before its brackets are closed")
        return at + 1

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "".join(f"{self.opening}call:{c.name}{self._written(c.arguments, False)}{self.closing}" for c in calls)

    def _written(self, value: Any, quoted: bool = True) -> str:
        if isinstance(value, str):
            return f"{self.quote}{value}{self.quote}"
        if isinstance(value, dict):
            keys = [f"{self.quote}{key}{self.quote}" if quoted else key for key in value]
            return "{" + ",".join(f"{k}:{self._written(v)}" for k, v in zip(keys, value.values(), strict=True)) + "}"
        if isinstance(value, list):
            return "[" + ",".join(self._written(item) for item in value) + "]"
        return json.dumps(value)


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
