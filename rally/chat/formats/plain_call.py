"""The plain format: `calculator(123 + 456)` or `search(query="x", topk=3)`, for names of known tools only.

Brackets and quotes are matched, so `calculator((1 + 2) * 3)` is one call. Outside of quotes, a call must end on its
line; otherwise it is malformed.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rally.chat.formats.base import FoundCall, Schemas, ToolFormat, convert, malformed, only_parameter
from rally.chat.formats.tolerant_json import read_whole
from rally.types import ToolCall

_KEYWORD = re.compile(r"\s*([A-Za-z_]\w*)\s*=(?!=)")
_CLOSERS = {"(": ")", "[": "]", "{": "}"}


class Split(NamedTuple):
    """Arguments split at the commas outside brackets and quotes, and the position after the closing bracket, if any."""

    parts: list[str]
    end: int | None


def find_plain(text: str, schemas: Schemas) -> list[FoundCall]:
    if not schemas:
        return []
    names = "|".join(re.escape(name) for name in sorted(schemas, key=len, reverse=True))
    opening = re.compile(rf"(?<![\w.])({names})\(")
    found: list[FoundCall] = []
    at = 0
    while (match := opening.search(text, at)) is not None:
        found.append(_call_at(text, match, schemas))
        at = found[-1].end
    return found


def _call_at(text: str, match: re.Match[str], schemas: Schemas) -> FoundCall:
    name, start = match.group(1), match.end()
    schema = schemas[name]
    parts, end = _split(text, start)
    shape = f"{name}({', '.join(f'{p}=value' for p in schema.get('properties') or {})})"
    if end is None:
        newline = text.find("\n", start)
        end = newline if newline >= 0 else len(text)
        return FoundCall(match.start(), end, malformed("its bracket is not closed", text[match.start() : end], shape))
    try:
        call = ToolCall(name=name, arguments=_arguments(text[start : end - 1], parts, schema))
    except ValueError as error:
        call = malformed(str(error), text[match.start() : end], shape)
    return FoundCall(match.start(), end, call)


def _split(text: str, start: int) -> Split:
    parts: list[str] = []
    begin, waiting, quote, escaped = start, [")"], "", False
    for at in range(start, len(text)):
        char = text[at]
        if quote:
            quote = "" if char == quote and not escaped else quote
            escaped = char == "\\" and not escaped
        elif char in "'\"" and not text[at - 1].isalnum():  # an apostrophe, as in "it's", opens no string
            quote = char
        elif char == "\n":
            break
        elif char in _CLOSERS:
            waiting.append(_CLOSERS[char])
        elif char == waiting[-1]:
            waiting.pop()
            if not waiting:
                return Split([*parts, text[begin:at]], at + 1)
        elif char == "," and len(waiting) == 1:
            parts.append(text[begin:at])
            begin = at + 1
    return Split(parts, None)


def _arguments(whole: str, parts: list[str], schema: Mapping[str, Any]) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    if not whole.strip():
        parts = []
    elif not _KEYWORD.match(parts[0]) and len(properties) <= 1:
        parts = [whole]  # the only parameter may hold commas itself: calculator(1,234 + 5)
    names = positional_names(schema)
    arguments: dict[str, Any] = {}
    for i, part in enumerate(parts):
        keyword = _KEYWORD.match(part)
        if keyword is None and i >= len(names):
            raise ValueError(f"it has no parameter for {part.strip()!r}")
        name = keyword.group(1) if keyword else names[i]
        arguments[name] = _value(part[keyword.end() :] if keyword else part, properties.get(name, {}))
    missing = [name for name in schema.get("required") or () if name not in arguments]
    if missing:
        raise ValueError(f"it lacks {', '.join(missing)}")
    return arguments


def positional_names(schema: Mapping[str, Any]) -> list[str]:
    """The parameters in the order in which arguments without names are assigned."""
    first = only_parameter(schema)
    others = [name for name in schema.get("properties") or {} if name != first]
    return others if first is None else [first, *others]


def _value(text: str, schema: Mapping[str, Any]) -> Any:
    """A quoted string without its quotes, otherwise the text converted by its schema or, without one, as a literal."""
    text = text.strip()
    if text[:1] in ("'", '"') or not schema:
        try:
            return read_whole(text)
        except ValueError:
            return text
    return convert(text, schema)


class PlainCalls(ToolFormat):
    """See above. A value is written as a Python string or as JSON."""

    name = "plain"

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        return find_plain(text, schemas)

    def render(self, calls: Sequence[ToolCall]) -> str:
        written = (", ".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in c.arguments.items()) for c in calls)
        return "\n".join(f"{call.name}({arguments})" for call, arguments in zip(calls, written, strict=True))
