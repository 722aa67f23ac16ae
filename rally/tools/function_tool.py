"""Makes a typed function a tool with `@function_tool`. The function stays callable as before.

@function_tool
def area(width: float, height: float) -> str:
    '''Computes the area of a rectangle.

    Args:
        width: in metres
        height: in metres
    '''
    return str(width * height)
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, get_type_hints, overload

from pydantic import TypeAdapter, ValidationError
from pydantic.errors import PydanticUserError
from pydantic_core import to_jsonable_python

from rally.tools.base import BaseTool
from rally.tools.invoke import Keywords, call
from rally.tools.schema import BadArguments, Schema, ToolConfigError, fit, from_pydantic, without_titles

_SECTION = re.compile(r"^(Args|Arguments|Parameters|Returns?|Yields?|Raises|Examples?|Notes?):\s*$", re.MULTILINE)
_ENTRY = re.compile(r"^\s*\*{0,2}(\w+)\s*(?:\([^)]*\))?\s*:\s*(.*)$")


@dataclass(frozen=True)
class ParsedDocstring:
    """The summary of a docstring, and its description of each argument."""

    summary: str
    arguments: Mapping[str, str]


@dataclass(frozen=True)
class Signature:
    """The arguments of a function: their JSON schema for the model, and their validation."""

    function: str
    parameters: Schema
    description: str
    _adapters: Mapping[str, TypeAdapter[Any]]
    _required: frozenset[str]
    _takes_any: bool

    @classmethod
    def of(cls, function: Callable[..., Any], *, hints_required: bool = True) -> Signature:
        """Read the signature. `hints_required=False` is for functions whose schema is given elsewhere."""
        where = f"function {getattr(function, '__qualname__', function)!s}"
        parameters = _parameters(function, where)
        named = [p for p in parameters if p.kind is not inspect.Parameter.VAR_KEYWORD]
        adapters = _adapters(function, named, where, hints_required)
        described = read_docstring(inspect.getdoc(function) or "")
        required = [p.name for p in named if p.default is inspect.Parameter.empty]
        return cls(
            function=where,
            parameters=_schema(named, adapters, described, required),
            description=described.summary,
            _adapters=adapters,
            _required=frozenset(required),
            _takes_any=len(named) < len(parameters),
        )

    def check(self, arguments: Mapping[str, Any]) -> dict[str, Any]:
        """`arguments` converted to the function's types. Raises BadArguments."""
        unknown = [name for name in arguments if name not in self._adapters]
        if unknown and not self._takes_any:
            raise BadArguments(f"{unknown[0]!r} is not an argument of this tool")
        missing = sorted(self._required - set(arguments))
        if missing:
            raise BadArguments(f"{missing[0]!r} is required but missing")
        return {name: self._checked(name, value) for name, value in arguments.items()}

    def _checked(self, name: str, value: Any) -> Any:
        adapter = self._adapters.get(name)
        try:
            return adapter.validate_python(value) if adapter else value
        except ValidationError as error:
            raise from_pydantic(error, name) from None


def _parameters(function: Callable[..., Any], where: str) -> list[inspect.Parameter]:
    parameters = list(inspect.signature(function).parameters.values())
    for parameter in parameters:
        if parameter.kind in (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.VAR_POSITIONAL):
            raise ToolConfigError(f"{where}: parameter {parameter.name!r} must be a keyword parameter")
    return parameters


def _adapters(
    function: Callable[..., Any], named: list[inspect.Parameter], where: str, hints_required: bool
) -> dict[str, TypeAdapter[Any]]:
    try:
        hints = get_type_hints(function, include_extras=True)
    except (NameError, TypeError) as error:
        raise ToolConfigError(f"{where}: its type hints cannot be read ({error})") from None
    unhinted = [p.name for p in named if p.name not in hints]
    if unhinted and hints_required:
        raise ToolConfigError(
            f"{where}: parameter {unhinted[0]!r} has no type hint; add one, or give the tool a schema"
        )
    try:
        return {p.name: TypeAdapter(hints.get(p.name, Any)) for p in named}
    except PydanticUserError as error:
        raise ToolConfigError(f"{where}: a type hint has no JSON schema ({error.message.splitlines()[0]})") from None


def _schema(
    named: list[inspect.Parameter],
    adapters: Mapping[str, TypeAdapter[Any]],
    described: ParsedDocstring,
    required: list[str],
) -> Schema:
    inputs = [(p.name, "validation", adapters[p.name]) for p in named]
    by_key, shared = TypeAdapter.json_schemas(inputs)  # type: ignore[arg-type]
    properties = {p.name: dict(by_key[p.name, "validation"]) for p in named}
    for parameter in named:
        if text := described.arguments.get(parameter.name):
            properties[parameter.name]["description"] = text
        if parameter.default is not inspect.Parameter.empty and parameter.default is not None:
            properties[parameter.name]["default"] = to_jsonable_python(parameter.default, fallback=str)
    schema: Schema = {"type": "object", "properties": properties, "required": required}
    if "$defs" in shared:
        schema["$defs"] = shared["$defs"]
    cleaned: Schema = without_titles(schema)
    return cleaned


def read_docstring(text: str) -> ParsedDocstring:
    """Parse a Google-style docstring. Other styles are taken as a summary."""
    summary, *sections = _SECTION.split(text)
    arguments: dict[str, str] = {}
    for title, body in zip(sections[::2], sections[1::2], strict=True):
        if title in ("Args", "Arguments", "Parameters"):
            arguments = _entries(body)
    return ParsedDocstring(summary=" ".join(summary.split()), arguments=arguments)


def _entries(body: str) -> dict[str, str]:
    lines = [line for line in body.splitlines() if line.strip()]
    margin = min((len(line) - len(line.lstrip()) for line in lines), default=0)
    entries: dict[str, str] = {}
    name = ""
    for line in lines:
        starts = len(line) - len(line.lstrip()) == margin
        if starts and (match := _ENTRY.match(line)):
            name, entries[match[1]] = match[1], match[2].strip()
        elif name:
            entries[name] = f"{entries[name]} {line.strip()}".strip()
    return entries


class FunctionTool(BaseTool[Any]):
    """A tool made from one function. It has no state per episode."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        schema: Mapping[str, Any] | None = None,
        process: bool = True,
        example: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise ToolConfigError(f"function_tool needs a function, not {type(function).__name__}")
        self.function = function
        self.process = process
        self.example = example  # type: ignore[misc]
        self._signature = Signature.of(function, hints_required=schema is None)
        self._keywords = Keywords.of(function)
        inferred = {
            "name": name or getattr(function, "__name__", type(function).__name__),
            "description": self._signature.description if description is None else description,
            "parameters": self._signature.parameters,
        }
        super().__init__(tool_schema=inferred if schema is None else schema)
        if example is not None:
            self._check_example(example)

    def with_schema(self, schema: Mapping[str, Any]) -> FunctionTool:
        """This tool with another schema."""
        return FunctionTool(self.function, schema=schema, process=self.process, example=self.example)

    def _check_example(self, example: Mapping[str, Any]) -> None:
        """ToolConfigError unless the function takes the example, which would otherwise not be used without a word."""
        try:
            fit(self.parameters, example)
        except BadArguments as error:
            raise ToolConfigError(
                f"function_tool {self.name!r}: its own example does not fit its parameters ({error}); correct it"
            ) from None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """The row's execute_kwargs are added to the arguments and override those of the model."""
        keywords = self._keywords.check(kwargs, f"function tool {self.name!r}")
        return await call(self.function, **self._signature.check({**parameters, **keywords}))


@overload
def function_tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def function_tool(
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | None = None,
    process: bool = True,
    example: Mapping[str, Any] | None = None,
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def function_tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | None = None,
    process: bool = True,
    example: Mapping[str, Any] | None = None,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a function a tool. Its schema is `schema`, or comes from its type hints and docstring. With `process` False
    it runs in the process of the run. `example` are arguments of a call that must succeed, for `rally doctor`."""

    def decorate(decorated: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(
            decorated, name=name, description=description, schema=schema, process=process, example=example
        )

    return decorate if function is None else decorate(function)
