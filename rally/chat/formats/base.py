"""Every tool call in a text is found where it stands, and one that cannot be understood is kept with a reason.

A format is one function that finds calls; everything the formats share (what a JSON object means as a call, what a
bare text means for a tool's only parameter, how text becomes a typed value) is here.
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
    """A call and the part of the text, text[start:end], that wrote it."""

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
        """What the text says; calls are looked for from `start` on (after the thinking, where a call is a thought)."""
        found = self.find(text[start:], schemas_of(tools))
        if start:
            found = [FoundCall(f.start + start, f.end + start, f.call) for f in found]
        calls = tuple(_numbered(f.call, i, f.call.raw or text[f.start : f.end]) for i, f in enumerate(found))
        return FormatResult(outside(text, found), calls)


def _numbered(call: ToolCall, number: int, raw: str) -> ToolCall:
    return ToolCall(name=call.name, arguments=call.arguments, id=f"call_{number}", raw=raw, error=call.error)


def schemas_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """Name to parameter schema, from tools in the OpenAI shape with or without its {"type": "function"} wrapper."""
    functions = [tool.get("function") or tool for tool in tools]
    return {str(f["name"]): f.get("parameters") or {} for f in functions}


def outside(text: str, found: Sequence[FoundCall]) -> str:
    """What is left of the text without its calls; untouched when there are none."""
    if not found:
        return text
    starts = [f.start for f in found] + [len(text)]
    ends = [0] + [f.end for f in found]
    pieces = [text[end:start].strip() for end, start in zip(ends, starts, strict=True)]
    return "\n".join(piece for piece in pieces if piece)


def malformed(reason: str, raw: str, shape: str) -> ToolCall:
    """A call that could not be understood: the reason and the right shape, in words a model can act on."""
    name = re.search(r"""["'](?:name|function)["']\s*:\s*["']([^"'\n]+)["']|<function=([^>\n]+)>""", raw)
    guess = (name.group(1) or name.group(2)).strip() if name else ""
    return ToolCall(name=guess, raw=raw, error=f"Failed to decode tool call: {reason}. Write it as {shape}")


def call_of(value: Any, schemas: Schemas, raw: str = "") -> ToolCall:
    """The call a JSON value means; ValueError says why it means none."""
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


def _argument_object(given: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    if isinstance(given, str):
        given = _decoded(given, schema)
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise ValueError(f'"arguments" must be a JSON object, not {_kind(given)}')
    return given


def _decoded(text: str, schema: Mapping[str, Any]) -> Any:
    """Arguments that were encoded twice, or the bare text of a tool's only parameter."""
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
    """The parameter that an unnamed argument means: the only one, or the only or first required one."""
    properties = list(schema.get("properties") or {})
    required = list(schema.get("required") or [])
    if len(properties) == 1:
        return str(properties[0])
    return str(required[0]) if required else None


def convert(text: str, schema: Mapping[str, Any]) -> Any:
    """Text as the value its schema asks for; text that does not fit stays text, for the tool's own check to refuse."""
    types = _types(schema)
    if not types or ("string" in types and not ("null" in types and text.strip() in ("null", "None"))):
        return text
    try:
        return read_whole(text)
    except ValueError:
        return text


def _types(schema: Mapping[str, Any]) -> set[str]:
    given = schema.get("type")
    types = {given} if isinstance(given, str) else set(given or ())
    for option in [*(schema.get("anyOf") or ()), *(schema.get("oneOf") or ())]:
        types |= _types(option)
    return types


def _kind(value: Any) -> str:
    kinds = {bool: "a truth value", int: "a number", float: "a number", str: "a string", list: "a list"}
    return "nothing" if value is None else kinds.get(type(value), "an object")
