"""Guarantees: every tool call of an episode is answered, in order, within its deadline, as text and a status.

`ToolBox` holds the tools of a run, `ToolSession` what one episode opened. Nothing a tool does, or a model writes, gets
out of `run` as an exception; only cancelling it does. Calls of one turn run at the same time on the episode's one
instance of each tool; a tool that cannot bear that wants `max_parallel=1`. A call's deadline begins when it is let
through its tool's gate: waiting is not the tool's fault. No known secret gets out in what the model is told.
"""

from __future__ import annotations

import asyncio
import copy
import json
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

from rally.images.loading import loaded_images
from rally.redact import learn_environment, redact
from rally.tools.base import BaseTool
from rally.tools.invoke import CallEnd, ToolCaller, ToolTimeout, call_key, on_abandoned, settled, within
from rally.tools.limits import ToolLimits
from rally.tools.rate_limit import QueueFull
from rally.tools.results import ToolReturn, clean, shorten
from rally.tools.schema import BadArguments, Schema, ToolConfigError, fit, usage
from rally.types import TOOL_TROUBLE, RallyError, Task, ToolCall, ToolResponse, ToolResult, ToolStatus


class CallOutcome(NamedTuple):
    """How a call ended and what there is to tell; `seconds` and `queued` are how long it took and waited."""

    status: ToolStatus
    answer: ToolReturn
    seconds: float = 0.0
    queued: float = 0.0
    cached: bool = False


class ToolBox:
    """The tools of a run, by name."""

    def __init__(self, tools: Sequence[BaseTool[Any]], limits: ToolLimits | None = None) -> None:
        self.limits = limits or ToolLimits()
        self._callers = {tool.name: ToolCaller(tool) for tool in tools}
        learn_environment()
        if len(self._callers) < len(tools):
            raise ToolConfigError(f"two tools have the same name among {', '.join(tool.name for tool in tools)}")

    @property
    def names(self) -> list[str]:
        return list(self._callers)

    @property
    def tools(self) -> list[BaseTool[Any]]:
        return [caller.tool for caller in self._callers.values()]

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
    def trouble(self) -> dict[str, int]:
        """Of the counters, those that tell of something wrong beside the calls' statuses; empty when all is well."""
        return {name: self._counters[name] for name in TOOL_TROUBLE if self._counters[name]}

    @property
    def holds_instances(self) -> bool:
        """Whether there is anything for `close` to do."""
        return bool(self._instances)

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """One result per call, in order."""
        limit = self._limits.max_parallel
        gate = asyncio.Semaphore(limit) if limit else nullcontext()
        token, answered = on_abandoned.set(self._count_abandoned), self._counters["calls"]
        try:
            if len(calls) == 1:
                return [await self._answer(calls[0], gate)]
            return list(await asyncio.gather(*(self._answer(call, gate) for call in calls)))
        except asyncio.CancelledError:
            self._counters["cancelled"] += len(calls) - (self._counters["calls"] - answered)
            raise
        finally:
            on_abandoned.reset(token)

    async def close(self) -> dict[str, float]:
        """Score and release every instance; what each tool that scores gave. May be called twice."""
        opened, self._instances = self._instances, {}
        rewards = await asyncio.gather(*(self._end(name, instance) for name, instance in opened.items()))
        return {name: reward for name, reward in zip(opened, rewards, strict=True) if reward is not None}

    async def _answer(self, call: ToolCall, gate: AbstractAsyncContextManager[Any]) -> ToolResult:
        came = time.perf_counter()
        async with gate:
            waited = time.perf_counter() - came
            outcome = await self._outcome(call)
        answer = outcome.answer
        response = self._shortened(answer.response)
        truncated = response is not answer.response
        self._counters["calls"] += 1
        self._counters[outcome.status.value] += 1
        if truncated:
            self._counters["truncated"] += 1
        return ToolResult(
            call=call,
            status=outcome.status,
            response=response,
            reward=answer.reward,
            metrics=dict(answer.metrics),
            seconds=outcome.seconds,
            truncated=truncated,
            queued=waited + outcome.queued,
            cached=outcome.cached,
        )

    async def _outcome(self, call: ToolCall) -> CallOutcome:
        caller = self._callers.get(call.name)
        if call.error is not None:
            text = f"this tool call could not be read ({call.error.rstrip('.')}). {self._example(caller)}"
            return _failed(ToolStatus.MALFORMED, text)
        if caller is None:
            known = f"the tools are: {', '.join(self._callers)}" if self._callers else "there are no tools here"
            return _failed(ToolStatus.UNKNOWN_TOOL, f"there is no tool {call.name!r}; {known}.")
        try:
            arguments = fit(caller.tool.parameters, call.arguments)
        except BadArguments as error:
            return _bad_arguments(caller, error)
        return await self._remembered(caller, arguments)

    async def _remembered(self, caller: ToolCaller, arguments: dict[str, Any]) -> CallOutcome:
        """The answer that an identical call was given before, where the tool is cached; else a new one."""
        key = call_key(arguments, self._row(caller.tool.name, "execute_kwargs")) if caller.cache else None
        if caller.cache is None or key is None:
            return await self._gated(caller, arguments)
        known = caller.cache.find(key)
        if known is not None:
            return CallOutcome(ToolStatus.OK, known, cached=True)
        outcome = await self._gated(caller, arguments)
        if outcome.status is ToolStatus.OK:
            caller.cache.keep(key, outcome.answer)
        return outcome

    async def _gated(self, caller: ToolCaller, arguments: dict[str, Any]) -> CallOutcome:
        if not caller.gates:
            return await self._timed(caller, arguments)
        try:
            async with AsyncExitStack() as passed:
                waited = [await passed.enter_async_context(gate.passage()) for gate in caller.gates]
                outcome = await self._timed(caller, arguments)
                late, failed = outcome.status is ToolStatus.TIMEOUT, outcome.status is ToolStatus.ERROR
                for gate in caller.gates:
                    gate.learn(outcome.seconds, late=late, failed=failed)
            return outcome._replace(queued=sum(waited))
        except QueueFull as full:
            return _failed(ToolStatus.REJECTED, f"{caller.tool.name} is busy: {full}.")

    async def _timed(self, caller: ToolCaller, arguments: dict[str, Any]) -> CallOutcome:
        started = time.perf_counter()
        work = self._execute(caller, arguments)
        ended = await (settled(work) if caller.at_once else within(work, self._timeout(caller)))
        return self._read(caller, ended)._replace(seconds=time.perf_counter() - started)

    def _read(self, caller: ToolCaller, ended: CallEnd) -> CallOutcome:
        if ended.late:
            limit = f"{self._timeout(caller):g} seconds"
            return _failed(ToolStatus.TIMEOUT, f"{caller.tool.name} did not answer within {limit}.")
        if isinstance(ended.error, BadArguments):
            return _bad_arguments(caller, ended.error)
        if isinstance(ended.error, ToolTimeout):
            return _failed(ToolStatus.TIMEOUT, f"{ended.error}.")
        if ended.error is not None:
            return _failed(ToolStatus.ERROR, describe(ended.error))
        answer: ToolReturn = ended.value
        return CallOutcome(ToolStatus.OK if answer.ok else ToolStatus.ERROR, _without_secrets(answer))

    def _timeout(self, caller: ToolCaller) -> float:
        return caller.tool.limits.timeout or max(self._limits.timeout, caller.tool.own_timeout or 0.0)

    async def _execute(self, caller: ToolCaller, arguments: dict[str, Any]) -> ToolReturn:
        instance_id = await self._instance(caller)
        return await caller.execute(instance_id, arguments, self._row(caller.tool.name, "execute_kwargs"))

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
        on_abandoned.set(lambda: None)  # a creation that is given up is counted by who gives it up
        try:
            given = self._row(name, "create_kwargs")
            if caller.tool.sees_images:
                given = {"images": loaded_images(self._task.prompt), **given}
            return await caller.create(self._instance_id(name), given)
        except SystemExit as error:
            raise RallyError(f"create of tool {name!r} called exit({error.code})") from None

    async def _end(self, name: str, instance: asyncio.Task[str]) -> float | None:
        caller = self._callers[name]
        timeout = self._timeout(caller)
        if not instance.done():  # what opens late must be released too
            await asyncio.wait({instance}, timeout=timeout)
        if not instance.done():
            instance.cancel()
            self._counters["abandoned"] += 1
            return None
        if instance.cancelled() or instance.exception() is not None:
            self._counters["create_errors"] += 1
            return None
        instance_id = instance.result()
        try:
            scored = await within(caller.calc_reward(instance_id, self._row(name, "calc_reward_kwargs")), timeout)
            self._count_failure("calc_reward_errors", scored)
        finally:
            released = await within(caller.release(instance_id, self._row(name, "release_kwargs")), timeout)
            self._count_failure("release_errors", released)
        value: float | None = scored.value
        return value

    def _count_abandoned(self) -> None:
        self._counters["abandoned"] += 1

    def _count_failure(self, counter: str, ended: CallEnd) -> None:
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


def _bad_arguments(caller: ToolCaller, error: BadArguments) -> CallOutcome:
    text = f"bad arguments for {caller.tool.name}: {error}. {usage(caller.tool.parameters)}"
    return _failed(ToolStatus.BAD_ARGUMENTS, text)


def _failed(status: ToolStatus, text: str) -> CallOutcome:
    return CallOutcome(status, ToolReturn(response=ToolResponse(text=clean(redact(f"Error: {text}"))), ok=False))


def _without_secrets(answer: ToolReturn) -> ToolReturn:
    text = answer.response.text
    if not text or (safe := redact(text)) == text:
        return answer
    return replace(answer, response=replace(answer.response, text=safe))
