"""Generates sample arguments for a tool from its JSON schema, so that `rally doctor` can try every tool once."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from typing import Any, NamedTuple

from rally.tools.base import BaseTool
from rally.tools.schema import BadArguments, fit

MAX_DEPTH = 8
_BY_FORMAT = {
    "date": "2026-01-31",
    "date-time": "2026-01-31T12:00:00Z",
    "time": "12:00:00Z",
    "email": "someone@example.org",
    "uri": "https://example.org",
    "uuid": "00000000-0000-4000-8000-000000000000",
}


class Example(NamedTuple):
    """Sample arguments for a tool. `known`: they are the tool's own example, so the call must succeed."""

    arguments: dict[str, Any]
    known: bool


def example_of(tool: BaseTool[Any]) -> Example:
    """The tool's own example if it fits the schema, otherwise generated arguments."""
    if tool.example is not None:
        with suppress(BadArguments):
            return Example(fit(tool.parameters, tool.example), True)
    return Example(example_arguments(tool.parameters), False)


def example_arguments(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """A value for every required argument, or for the first argument if none is required."""
    definitions = parameters.get("$defs") or parameters.get("definitions") or {}
    arguments: dict[str, Any] = _object(parameters, definitions, 0)
    return arguments


def _object(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> dict[str, Any]:
    properties = schema.get("properties") or {}
    required = schema.get("required")
    names = required if isinstance(required, list) else list(properties)[:1]
    return {name: _value(properties.get(name, {}), definitions, depth + 1) for name in names or list(properties)[:1]}


def _value(schema: Any, definitions: Mapping[str, Any], depth: int) -> Any:
    if not isinstance(schema, Mapping) or depth > MAX_DEPTH:
        return "test"
    if isinstance(reference := schema.get("$ref"), str):
        return _value(definitions.get(reference.rpartition("/")[2]), definitions, depth + 1)
    for key in ("const", "default"):
        if schema.get(key) is not None:
            return schema[key]
    for key in ("examples", "enum"):
        if schema.get(key):
            return schema[key][0]
    for key in ("anyOf", "oneOf", "allOf"):
        if schema.get(key):
            return _value(schema[key][0], definitions, depth + 1)
    return _of_type(schema, definitions, depth)


def _of_type(schema: Mapping[str, Any], definitions: Mapping[str, Any], depth: int) -> Any:
    kind = schema.get("type")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind in ("integer", "number"):
        lowest = schema.get("minimum", schema.get("exclusiveMinimum", 0) + 1)
        return min(lowest, schema["maximum"]) if "maximum" in schema else lowest
    if kind == "array":
        return [_value(schema.get("items"), definitions, depth + 1)] * max(1, schema.get("minItems", 1))
    if kind == "object":
        return _object(schema, definitions, depth)
    if kind in ("boolean", "null"):
        return False if kind == "boolean" else None
    text = _BY_FORMAT.get(str(schema.get("format")), "test")
    return text.ljust(schema.get("minLength", 0), "t")[: schema.get("maxLength")]
