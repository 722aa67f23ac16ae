"""Defines `ToolFormat` and what the tool-call formats share.

A format finds the calls in a text and writes calls as text. Shared are: reading a JSON object as a call, assigning bare
text to a tool's only parameter, and converting text to a typed value. A malformed call is kept, with a reason.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
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


class ToolFormat:
    """How one family of models writes tool calls. A user's format is a subclass with `find` and `render`.

    `find` returns every call that a text contains, in order; one that cannot be read is a ToolCall with an error. It
    may raise nothing. `render` is the inverse: `find(render(calls))` gives the calls again.
    """

    name: str = ""
    marks: Sequence[str] = ()
    """Texts that only this format writes. They decide between formats that read the same call."""
    begins: Sequence[str] = ()
    """The first words of everything that `find` takes for a call. A streamed turn is sent up to the first of them.
    Empty if calls may begin otherwise: then a turn is sent when it is complete."""

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        raise NotImplementedError(f"{type(self).__name__} must define find(text, schemas)")

    def render(self, calls: Sequence[ToolCall]) -> str:
        raise NotImplementedError(f"{type(self).__name__} must define render(calls)")

    def call_id(self, name: str, number: int) -> str:
        """The id of the call `number` of a conversation, counted from 0, if the model wrote none."""
        return f"call_{number}"

    def accepts_id(self, call_id: str) -> bool:
        """Whether chat templates of this family accept the id. Other ids are replaced before rendering."""
        return True

    def parse(self, text: str, tools: Sequence[Mapping[str, Any]] = (), start: int = 0) -> FormatResult:
        """Parse the text. Calls are searched from `start` on, which skips a thinking block."""
        found = self.find(text[start:], schemas_of(tools))
        if start:
            found = [FoundCall(f.start + start, f.end + start, f.call) for f in found]
        calls: list[ToolCall] = []
        for number, one in enumerate(found):
            written = one.call.id
            own = bool(written) and self.accepts_id(written) and all(call.id != written for call in calls)
            call_id = written if own else self.call_id(one.call.name, number)
            raw = one.call.raw or text[one.start : one.end]
            calls.append(
                ToolCall(name=one.call.name, arguments=one.call.arguments, id=call_id, raw=raw, error=one.call.error)
            )
        return FormatResult(outside(text, found), tuple(calls))


def first_words(*texts: str) -> tuple[str, ...]:
    """The beginnings of texts in which white space may differ; nothing if one of them begins with a variable."""
    words = [re.split(r"\s+|(?<=>)(?=<)", text.strip())[0].split("{")[0] for text in texts if text.strip()]
    return tuple(dict.fromkeys(words)) if all(words) else ()


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


def malformed(reason: str, raw: str, shape: str, name: str = "") -> ToolCall:
    """A malformed call. Its error tells the model the reason and the correct form. `name` is the tool, if it is known;
    otherwise it is guessed."""
    written = re.search(r"""["'](?:name|function|tool_name)["']\s*:\s*["']([^"'\n]+)["']|<function=([^>\n]+)>""", raw)
    guess = (written.group(1) or written.group(2)).strip() if written else ""
    return ToolCall(name=name or guess, raw=raw, error=f"Failed to decode tool call: {reason}. Write it as {shape}")


class CallKeys(NamedTuple):
    """The keys of a call in JSON, as written. Others are accepted too."""

    name: str = "name"
    arguments: str = "arguments"
    id: str = ""


def call_of(value: Any, schemas: Schemas, raw: str = "", keys: CallKeys = CallKeys()) -> ToolCall:  # noqa: B008
    """The call in a JSON value. Raises ValueError if it is none."""
    if not isinstance(value, dict):
        raise ValueError(f'it must be a JSON object with "{keys.name}" and "{keys.arguments}", not {_kind(value)}')
    if isinstance(value.get("function"), dict):
        value = {**value["function"], **({keys.id: value[keys.id]} if keys.id in value else {})}
    name = value.get(keys.name, value.get("name", value.get("function")))
    if not isinstance(name, str) or not name.strip():
        raise ValueError(f'the object has no "{keys.name}" that says which tool to call')
    name, call_id = name.strip(), value.get(keys.id) if keys.id else None
    arguments = _arguments(value, schemas.get(name, {}), keys)
    return ToolCall(name=name, arguments=arguments, raw=raw, id=str(call_id) if isinstance(call_id, str | int) else "")


def _arguments(value: Mapping[str, Any], schema: Mapping[str, Any], keys: CallKeys) -> dict[str, Any]:
    for key in (keys.arguments, "arguments", "parameters"):
        if key in value:
            return argument_object(value[key], schema)
    return {k: v for k, v in value.items() if k not in (keys.name, keys.id, "name", "function", "id", "type")}


def argument_object(value: Any, schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments in a JSON value, which may be encoded twice. Raises ValueError."""
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
