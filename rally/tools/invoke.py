"""Guarantees: the four methods of a tool are called one way, whichever of the known signatures its author chose.

- `create`: the row's create_kwargs arrive whole as the keyword `create_kwargs` and one by one, as far as the signature
  takes them: `create(instance_id, **kwargs)` gets both, `create(instance_id, ground_truth)` the entry alone and
  `create(instance_id, create_kwargs)` the whole alone. An entry that arrives neither way is an error.
- `execute(instance_id, parameters, **kwargs)`, or with one positional parameter `execute(args, **kwargs)`, where args
  is an `args_schema` object (a dict when the class has none).
- execute_kwargs, calc_reward_kwargs and release_kwargs of the row arrive as keywords.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
import json
import threading
from collections import OrderedDict
from collections.abc import Callable, Coroutine, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from pydantic import ValidationError

from rally.tools.base import BaseTool
from rally.tools.rate_limit import RateLimiter
from rally.tools.results import ToolReturn, read_answer, read_reward
from rally.tools.schema import ToolConfigError, from_pydantic
from rally.types import RallyError

LONGEST = 1_000_000  # the memory of a run is not for what a tool blurts out once


class AnswerCache:
    """The last `size` answers of one tool."""

    def __init__(self, size: int) -> None:
        self._size = size
        self._answers: OrderedDict[str, ToolReturn] = OrderedDict()

    def find(self, key: str) -> ToolReturn | None:
        if key not in self._answers:
            return None
        self._answers.move_to_end(key)
        return self._answers[key]

    def keep(self, key: str, answer: ToolReturn) -> None:
        if len(answer.response.text or "") > LONGEST:
            return
        self._answers[key] = answer
        self._answers.move_to_end(key)
        if len(self._answers) > self._size:
            self._answers.popitem(last=False)


def call_key(arguments: Mapping[str, Any], row: Mapping[str, Any]) -> str | None:
    """Two calls with the same key get the same: the arguments, in any order, and what the row adds to them.

    None for arguments nested too deeply to be compared: such a call is not cached.
    """
    try:
        return json.dumps([arguments, row], sort_keys=True, default=repr)
    except RecursionError:
        return None


class ToolTimeout(RallyError):
    """A tool raises it when a deadline of its own has passed. The text is told to the model."""


on_abandoned: contextvars.ContextVar[Callable[[], None]] = contextvars.ContextVar("on_abandoned", default=lambda: None)
"""Called when a thread is left to itself because nobody waits for it any longer: Python cannot end one."""


@dataclass(frozen=True, kw_only=True)
class CallEnd:
    """How some work ended: with a value, with an error, or too late to say."""

    value: Any = None
    error: BaseException | None = None
    late: bool = False


async def within(work: Coroutine[Any, Any, Any], seconds: float) -> CallEnd:
    """What came of `work` after `seconds` at most, even when it ignores being cancelled; raises only CancelledError."""
    task = asyncio.create_task(settled(work))
    try:
        done, _ = await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _cancel(task)
        raise
    if done:
        return task.result()
    await _cancel(task)
    return CallEnd(late=True)


async def _cancel(task: asyncio.Task[CallEnd]) -> None:
    """Tell the work that it is over, and let it hear of that before anybody counts what it left behind."""
    task.cancel()
    await asyncio.sleep(0)


async def settled(work: Coroutine[Any, Any, Any]) -> CallEnd:
    """Foreign code may fail in any way, exit() and a stray cancellation included: each is an outcome, not a crash."""
    try:
        return CallEnd(value=await work)
    except (Exception, SystemExit, asyncio.CancelledError) as error:  # noqa: BLE001
        return CallEnd(error=error)


async def call(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """`function(*args, **kwargs)`: awaited when async, in a thread when not."""
    if inspect.iscoroutinefunction(function):
        return await function(*args, **kwargs)
    value = await _in_thread(lambda: function(*args, **kwargs))
    return await value if inspect.isawaitable(value) else value


async def _in_thread(work: Callable[[], Any]) -> Any:
    loop = asyncio.get_running_loop()
    finished: asyncio.Future[CallEnd] = loop.create_future()
    context = contextvars.copy_context()

    def settle(ended: CallEnd) -> None:
        if not finished.done():
            finished.set_result(ended)

    def run() -> None:
        try:
            ended = CallEnd(value=context.run(work))
        except BaseException as error:  # noqa: BLE001 - whatever ends the thread belongs to the caller
            ended = CallEnd(error=error)
        with suppress(RuntimeError):  # an abandoned call may outlive the loop
            loop.call_soon_threadsafe(settle, ended)

    threading.Thread(target=run, name="rally-tool", daemon=True).start()
    try:
        ended = await finished
    except asyncio.CancelledError:
        on_abandoned.get()()
        raise
    if ended.error is not None:
        raise ended.error
    return ended.value


@dataclass(frozen=True)
class Keywords:
    """The keywords a function takes; read from its signature once."""

    names: frozenset[str]
    takes_any: bool
    positional: int

    @classmethod
    def of(cls, function: Callable[..., Any]) -> Keywords:
        kind = inspect.Parameter
        try:
            parameters = list(inspect.signature(function).parameters.values())
        except (TypeError, ValueError):  # some built-in callables show none; they get what there is
            parameters = [kind("kwargs", kind.VAR_KEYWORD)]
        return cls(
            names=frozenset(p.name for p in parameters if p.kind in (kind.POSITIONAL_OR_KEYWORD, kind.KEYWORD_ONLY)),
            takes_any=any(p.kind is kind.VAR_KEYWORD for p in parameters),
            positional=sum(p.kind in (kind.POSITIONAL_ONLY, kind.POSITIONAL_OR_KEYWORD) for p in parameters),
        )

    def takes(self, name: str) -> bool:
        return self.takes_any or name in self.names

    def deliver(self, given: Mapping[str, Any], what: str) -> dict[str, Any]:
        """All of `given`: a keyword is delivered or refused, never lost."""
        refused = [name for name in given if not self.takes(name)]
        if refused:
            raise ToolConfigError(f"{what} takes no {', '.join(map(repr, refused))}, which this row or config gives it")
        return dict(given)


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
        own = RateLimiter(limits) if limits.max_concurrency or limits.rate_limit else None
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

    async def execute(
        self, instance_id: str, arguments: dict[str, Any], execute_kwargs: Mapping[str, Any]
    ) -> ToolReturn:
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
