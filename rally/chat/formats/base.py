"""Defines `ToolFormat` and what the tool-call formats share.

A format is one function that finds the calls in a text. Shared are: reading a JSON object as a call, assigning bare
text to a tool's only parameter, and converting text to a typed value. A malformed call is kept, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from rally.chat.formats.tolerant_json import read_whole
from rally.types import ToolCall

Schemas = Mapping[str, Mapping[str, Any]]
"""Tool name to its parameter schema (JSON schema of an object)."""


class FoundCall(NamedTuple):
    """A call and its position in the text, text[start:end]."""

    start: int
    end: int
    call: ToolCall


class FormatResult(NamedTuple):
    """The text outside of the calls, and the calls in the order written."""

    content: str
    calls: tuple[ToolCall, ...]


@dataclass(frozen=True)
class ToolFormat:
    """How one family of models writes tool calls."""

    name: str
    find: Callable[[str, Schemas], list[FoundCall]]

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = (), start: int = 0) -> FormatResult:
        """Parse the text. Calls are searched from `start` on, which skips a thinking block."""
        found = self.find(text[start:], schemas_of(tools))
        if start:
            found = [FoundCall(f.start + start, f.end + start, f.call) for f in found]
        calls = tuple(_numbered(f.call, i, f.call.raw or text[f.start : f.end]) for i, f in enumerate(found))
        return FormatResult(outside(text, found), calls)


def _numbered(call: ToolCall, number: int, raw: str) -> ToolCall:
    return ToolCall(name=call.name, arguments=call.arguments, id=f"call_{number}", raw=raw, error=call.error)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Tool names and parameter schemas, from tools in OpenAI form, with or without the {"type": "function"} wrapper."""
    functions = [tool.get("function") or tool for tool in tools]
    return {str(f["name"]): f.get("parameters") or {} for f in functions}


def outside(text: str, found: Sequence[FoundCall]) -> str:
    """The text without its calls; unchanged if there are none."""
    if not found:
        return text
    starts = [f.start for f in found] + [len(text)]
    ends = [0] + [f.end for f in found]
    pieces = [text[end:start].strip() for end, start in zip(ends, starts, strict=True)]
    return "\n".join(piece for piece in pieces if piece)


def malformed(reason: str, raw: str, shape: str) -> ToolCall:
    """A malformed call. Its error tells the model the reason and the correct form."""
    name = re.search(r"""["'](?:name|function)["']\s*:\s*["']([^"'\n]+)["']|<function=([^>\n]+)>""", raw)
    guess = (name.group(1) or name.group(2)).strip() if name else ""
    return ToolCall(name=guess, raw=raw, error=f"Failed to decode tool call: {reason}. Write it as {shape}")


def call_of(value: Any, schemas: Schemas, raw: str = "") -> ToolCall:
    """The call in a JSON value. Raises ValueError if it is none."""
    if not isinstance(value, dict):
        raise ValueError(f'it must be a JSON object with "name" and "arguments", not {_kind(value)}')
    if isinstance(value.get("function"), dict):
        value = value["function"]
    name = value.get("name", value.get("function"))
    if not isinstance(name, str) or not name.strip():
        raise ValueError('the object has no "name" that says which tool to call')
    name = name.strip()
    return ToolCall(name=name, arguments=_arguments(value, schemas.get(name, {})), raw=raw)


def _arguments(value: Mapping[str, Any], schema: Mapping[str, Any]) -> dict[str, Any]:
    for key in ("arguments", "parameters"):
        if key in value:
            return _argument_object(value[key], schema)
    return {k: v for k, v in value.items() if k not in ("name", "function", "id", "type")}


def _argument_object(value: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(value, str):
        value = _decoded(value, schema)
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise ValueError(f'"arguments" must be a JSON object, not {_kind(value)}')
    return value


def _decoded(text: str, schema: Mapping[str, Any]) -> Any:
    """Decode arguments that were encoded twice, or assign bare text to the tool's only parameter."""
    if not text.strip():
        return {}
    try:
        value = read_whole(text)
    except ValueError as error:
        if text.lstrip().startswith(("{", "[")):
            raise ValueError(f'"arguments" is a string that is no JSON object: {error}') from None
        value = text
    name = only_parameter(schema)
    if name is None or isinstance(value, dict):
        return value
    return {name: convert(text, (schema.get("properties") or {}).get(name, {}))}


def only_parameter(schema: Mapping[str, Any]) -> str | None:
    """The parameter for an unnamed argument: the only one, or the first required one."""
    properties = list(schema.get("properties") or {})
    required = list(schema.get("required") or [])
    if len(properties) == 1:
        return str(properties[0])
    return str(required[0]) if required else None


def convert(text: str, schema: Mapping[str, Any]) -> Any:
    """The text converted to the type of its schema. Text that does not fit is returned as is; the tool rejects it."""
    types = _types(schema)
    if not types or ("string" in types and not ("null" in types and text.strip() in ("null", "None"))):
        return text
    try:
        return read_whole(text)
    except ValueError:
        return text


def _types(schema: Mapping[str, Any]) -> set[str]:
    declared = schema.get("type")
    types = {declared} if isinstance(declared, str) else set(declared or ())
    for option in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        types |= _types(option)
    return types


def _kind(value: Any) -> str:
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "nothing" if value is None else kinds.get(type(value), "an object")
