"""The format of Qwen3-Coder: `<tool_call><function=N><parameter=K>value</parameter></function></tool_call>`.

Values are raw text, converted by the tool's schema. The outer tags and the tags at the end of the turn are optional. A
parameter cut off by the end of the turn makes the call malformed, since its value is incomplete.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from rally.chat.formats.base import FoundCall, Schemas, ToolFormat, convert, malformed
from rally.types import ToolCall

SHAPE = "<function=tool name><parameter=name>value</parameter></function> between tool_call tags"
_START = re.compile(r"<tool_call>\s*(?:<function=([^>\n]{0,200})>)?|<function=([^>\n]{0,200})>|</tool_call>")
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]{0,200})>")
_CLOSE = "</parameter>"
_UNCLOSED_END = re.compile(r"<parameter=|</function>|<function=|<tool_call>")
_END = re.compile(r"\s*(?:</function>)?\s*(?:</tool_call>)?")
_NEXT = re.compile(r"(?=<tool_call>|<function=)|</tool_call>")


class Body(NamedTuple):
    """The arguments after a function's opening tag, and where they end."""

    arguments: dict[str, Any]
    end: int


def find_qwen3_coder(text: str, schemas: Schemas) -> list[FoundCall]:
    found: list[FoundCall] = []
    at = 0
    while (start := _START.search(text, at)) is not None:
        name = (start.group(1) or start.group(2) or "").strip()
        found.append(_call_at(text, start, name, schemas))
        at = found[-1].end
    return found


def _call_at(text: str, start: re.Match[str], name: str, schemas: Schemas) -> FoundCall:
    if not name:
        stray = start.group() == "</tool_call>"
        reason = (
            "</tool_call> without <tool_call> before it" if stray else "no <function=tool name> follows <tool_call>"
        )
        return _broken(text, start, start.end() if stray else None, reason)
    try:
        body = _body(text, start.end(), schemas.get(name, {}))
    except ValueError as error:
        return _broken(text, start, None, str(error))
    closing = _END.match(text, body.end)
    assert closing is not None, "every part of it is optional"
    end = closing.end()
    if text[end:].strip() and not closing.group().strip():
        return _broken(text, start, None, f"expected <parameter=name> or </function> at {text[end:].strip()[:20]!r}")
    return FoundCall(start.start(), end, ToolCall(name=name, arguments=body.arguments))


def _body(text: str, at: int, schema: Mapping[str, Any]) -> Body:
    arguments: dict[str, Any] = {}
    properties = schema.get("properties") or {}
    last_close = text.rfind(_CLOSE, at)
    while (opening := _PARAMETER.match(text, at)) is not None:
        key, start = opening.group(1).strip(), opening.end()
        stop = text.find(_CLOSE, start) if start <= last_close else _unclosed_end(text, start, key)
        value = text[start:stop].removeprefix("\n").removesuffix("\n")
        arguments[key] = convert(value, properties.get(key, {}))
        at = stop + len(_CLOSE) if start <= last_close else stop
    return Body(arguments, at)


def _unclosed_end(text: str, start: int, key: str) -> int:
    """Where a value without its closing tag ends: at the next parameter or the end of its function. Else ValueError."""
    following = _UNCLOSED_END.search(text, start)
    if following is None or following.group() in ("<function=", "<tool_call>"):
        raise ValueError(f"the value of parameter {key!r} is not closed with {_CLOSE}")
    return following.start()


def _broken(text: str, start: re.Match[str], end: int | None, reason: str) -> FoundCall:
    if end is None:
        following = _NEXT.search(text, start.end())
        end = following.end() if following else len(text)
    return FoundCall(start.start(), end, malformed(reason, text[start.start() : end], SHAPE))


QWEN3_CODER = ToolFormat("qwen3_coder", find_qwen3_coder)
