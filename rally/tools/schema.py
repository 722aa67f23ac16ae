"""Guarantees: a tool schema, in either shape users write, becomes the OpenAI shape, kept whole, or one clear error."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from rally.types import RallyError

Schema = dict[str, Any]


class ToolConfigError(RallyError):
    """A tool is described wrongly: in its YAML, its class or its function."""


def openai_schema(given: Any, where: str) -> Schema:
    """`{type: function, function: {name, ...}}` from that shape, the bare `{name, description, parameters}`, or a
    Pydantic model of either."""
    if isinstance(given, BaseModel):
        given = given.model_dump(exclude_none=True)
    if not isinstance(given, Mapping):
        raise ToolConfigError(f"{where}: tool_schema must be a mapping, not {type(given).__name__}")
    whole = copy.deepcopy(dict(given))
    outer = whole if "function" in whole else {"type": "function", "function": whole}
    function = outer["function"]
    if not isinstance(function, Mapping):
        raise ToolConfigError(f"{where}: tool_schema.function must be a mapping, not {type(function).__name__}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ToolConfigError(f"{where}: the tool_schema has no name; add `name: <what the model calls it by>`")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties", {}), Mapping):
        raise ToolConfigError(f"{where}: parameters of tool {name!r} must be a JSON schema of type object")
    described = {**function, "description": function.get("description") or "", "parameters": dict(parameters)}
    return {"type": "function", **outer, "function": described}


def without_titles(schema: Any) -> Any:
    """The JSON schema less the `title` of every part: Pydantic's titles repeat the names and cost prompt tokens."""
    if isinstance(schema, list):
        return [without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _part(key, value) for key, value in schema.items() if key != "title"}


def _part(key: str, value: Any) -> Any:
    if key in ("default", "enum", "const", "examples"):  # these hold values, which may have titles of their own
        return value
    if key in ("properties", "$defs"):  # so may the names of properties
        return {name: without_titles(part) for name, part in value.items()}
    return without_titles(value)
