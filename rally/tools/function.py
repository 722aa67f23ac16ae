"""Guarantees: a typed function under `@function_tool` is a tool, and stays callable as the function it was.

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

from collections.abc import Callable, Mapping
from typing import Any, overload

from rally.tools.base import BaseTool
from rally.tools.calling import Keywords, call
from rally.tools.schema import ToolConfigError
from rally.tools.signature import Signature


class FunctionTool(BaseTool[Any]):
    """A tool made of one function. It has no state: create and release do nothing."""

    def __init__(
        self,
        function: Callable[..., Any],
        *,
        name: str | None = None,
        description: str | None = None,
        schema: Mapping[str, Any] | None = None,
    ) -> None:
        if not callable(function):
            raise ToolConfigError(f"function_tool needs a function, not {type(function).__name__}")
        self.function = function
        self._signature = Signature.of(function, hints_required=schema is None)
        self._keywords = Keywords.of(function)
        inferred = {
            "name": name or getattr(function, "__name__", type(function).__name__),
            "description": self._signature.description if description is None else description,
            "parameters": self._signature.parameters,
        }
        super().__init__(tool_schema=inferred if schema is None else schema)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """The row's execute_kwargs are arguments too, and win over what the model wrote."""
        given = self._keywords.deliver(kwargs, f"function tool {self.name!r}")
        return await call(self.function, **self._signature.check({**parameters, **given}))


@overload
def function_tool(function: Callable[..., Any], /) -> FunctionTool: ...
@overload
def function_tool(
    *, name: str | None = None, description: str | None = None, schema: Mapping[str, Any] | None = None
) -> Callable[[Callable[..., Any]], FunctionTool]: ...
def function_tool(
    function: Callable[..., Any] | None = None,
    /,
    *,
    name: str | None = None,
    description: str | None = None,
    schema: Mapping[str, Any] | None = None,
) -> FunctionTool | Callable[[Callable[..., Any]], FunctionTool]:
    """Make a function a tool; its schema comes from its type hints and docstring unless `schema` gives it."""

    def decorate(decorated: Callable[..., Any]) -> FunctionTool:
        return FunctionTool(decorated, name=name, description=description, schema=schema)

    return decorate if function is None else decorate(function)
