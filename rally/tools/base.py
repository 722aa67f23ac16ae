"""Defines `BaseTool`, the base class of tools: a name, a complete OpenAI schema and four methods.

One BaseTool object serves all episodes. State of an episode belongs to the instance that `create` makes at the first
call of the episode and `release` ends with the episode. Methods may be plain or `async`.

    class Lookup(BaseTool):                                  class Lookup(BaseTool[LookupArgs]):
        async def execute(self, instance_id,                     name = "lookup"
                          parameters, **kwargs):                 description = "Looks a word up."
            return find(parameters["word"])                      args_schema = LookupArgs   # a Pydantic model
                                                                 async def execute(self, args, **kwargs):
    (the schema is in the tool YAML)                                 return find(args.word)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Generic, TypeVar
from uuid import uuid4

from pydantic import BaseModel

from rally.tools.limits import CallLimits
from rally.tools.schema import Schema, ToolConfigError, openai_schema, without_titles
from rally.types import OnOutage, ToolResponse
from rally.util.rate_limit import RateLimiter

ArgsT = TypeVar("ArgsT")
Execute = TypeVar("Execute", bound=Callable[..., Any])


def instant(execute: Execute) -> Execute:
    """Mark an `async execute` that takes microseconds and never awaits. It runs without a task for its deadline, which
    could not interrupt it anyway. The mark belongs to the function: an overriding `execute` does not inherit it."""
    execute.instant = True  # type: ignore[attr-defined]
    return execute


class BaseTool(Generic[ArgsT]):
    """A tool. A subclass defines `execute` and, for state per episode, `create`, `calc_reward` and `release`."""

    name: str = ""
    description: str = ""
    args_schema: ClassVar[type[BaseModel] | None] = None
    limits: CallLimits = CallLimits()
    """The tool's default limits. `limits` in the tool YAML overrides them."""
    own_timeout: float | None = None
    """The timeout of a call in the tool's own config, in seconds. It extends the deadline unless `limits` sets one."""
    on_outage: OnOutage | None = None
    """What happens to an episode in which this tool was unavailable; None is the run's `multi_turn.on_tool_outage`."""
    timeout_counts: bool = False
    """Whether a call that misses its deadline is the policy's fault, because its arguments decide how long it takes."""
    shared_limiter: RateLimiter | None = None
    """A limiter shared with other tools. Waiting for it does not count towards the deadline."""
    example: ClassVar[Mapping[str, Any] | None] = None
    """Arguments of a call that must succeed, used by `rally doctor`. None: it derives arguments from the schema."""
    sees_images: bool = False
    """Whether `create` gets the images of the row's prompt, as the keyword `images`."""
    destructive: bool = False
    """Whether a call may destroy something. `rally doctor` does not try such a tool."""
    process: bool = True
    """Whether a run gives the tool a process of its own. False for a tool that cannot crash, hang or leak, or that
    shares objects with other code of the run."""

    def __init__(
        self, config: Mapping[str, Any] | None = None, tool_schema: Mapping[str, Any] | BaseModel | None = None
    ) -> None:
        self.config = dict(config or {})
        schema = tool_schema if tool_schema is not None else self.get_openai_tool_schema()
        self.tool_schema: Schema = openai_schema(schema, f"tool class {type(self).__name__}")
        self.name = self.tool_schema["function"]["name"]

    @classmethod
    def schema_argument(cls, schema: Mapping[str, Any] | None) -> Any:
        """The schema of the tool YAML, as `__init__` gets it."""
        return schema

    def get_openai_tool_schema(self) -> Mapping[str, Any] | BaseModel:
        """The schema used when none is given: from `name`, `description` and `args_schema`."""
        if not self.name or self.args_schema is None:
            raise ToolConfigError(
                f"tool class {type(self).__name__} has no schema: write tool_schema in the tool YAML, or define name, "
                "description and args_schema (a Pydantic model) in the class"
            )
        parameters = without_titles(self.args_schema.model_json_schema())
        parameters.pop("description", None)  # the docstring of the Pydantic class
        return {"name": self.name, "description": self.description, "parameters": parameters}

    @property
    def parameters(self) -> Schema:
        """The JSON schema of the arguments."""
        parameters: Schema = self.tool_schema["function"]["parameters"]
        return parameters

    def prepare(self) -> None:
        """Start what all episodes share. Called once before a run, outside any event loop. May raise a RallyError."""

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        """Create an episode's instance. The row's create_kwargs are passed one by one and as `create_kwargs`."""
        return instance_id or str(uuid4()), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Any:
        """Run one call. Returns a ToolResponse, text or dict, alone or as (response, reward, metrics)."""
        raise NotImplementedError(f"tool class {type(self).__name__} must define execute")

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float | None:
        """The reward of the instance at the end of the episode; None when the tool gives none."""
        return None

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        """Release what `create` made."""

    def close(self) -> None:
        """Close what all episodes shared. Called once after a run, outside any event loop."""
