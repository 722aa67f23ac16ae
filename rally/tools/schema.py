"""Normalizes the OpenAI schemas of tools and validates arguments against them.

`fit` checks required, type, enum, const, items, properties, additionalProperties, anyOf, oneOf, allOf and $ref. Models
confuse numbers and strings, so unambiguous values are converted: "3" to 3, 3 to "3", 3.0 to 3, "true" to true, and JSON
text to an array or object. Ranges, lengths and patterns are left to the tool. The error is one sentence that the model
can act on.
"""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from pydantic import BaseModel, ValidationError

from rally.types import RallyError

Schema = dict[str, Any]


class ToolConfigError(RallyError):
    """The YAML, class or function of a tool has a mistake."""


def openai_schema(schema: Any, where: str) -> Schema:
    """`{type: function, function: {name, ...}}`, made from that form, from the bare `{name, description, parameters}`,
    or from a Pydantic model of either."""
    if isinstance(schema, BaseModel):
        schema = schema.model_dump(exclude_none=True)
    if not isinstance(schema, Mapping):
        raise ToolConfigError(f"{where}: tool_schema must be a mapping, not {type(schema).__name__}")
    copied = copy.deepcopy(dict(schema))
    outer = copied if "function" in copied else {"type": "function", "function": copied}
    function = outer["function"]
    if not isinstance(function, Mapping):
        raise ToolConfigError(f"{where}: tool_schema.function must be a mapping, not {type(function).__name__}")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        raise ToolConfigError(f"{where}: the tool_schema has no name; add `name: <the name the model calls>`")
    parameters = function.get("parameters") or {"type": "object", "properties": {}}
    if not isinstance(parameters, Mapping) or not isinstance(parameters.get("properties", {}), Mapping):
        raise ToolConfigError(f"{where}: parameters of tool {name!r} must be a JSON schema of type object")
    if not isinstance(function.get("description") or "", str):
        raise ToolConfigError(f"{where}: the description of tool {name!r} must be a text")
    for parameter, schema in (parameters.get("properties") or {}).items():
        if not isinstance(schema, (Mapping, bool)):
            raise ToolConfigError(f"{where}: the parameter {parameter} of tool {name!r} must be a JSON schema")
    required = parameters.get("required") or []
    if not isinstance(required, (list, tuple)) or not all(isinstance(one, str) for one in required):
        raise ToolConfigError(f"{where}: required of tool {name!r} must be a list of names of parameters")
    described = {**function, "description": function.get("description") or "", "parameters": dict(parameters)}
    return {"type": "function", **outer, "function": described}


def without_titles(schema: Any) -> Any:
    """The JSON schema without `title` keys: Pydantic's titles repeat the names and cost prompt tokens."""
    if isinstance(schema, list):
        return [without_titles(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {key: _part(key, value) for key, value in schema.items() if key != "title"}


def _part(key: str, value: Any) -> Any:
    if key in ("default", "enum", "const", "examples"):  # values may have a key `title`
        return value
    if key in ("properties", "$defs"):  # a property may be named `title`
        return {name: without_titles(part) for name, part in value.items()}
    return without_titles(value)


MAX_DEPTH = 32


class BadArguments(RallyError):
    """The arguments of a call do not fit the schema. A tool may raise it too. The text goes to the model."""


def fit(parameters: Mapping[str, Any], arguments: Mapping[str, Any]) -> dict[str, Any]:
    """`arguments`, converted where that is unambiguous. Raises BadArguments."""
    required = _required(parameters)
    # Models write null for an optional argument that they leave out.
    present = {name: value for name, value in arguments.items() if value is not None or name in required}
    fitted: dict[str, Any] = _Fitter(parameters).fit({**parameters, "type": "object"}, present, "")
    return fitted


def from_pydantic(error: ValidationError, path: str = "") -> BadArguments:
    """The first Pydantic error, as a sentence for the model."""
    first = error.errors(include_url=False, include_context=False)[0]
    for part in first["loc"]:
        path = f"{path}[{part}]" if isinstance(part, int) else _join(path, part)
    return BadArguments(f"{_called(path)}: {first['msg']}")


def usage(parameters: Mapping[str, Any]) -> str:
    """The arguments of the tool, in one sentence."""
    required = _required(parameters)
    parts = [
        f"{name} ({_type_name(schema)}{'' if name in required else ', optional'})"
        for name, schema in (parameters.get("properties") or {}).items()
    ]
    return f"The arguments are: {several(parts)}." if parts else "It takes no arguments."


MOST_LISTED = 12


def several(names: Sequence[str]) -> str:
    """The names as a list, of which a long one is cut with the number of the others."""
    shown = ", ".join(brief(name, 60) for name in names[:MOST_LISTED])
    return shown if len(names) <= MOST_LISTED else f"{shown} and {len(names) - MOST_LISTED} more"


def brief(text: str, limit: int) -> str:
    return text if len(text) <= limit else f"{text[: limit - 3]}..."


def _required(schema: Mapping[str, Any]) -> list[str]:
    """The required names. Hand-written schemas may have `required: true` on a property, which is ignored."""
    names = schema.get("required")
    return names if isinstance(names, list) else []


def _type_name(schema: Any) -> str:
    kind = schema.get("type") if isinstance(schema, Mapping) else None
    return " or ".join(map(str, kind)) if isinstance(kind, list) else str(kind or "any")


class _Converted(NamedTuple):
    fits: bool
    value: Any = None


class _Fitter:
    """Validates and converts values against the parts of one schema."""

    def __init__(self, root: Mapping[str, Any]) -> None:
        self.definitions: Mapping[str, Any] = root.get("$defs") or root.get("definitions") or {}

    def fit(self, schema: Any, value: Any, path: str, depth: int = 0) -> Any:
        if depth > MAX_DEPTH:
            raise BadArguments(f"{_called(path)} is nested too deeply")
        schema = self.resolve(schema)
        for part in schema.get("allOf") or ():
            value = self.fit(part, value, path, depth + 1)
        if alternatives := schema.get("anyOf") or schema.get("oneOf"):
            value = self.fit_any(alternatives, value, path, depth)
        value = self.fit_type(schema, value, path)
        allowed = [schema["const"]] if "const" in schema else schema.get("enum")
        if allowed is not None and value not in allowed:
            raise BadArguments(f"{_called(path)} must be one of {_shown(allowed)}, not {_shown(value)}")
        if isinstance(value, dict):
            return self.fit_object(schema, value, path, depth)
        if isinstance(value, list) and "items" in schema:
            return [self.fit(schema["items"], v, f"{path}[{i}]", depth + 1) for i, v in enumerate(value)]
        return value

    def resolve(self, schema: Any) -> Mapping[str, Any]:
        for _ in range(MAX_DEPTH):
            reference = schema.get("$ref") if isinstance(schema, Mapping) else None
            if not isinstance(reference, str):
                break
            schema = self.definitions.get(reference.rpartition("/")[2])
        return schema if isinstance(schema, Mapping) else {}

    def fit_any(self, alternatives: list[Any], value: Any, path: str, depth: int) -> Any:
        """The value by the first alternative that accepts it unchanged, or by the first that can convert it."""
        fitted, problem = [], BadArguments(f"{_called(path)} fits none of its alternatives")
        for alternative in alternatives:
            try:
                fitted.append(self.fit(alternative, value, path, depth + 1))
            except BadArguments as error:
                problem = error
        if not fitted:
            raise problem
        return next((f for f in fitted if type(f) is type(value) and f == value), fitted[0])

    def fit_type(self, schema: Mapping[str, Any], value: Any, path: str) -> Any:
        wanted = schema.get("type")
        types = wanted if isinstance(wanted, list) else [wanted]
        if any(_is(kind, value) for kind in types):
            return value
        for kind in types:
            converted = _convert(kind, value)
            if converted.fits:
                return converted.value
        raise BadArguments(f"{_called(path)} must be {' or '.join(map(str, types))}, not {_shown(value)}")

    def fit_object(self, schema: Mapping[str, Any], value: dict[str, Any], path: str, depth: int) -> dict[str, Any]:
        properties = schema.get("properties") or {}
        missing = [name for name in _required(schema) if name not in value]
        if missing:
            raise BadArguments(f"{_called(_join(path, missing[0]))} is required but missing")
        others = schema.get("additionalProperties", True)
        fitted = {}
        for name, part in value.items():
            if name not in properties and others is False:
                raise BadArguments(f"{_called(_join(path, name))} is not an argument of this tool")
            fitted[name] = self.fit(properties.get(name, others), part, _join(path, name), depth + 1)
        return fitted


_PYTHON_TYPES: dict[Any, tuple[type, ...]] = {
    "string": (str,),
    "integer": (int,),
    "number": (int, float),
    "boolean": (bool,),
    "array": (list,),
    "object": (dict,),
    "null": (type(None),),
}


def _is(kind: Any, value: Any) -> bool:
    """Whether `value` has the JSON type `kind`. Unknown types accept everything; a boolean is not a number."""
    if isinstance(value, bool) and kind in ("integer", "number"):
        return False
    return isinstance(value, _PYTHON_TYPES.get(kind, (object,)))


def _convert(kind: Any, value: Any) -> _Converted:
    if kind == "string" and isinstance(value, (int, float)):
        return _Converted(True, json.dumps(value))
    if kind == "integer" and isinstance(value, float) and value.is_integer():
        return _Converted(True, int(value))
    if isinstance(value, str) and kind in ("integer", "number", "boolean", "array", "object"):
        return _from_text(kind, value)
    return _Converted(False)


def _from_text(kind: str, text: str) -> _Converted:
    try:
        value = json.loads(text.strip().lower() if kind == "boolean" else text)
    except (ValueError, RecursionError):
        return _Converted(False)
    if isinstance(value, float) and not math.isfinite(value):
        return _Converted(False)
    if _is(kind, value):
        return _Converted(True, value)
    return _Converted(False) if isinstance(value, str) else _convert(kind, value)


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _called(path: str) -> str:
    return f"{path!r}" if path else "the arguments"


def _shown(value: Any) -> str:
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= 80 else f"{text[:77]}..."
