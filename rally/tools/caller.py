"""Guarantees: the four methods of a tool are called one way, whichever of the known signatures its author chose.

- `create`: the row's create_kwargs arrive whole as the keyword `create_kwargs` and one by one, as far as the signature
  takes them: `create(instance_id, **kwargs)` gets both, `create(instance_id, ground_truth)` the entry alone and
  `create(instance_id, create_kwargs)` the whole alone. An entry that arrives neither way is an error.
- `execute(instance_id, parameters, **kwargs)`, or with one positional parameter `execute(args, **kwargs)`, where args
  is an `args_schema` object (a dict when the class has none).
- execute_kwargs, calc_reward_kwargs and release_kwargs of the row arrive as keywords.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import ValidationError

from rally.tools.arguments import from_pydantic
from rally.tools.base import BaseTool
from rally.tools.cache import AnswerCache
from rally.tools.calling import Keywords, call
from rally.tools.gate import Gate
from rally.tools.results import Answer, read_answer, read_reward
from rally.tools.schema import ToolConfigError


class ToolCaller:
    def __init__(self, tool: BaseTool[Any]) -> None:
        self.tool = tool
        self._create = Keywords.of(tool.create)
        self._execute = Keywords.of(tool.execute)
        self._calc_reward = Keywords.of(tool.calc_reward)
        self._release = Keywords.of(tool.release)
        self.stateless = all(_inherited(tool, method) for method in ("create", "calc_reward", "release"))
        """Whether an instance is nothing but its id: there is nothing to open, to score or to release."""
        self.at_once = self.stateless and hasattr(tool.execute, "at_once")
        limits = tool.limits
        own = Gate(limits) if limits.max_concurrency or limits.rate_limit else None
        self.gates = tuple(gate for gate in (own, tool.shared_gate) if gate is not None)
        if limits.cache and not self.stateless:
            raise ToolConfigError(
                f"tool {tool.name!r} keeps something for each episode (it has create, calc_reward or release), so its "
                "answers cannot be cached; leave out limits.cache"
            )
        self.cache = AnswerCache(limits.cache_size) if limits.cache else None

    async def create(self, instance_id: str, create_kwargs: Mapping[str, Any]) -> str:
        """Open an instance; the id the tool chose, which is ours when it chose none."""
        whole = self._create.takes("create_kwargs")
        given = {key: value for key, value in create_kwargs.items() if not whole or self._create.takes(key)}
        keywords = self._create.deliver(given, self._method("create"))
        if whole:
            keywords["create_kwargs"] = dict(create_kwargs)
        if self._create.takes("instance_id"):
            keywords["instance_id"] = instance_id
        created = await call(self.tool.create, **keywords)
        chosen = created[0] if isinstance(created, tuple) and created else created
        return chosen if isinstance(chosen, str) else instance_id

    async def execute(self, instance_id: str, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any]) -> Answer:
        keywords = self._execute.deliver(execute_kwargs, self._method("execute"))
        if self._execute.positional == 1:
            return read_answer(await call(self.tool.execute, self._validated(arguments), **keywords))
        return read_answer(await call(self.tool.execute, instance_id, arguments, **keywords))

    async def calc_reward(self, instance_id: str, calc_reward_kwargs: Mapping[str, Any]) -> float | None:
        keywords = self._calc_reward.deliver(calc_reward_kwargs, self._method("calc_reward"))
        reward = await call(self.tool.calc_reward, instance_id, **keywords)
        return None if reward is None else read_reward(reward)

    async def release(self, instance_id: str, release_kwargs: Mapping[str, Any]) -> None:
        await call(self.tool.release, instance_id, **self._release.deliver(release_kwargs, self._method("release")))

    def _validated(self, arguments: dict[str, Any]) -> Any:
        if self.tool.args_schema is None:
            return arguments
        try:
            return self.tool.args_schema.model_validate(arguments)
        except ValidationError as error:
            raise from_pydantic(error) from None

    def _method(self, name: str) -> str:
        return f"{name} of tool {self.tool.name!r}"


def _inherited(tool: BaseTool[Any], method: str) -> bool:
    return getattr(getattr(tool, method), "__func__", None) is getattr(BaseTool, method)
