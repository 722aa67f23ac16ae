"""Guarantees: a class derived from BaseTool is a tool: it has a name, a whole OpenAI schema and four methods.

One BaseTool object serves every episode. An episode's own state belongs to the instance that `create` opens: once, at
the first call of the episode; `release` ends it when the episode does. Methods may be plain or `async`.

    class Lookup(BaseTool):                                  class Lookup(BaseTool[LookupArgs]):
        async def execute(self, instance_id,                     name = "lookup"
                          parameters, **kwargs):                 description = "Looks a word up."
            return find(parameters["word"])                      args_schema = LookupArgs   # a Pydantic model
                                                                 async def execute(self, args, **kwargs):
    (its schema stands in the tool YAML)                             return find(args.word)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from rally.tools.limits import CallLimits
from rally.tools.rate_limit import RateLimiter
from rally.tools.schema import Schema, ToolConfigError, openai_schema, without_titles
from rally.types import ToolResponse

ArgsT = TypeVar("ArgsT")
Execute = TypeVar("Execute", bound=Callable[..., Any])


def at_once(execute: Execute) -> Execute:
    """Marks an `async execute` that computes for microseconds and never waits: no deadline could interrupt it, so it is
    spared the task that keeps one. The mark is the function's: a subclass that writes its own execute has none."""
    execute.at_once = True  # type: ignore[attr-defined]
    return execute


class BaseTool(Generic[ArgsT]):
    name: str = ""
    description: str = ""
    args_schema: ClassVar[type[BaseModel] | None] = None
    limits: CallLimits = CallLimits()
    """What the tool bears; the YAML's `limits` has the last word."""
    own_timeout: float | None = None
    """Seconds that the tool's own config gives a call; its deadline is never sooner, unless `limits` say so."""
    shared_gate: RateLimiter | None = None
    """What the calls of several tools pass together, before the deadline of each begins."""
    example: ClassVar[Mapping[str, Any] | None] = None
    """Arguments of a call that must go well, which `rally doctor` makes; None: it makes some up from the schema."""
    sees_images: bool = False
    """Whether `create` is given the images of the row's prompt, as the keyword `images`."""
    destructive: bool = False
    """Whether a call may destroy something, so that none is made only to see whether the tool works."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | BaseModel | None = None
    ) -> None:
        self.config = dict(config or {})
        given = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        self.tool_schema: Schema = openai_schema(given, f"tool class {type(self).__name__}")
        self.name = self.tool_schema["function"]["name"]

    def get_openai_tool_schema(self) -> Mapping[str, Any] | BaseModel:
        """The schema used when none is given: from `name`, `description` and `args_schema`."""
        if not self.name or self.args_schema is None:
            raise ToolConfigError(
                f"tool class {type(self).__name__} has no schema: write tool_schema in the tool YAML, or give the "
                "class the attributes name, description and args_schema (a Pydantic model)"
            )
        parameters = without_titles(self.args_schema.model_json_schema())
        parameters.pop("description", None)  # the model class's docstring, which describes no argument
        return {"name": self.name, "description": self.description, "parameters": parameters}

    @property
    def parameters(self) -> Schema:
        """The JSON schema of the arguments."""
        parameters: Schema = self.tool_schema["function"]["parameters"]
        return parameters

    def prepare(self) -> None:
        """Called once before a run, outside of any event loop: start what all episodes share, or raise a RallyError."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Open an episode's instance. The row's create_kwargs arrive one by one, and whole as `create_kwargs`."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Do the work: a ToolResponse, text or dict, alone or as (response, reward, metrics)."""
        raise NotImplementedError(f"tool class {type(self).__name__} must define execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """What the instance earned over the episode; None when the tool does not score."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Let go of what `create` opened."""

    def close(self) -> None:
        """Called once after a run, outside of any event loop: end what all episodes shared."""
