"""Makes any class a tool, without a base class: `__init__(**create_kwargs)` and `execute(**arguments)` are enough.

One object of the class is made per episode. Its `execute` may be plain or async; `calc_reward()` and `release()` are
called if the class defines them. The schema comes from the YAML or from the type hints of `execute`. The name comes
from the schema, the class attribute `name`, or the class name (MyCalculatorTool becomes my_calculator).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from typing import Any

from rally.tools.base import BaseTool
from rally.tools.function_tool import Signature
from rally.tools.invoke import Keywords, call
from rally.tools.schema import ToolConfigError
from rally.types import ToolResponse


class PlainTool(BaseTool[Any]):
    """Adapts a class without a base class to `BaseTool`."""

    def __init__(
        self, plain: type, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | None = None
    ) -> None:
        self._label = f"tool class {plain.__name__}"
        if not callable(getattr(plain, "execute", None)):
            raise ToolConfigError(f"{self._label} has no method execute; define one")
        self._plain = plain
        self._init = Keywords.of(plain)
        self._options = {key: value for key, value in (config or {}).items() if key != "type"}
        self._init.check(self._options, self._label)
        self._signature = Signature.of(_unbound(plain), hints_required=tool_schema is None)
        self._objects: dict[str, Any] = {}
        self.process = bool(getattr(plain, "process", True))
        super().__init__(config, tool_schema)

    def get_openai_tool_schema(self) -> Mapping[str, Any]:
        return {
            "name": getattr(self._plain, "name", None) or snake_case(self._plain.__name__),
            "description": getattr(self._plain, "description", None) or self._signature.description,
            "parameters": self._signature.parameters,
        }

    async def create(
        self, instance_id: str | None = None, create_kwargs: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> tuple[str, ToolResponse]:
        """Make the episode's object from the YAML's config, overridden by the row's create_kwargs."""
        assert instance_id is not None, "the session names every instance"
        keywords = self._init.check({**self._options, **(create_kwargs or {})}, self._label)
        self._objects[instance_id] = await call(self._plain, **keywords)
        return instance_id, ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        arguments = self._signature.check({**parameters, **kwargs})
        return await call(self._objects[instance_id].execute, **arguments)

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        method = getattr(self._objects[instance_id], "calc_reward", None)
        reward: float | None = await call(method, **kwargs) if method else None
        return reward

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        method = getattr(self._objects.pop(instance_id), "release", None)
        if method:
            await call(method, **kwargs)


def _unbound(plain: type) -> Any:
    """`execute` bound to a placeholder, so that its signature has no `self`."""
    return inspect.getattr_static(plain, "execute").__get__(object(), plain)


def snake_case(class_name: str) -> str:
    """MyCalculatorTool becomes my_calculator, KBLookup becomes kb_lookup."""
    stem = class_name.removesuffix("Tool") or class_name
    return re.sub(r"(?<=[a-z0-9])(?=[A-Z])|(?<=[A-Z])(?=[A-Z][a-z])", "_", stem).lower()
