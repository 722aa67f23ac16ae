"""Guarantees: every tool call of an episode is answered, in order, within its deadline, as text and a status.

`ToolBox` holds the tools of a run, `ToolSession` what one episode opened. Nothing a tool does, or a model writes, gets
out of `run` as an exception; only cancelling it does. Calls of one turn run at the same time on the episode's one
instance of each tool; a tool that cannot bear that wants `max_parallel=1`.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, get_args

from rally.tools.arguments import BadArguments, fit, usage
from rally.tools.base import BaseTool
from rally.tools.caller import ToolCaller
from rally.tools.calling import Ended, ToolTimeout, settled, within
from rally.tools.results import Answer, TruncateSide, clean, shorten
from rally.tools.schema import Schema, ToolConfigError
from rally.types import RallyError, Task, ToolCall, ToolResponse, ToolResult, ToolStatus


@dataclass(frozen=True, kw_only=True)
class ToolLimits:
    """`timeout` is in seconds per call; `max_parallel` 0 is no limit; `max_response_chars` None keeps all text."""

    timeout: float = 30.0
    max_parallel: int = 0
    max_response_chars: int | None = None
    truncate_side: TruncateSide = "middle"

    def __post_init__(self) -> None:
        for ok, sentence in (
            (self.timeout > 0, f"the tool timeout must be more than 0 seconds, not {self.timeout}"),
            (self.max_parallel >= 0, f"max_parallel must be 0 (no limit) or more, not {self.max_parallel}"),
            (
                self.max_response_chars is None or self.max_response_chars > 0,
                f"max_response_chars must be at least 1, or None for no limit, not {self.max_response_chars}",
            ),
            (
                self.truncate_side in get_args(TruncateSide),
                f"truncate_side must be left, right or middle, not {self.truncate_side!r}",
            ),
        ):
            if not ok:
                raise ToolConfigError(sentence)


class Outcome(NamedTuple):
    """How a call ended and what there is to tell."""

    status: ToolStatus
    answer: Answer


class ToolBox:
    """The tools of a run, by name."""

    def __init__(self, tools: Sequence[BaseTool[Any]], limits: ToolLimits | None = None) -> None:
        self.limits = limits or ToolLimits()
        self._callers = {tool.name: ToolCaller(tool) for tool in tools}
        if len(self._callers) < len(tools):
            raise ToolConfigError(f"two tools have the same name among {', '.join(tool.name for tool in tools)}")

    @property
    def names(self) -> list[str]:
        return list(self._callers)

    def schemas(self, selection: Sequence[str] | None = None) -> list[Schema]:
        """What the model is shown, of all tools or of those named."""
        return [copy.deepcopy(caller.tool.tool_schema) for caller in self._selected(selection).values()]

    def open(self, task: Task, episode_id: str) -> ToolSession:
        """A session for one episode; `extra_info.tool_selection` of the task narrows its tools."""
        return ToolSession(self._selected(task.extra_info.get("tool_selection")), self.limits, task, episode_id)

    def close(self) -> None:
        """End what the tools opened for all episodes; once, after a run."""
        for caller in self._callers.values():
            caller.tool.close()

    def _selected(self, selection: Sequence[str] | None) -> dict[str, ToolCaller]:
        if selection is None:
            return dict(self._callers)
        unknown = [name for name in selection if name not in self._callers]
        if unknown:
            raise ToolConfigError(f"there is no tool {unknown[0]!r}; the tools are {', '.join(self.names) or 'none'}")
        return {name: self._callers[name] for name in selection}


class ToolSession:
    """One episode's tools. An instance is created at a tool's first call and released by `close`."""

    def __init__(self, callers: Mapping[str, ToolCaller], limits: ToolLimits, task: Task, episode_id: str) -> None:
        self._callers = callers
        self._limits = limits
        self._task = task
        self._episode_id = episode_id
        self._instances: dict[str, asyncio.Task[str]] = {}
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> dict[str, int]:
        """How many calls there were, how many ended with each status, and what else is worth knowing."""
        return dict(self._counters)

    @property
    def holds_instances(self) -> bool:
        """Whether there is anything for `close` to do."""
        return bool(self._instances)

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result per call, in order."""
        limit = self._limits.max_parallel
        gate = asyncio.Semaphore(limit) if limit else nullcontext()
        if len(calls) == 1:
            return [await self._answer(calls[0], gate)]
        return list(await asyncio.gather(*(self._answer(call, gate) for call in calls)))

    async def close(self) -> dict[str, float]:
        """Score and release every instance; what each tool that scores gave. May be called twice."""
        opened, self._instances = self._instances, {}
        rewards = await asyncio.gather(*(self._end(name, instance) for name, instance in opened.items()))
        return {name: reward for name, reward in zip(opened, rewards, strict=True) if reward is not None}

    async def _answer(self, call: ToolCall, gate: AbstractAsyncContextManager[Any]) -> ToolResult:
        async with gate:
            started = time.perf_counter()
            status, answer = await self._outcome(call)
            seconds = time.perf_counter() - started
        response = self._shortened(answer.response)
        truncated = response is not answer.response
        self._counters["calls"] += 1
        self._counters[status.value] += 1
        if truncated:
            self._counters["truncated"] += 1
        return ToolResult(
            call=call,
            status=status,
            response=response,
            reward=answer.reward,
            metrics=answer.metrics,
            seconds=seconds,
            truncated=truncated,
        )

    async def _outcome(self, call: ToolCall) -> Outcome:
        caller = self._callers.get(call.name)
        if call.error is not None:
            text = f"this tool call could not be read ({call.error.rstrip('.')}). {self._example(caller)}"
            return _failed(ToolStatus.MALFORMED, text)
        if caller is None:
            known = f"the tools are: {', '.join(self._callers)}" if self._callers else "there are no tools here"
            return _failed(ToolStatus.UNKNOWN_TOOL, f"there is no tool {call.name!r}; {known}.")
        work = self._execute(caller, call.arguments)
        ended = await (settled(work) if caller.at_once else within(work, self._limits.timeout))
        if ended.late:
            limit = f"{self._limits.timeout:g} seconds"
            return _failed(ToolStatus.TIMEOUT, f"{call.name} did not answer within {limit}.")
        if isinstance(ended.error, BadArguments):
            text = f"bad arguments for {call.name}: {ended.error}. {usage(caller.tool.parameters)}"
            return _failed(ToolStatus.BAD_ARGUMENTS, text)
        if isinstance(ended.error, ToolTimeout):
            return _failed(ToolStatus.TIMEOUT, f"{ended.error}.")
        if ended.error is not None:
            return _failed(ToolStatus.ERROR, describe(ended.error))
        answer: Answer = ended.value
        return Outcome(ToolStatus.OK if answer.ok else ToolStatus.ERROR, answer)

    async def _execute(self, caller: ToolCaller, arguments: dict[str, Any]) -> Answer:
        fitted = fit(caller.tool.parameters, arguments)
        instance_id = await self._instance(caller)
        return await caller.execute(instance_id, fitted, self._row(caller.tool.name, "execute_kwargs"))

    async def _instance(self, caller: ToolCaller) -> str:
        """The episode's instance. Calls that arrive while it is being made share it; a failed attempt is not kept."""
        name = caller.tool.name
        if caller.stateless:
            return self._instance_id(name)
        pending = self._instances.get(name)
        if pending is None or (pending.done() and (pending.cancelled() or pending.exception() is not None)):
            pending = asyncio.create_task(self._create(caller))
            self._instances[name] = pending
        # Shielded, because one call's deadline must not undo what another still waits for.
        return await asyncio.shield(pending)

    async def _create(self, caller: ToolCaller) -> str:
        name = caller.tool.name
        try:
            return await caller.create(self._instance_id(name), self._row(name, "create_kwargs"))
        except SystemExit as error:
            raise RallyError(f"create of tool {name!r} called exit({error.code})") from None

    async def _end(self, name: str, instance: asyncio.Task[str]) -> float | None:
        if not instance.done():
            instance.cancel()
            self._counters["abandoned"] += 1
            return None
        if instance.cancelled() or instance.exception() is not None:
            self._counters["create_errors"] += 1
            return None
        caller, timeout, instance_id = self._callers[name], self._limits.timeout, instance.result()
        try:
            scored = await within(caller.calc_reward(instance_id, self._row(name, "calc_reward_kwargs")), timeout)
            self._count_failure("calc_reward_errors", scored)
        finally:
            released = await within(caller.release(instance_id, self._row(name, "release_kwargs")), timeout)
            self._count_failure("release_errors", released)
        value: float | None = scored.value
        return value

    def _count_failure(self, counter: str, ended: Ended) -> None:
        if ended.late or ended.error is not None:
            self._counters[counter] += 1

    def _instance_id(self, name: str) -> str:
        return f"{self._episode_id}/{name}"

    def _row(self, name: str, section: str) -> dict[str, Any]:
        """The row's keywords for a method. Columns of a table share their keys, so None means that there are none."""
        given = (self._task.tools_kwargs.get(name) or {}).get(section) or {}
        return {key: value for key, value in given.items() if value is not None}

    def _shortened(self, response: ToolResponse) -> ToolResponse:
        text = response.text or ""
        kept = shorten(text, self._limits.max_response_chars, self._limits.truncate_side)
        return response if kept == text else replace(response, text=kept)

    def _example(self, caller: ToolCaller | None) -> str:
        caller = caller or next(iter(self._callers.values()), None)
        if caller is None:
            return "There are no tools here."
        arguments = dict.fromkeys(caller.tool.parameters.get("properties") or {}, "...")
        example = json.dumps({"name": caller.tool.name, "arguments": arguments}, ensure_ascii=False)
        return f"Write it again as valid JSON, like {example}."


def describe(error: BaseException) -> str:
    """An exception in words: ours speak for themselves, others need their type."""
    if isinstance(error, RallyError):
        return str(error)
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__


def _failed(status: ToolStatus, text: str) -> Outcome:
    return Outcome(status, Answer(response=ToolResponse(text=clean(f"Error: {text}")), ok=False))
