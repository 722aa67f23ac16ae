"""The format of Llama 3: one or several bare `{"name": ..., "parameters": {...}}`, with or without `<|python_tag|>`.

An object that names no tool is an answer in JSON and stays in the text. An object that begins like a call but is not
valid JSON is a malformed call.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from typing import Any, NamedTuple

from rally.chat.formats.base import FoundCall, Schemas, ToolFormat, call_of, malformed
from rally.chat.formats.tolerant_json import read_json
from rally.types import ToolCall

SHAPE = '{"name": "tool name", "parameters": {"parameter": "value"}}'
PYTHON_TAG = "<|python_tag|>"
_START = re.compile(rf"{re.escape(PYTHON_TAG)}\s*(?:```(?:json)?\s*)?\[?|\{{(?=\s*[\"'\w}}])")
_AFTER = re.compile(r"\s*\]?\s*(?:```)?\s*[;,]?")
_LIKE_A_CALL = re.compile(r"""\s*\{\s*(["']?)(?:name|function)\1\s*:""")
_NEXT = re.compile(rf"[;\n][ \t]*(?=\{{)|{re.escape(PYTHON_TAG)}")


class ReadCall(NamedTuple):
    """A call, or None for other text to skip, and where it ends."""

    call: ToolCall | None
    end: int


def find_llama3(text: str, schemas: Schemas) -> list[FoundCall]:
    found: list[FoundCall] = []
    at = 0
    while (start := _START.search(text, at)) is not None:
        tagged = start.group() != "{"
        call, end = _call_at(text, start.end() if tagged else start.start(), tagged, schemas)
        if call is not None:
            found.append(FoundCall(_with_opening(text, at, start.start()), end, call))
        at = end
    return found


def _call_at(text: str, begin: int, tagged: bool, schemas: Schemas) -> ReadCall:
    meant = tagged or _LIKE_A_CALL.match(text, begin) is not None
    try:
        value, end = read_json(text, begin)
    except ValueError as error:
        return _broken(text, begin, str(error)) if meant else ReadCall(None, begin + 1)
    if not meant and not _names_a_tool(value, schemas):
        return ReadCall(None, end)
    after = _AFTER.match(text, end)
    stop = after.end() if after else end
    try:
        return ReadCall(call_of(value, schemas), stop)
    except ValueError as error:
        return ReadCall(malformed(str(error), text[begin:end], SHAPE), stop)


def _names_a_tool(value: Any, schemas: Schemas) -> bool:
    name = value.get("name") if isinstance(value, dict) else None
    return isinstance(name, str) and (name in schemas or bool({"parameters", "arguments"} & set(value)))


def _broken(text: str, begin: int, reason: str) -> ReadCall:
    following = _NEXT.search(text, begin + 1)
    end = following.start() if following else len(text)
    return ReadCall(malformed(reason, text[begin:end], SHAPE), end)


def _with_opening(text: str, low: int, start: int) -> int:
    """Where the call begins, including a code fence or list bracket before it."""
    before = text[low:start].rstrip()
    before = before.removesuffix("[").rstrip()
    for fence in ("```json", "```"):
        if before.endswith(fence):
            return low + len(before) - len(fence)
    return low + len(before) if text[low + len(before) : start].strip() else start


class BareJson(ToolFormat):
    """See above. `listed`: several calls are written as one list (xLAM)."""

    def __init__(self, name: str, arguments: str = "parameters", listed: bool = False) -> None:
        self.name, self._arguments, self._listed = name, arguments, listed

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        return find_llama3(text, schemas)

    def render(self, calls: Sequence[ToolCall]) -> str:
        objects = [json.dumps({"name": c.name, self._arguments: c.arguments}, ensure_ascii=False) for c in calls]
        return f"[{', '.join(objects)}]" if self._listed else "; ".join(objects)
