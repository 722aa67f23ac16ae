"""Runs the tool calls of an episode. Every call returns within its deadline, in order, as text and a status.

`ToolBox` holds the tools of a run, `ToolSession` the instances of one episode. `ToolSession.run` raises only
CancelledError: whatever a tool raises or a model writes becomes the text and status of a result. The calls of one turn
run concurrently on the episode's one instance of each tool; a tool that does not allow this needs `max_parallel=1`. The
deadline of a call starts when the limiters of its tool let it through. Known secrets are redacted from every response.
"""

from __future__ import annotations

import asyncio
import copy
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from rally.images.loading import loaded_images
from rally.redact import learn_environment, redact
from rally.tools.base import BaseTool
from rally.tools.invoke import (
    CallEnd,
    ToolCaller,
    ToolTimeout,
    ToolUnavailable,
    call_key,
    is_keyboard,
    is_outage,
    on_abandoned,
    outcome_of,
    outcome_within,
)
from rally.tools.limits import ToolLimits
from rally.tools.results import ToolReturn, clean, shorten
from rally.tools.schema import BadArguments, Schema, ToolConfigError, brief, fit, several, usage
from rally.types import HINTS, TOOL_TROUBLE, OnOutage, RallyError, Task, ToolCall, ToolResponse, ToolResult, ToolStatus
from rally.util.rate_limit import QueueFull


class CallOutcome(NamedTuple):
    """How a call ended and its answer. `seconds` is how long it ran, `queued` how long it waited before."""

    status: ToolStatus
    answer: ToolReturn
    seconds: float = 0.0
    queued: float = 0.0
    cached: bool = False


LONGEST_NAME, LONGEST_REASON = 60, 240  # characters; a hint repeats what the policy wrote only in part

SEVERITY: tuple[OnOutage, ...] = ("count", "mask", "drop_group")


@dataclass
class Outage:
    """The calls of one episode that failed because of a tool's infrastructure: their number by tool, the reason of the
    first, and the strongest of the tools' `on_outage`."""

    first: str
    on_outage: OnOutage = "count"
    calls: Counter[str] = field(default_factory=Counter)

    def record(self) -> dict[str, Any]:
        return {"on_outage": self.on_outage, "calls": dict(self.calls), "first": self.first}


class ToolBox:
    """The tools of a run, by name."""

    def __init__(
        self, tools: Sequence[BaseTool[Any]], limits: ToolLimits | None = None, on_outage: OnOutage = "mask"
    ) -> None:
        self.limits = limits or ToolLimits()
        self.on_outage: OnOutage = on_outage
        self._outages: dict[str, Outage] = {}
        self._callers = {tool.name: ToolCaller(tool) for tool in tools}
        learn_environment()
        if len(self._callers) < len(tools):
            raise ToolConfigError(f"two tools have the same name: {', '.join(tool.name for tool in tools)}; rename one")

    @property
    def names(self) -> list[str]:
        return list(self._callers)

    @property
    def tools(self) -> list[BaseTool[Any]]:
        return [caller.tool for caller in self._callers.values()]

    def schemas(self, selection: Sequence[str] | None = None) -> list[Schema]:
        """The OpenAI schemas of all tools, or of those in `selection`."""
        return [copy.deepcopy(caller.tool.tool_schema) for caller in self._selected(selection).values()]

    def open(self, task: Task, episode_id: str) -> ToolSession:
        """A session for one episode. `extra_info.tool_selection` of the task limits which tools it has."""
        callers = self._selected(task.extra_info.get("tool_selection"))
        return ToolSession(callers, self.limits, task, episode_id, self._note_outage)

    def take_outage(self, episode_id: str) -> Outage | None:
        """The outages that the episode met since this was last asked."""
        return self._outages.pop(episode_id, None)

    def _note_outage(self, episode_id: str, tool: BaseTool[Any], reason: str) -> None:
        outage = self._outages.setdefault(episode_id, Outage(first=f"{tool.name}: {reason}"))
        outage.calls[tool.name] += 1
        outage.on_outage = max(outage.on_outage, tool.on_outage or self.on_outage, key=SEVERITY.index)

    def close(self) -> None:
        """Close what the tools share between episodes. Called once, after a run."""
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
    """The tools of one episode. A tool's instance is created at its first call and released by `close`."""

    def __init__(
        self,
        callers: Mapping[str, ToolCaller],
        limits: ToolLimits,
        task: Task,
        episode_id: str,
        on_outage: Callable[[str, BaseTool[Any], str], None],
    ) -> None:
        self._callers = callers
        self._on_outage = on_outage
        self._limits = limits
        self._task = task
        self._episode_id = episode_id
        self._instances: dict[str, asyncio.Task[str]] = {}
        self._counters: Counter[str] = Counter()

    @property
    def counters(self) -> dict[str, int]:
        """The number of calls, of calls per status, and of other events such as truncated responses."""
        return dict(self._counters)

    @property
    def trouble(self) -> dict[str, int]:
        """The counters of problems other than the calls' statuses; empty when there were none."""
        return {name: self._counters[name] for name in TOOL_TROUBLE if self._counters[name]}

    @property
    def holds_instances(self) -> bool:
        """Whether there is anything for `close` to do."""
        return bool(self._instances)

    async def run(self, calls: Sequence[ToolCall]) -> list[ToolResult]:
        """Run the calls of one turn. Returns one result per call, in order."""
        limit = self._limits.max_parallel
        semaphore = asyncio.Semaphore(limit) if limit else nullcontext()
        token, answered = on_abandoned.set(self._count_abandoned), self._counters["calls"]
        try:
            if len(calls) == 1:
                return [await self._run_call(calls[0], semaphore)]
            return list(await asyncio.gather(*(self._run_call(call, semaphore) for call in calls)))
        except asyncio.CancelledError:
            self._counters["cancelled"] += len(calls) - (self._counters["calls"] - answered)
            raise
        finally:
            on_abandoned.reset(token)

    async def close(self) -> dict[str, float]:
        """Score and release every instance. Returns the reward of each tool that gives one. May be called twice."""
        opened, self._instances = self._instances, {}
        rewards = await asyncio.gather(*(self._end(name, instance) for name, instance in opened.items()))
        return {name: reward for name, reward in zip(opened, rewards, strict=True) if reward is not None}

    async def _run_call(self, call: ToolCall, semaphore: AbstractAsyncContextManager[Any]) -> ToolResult:
        """Run one call, shorten its response and count it."""
        arrived = time.perf_counter()
        async with semaphore:
            waited = time.perf_counter() - arrived
            outcome = await self._outcome(call)
        answer, response = outcome.answer, outcome.answer.response
        text = response.text or ""
        limit = None if outcome.status in HINTS else self._limits.max_response_chars
        shortened = shorten(text, limit, self._limits.truncate_side)
        truncated = shortened != text
        self._counters["calls"] += 1
        self._counters[outcome.status.value] += 1
        outage = self._is_outage(call, outcome.status)
        if outage:
            self._on_outage(self._episode_id, self._callers[call.name].tool, text.removeprefix("Error: "))
        if truncated:
            self._counters["truncated"] += 1
        return ToolResult(
            call=call,
            status=outcome.status,
            response=replace(response, text=shortened) if truncated else response,
            reward=answer.reward,
            metrics=dict(answer.metrics),
            seconds=outcome.seconds,
            truncated=truncated,
            queued=waited + outcome.queued,
            cached=outcome.cached,
            outage=outage,
        )

    def _is_outage(self, call: ToolCall, status: ToolStatus) -> bool:
        """Whether the call failed because of the tool's infrastructure. So does a full queue, which other episodes
        filled."""
        if status is ToolStatus.TIMEOUT:
            return not self._callers[call.name].tool.timeout_counts
        return status in (ToolStatus.UNAVAILABLE, ToolStatus.REJECTED)

    async def _outcome(self, call: ToolCall) -> CallOutcome:
        """Check the call, then take its answer from the tool's cache or from the tool."""
        arguments = checked_arguments(call, {name: caller.tool.parameters for name, caller in self._callers.items()})
        if isinstance(arguments, CallOutcome):
            return arguments
        caller = self._callers[call.name]
        if caller.cache is None or (key := call_key(arguments, self._row(call.name, "execute_kwargs"))) is None:
            return await self._limited(caller, arguments)
        cached = caller.cache.get(key)
        if cached is not None:
            return CallOutcome(ToolStatus.OK, cached, cached=True)
        outcome = await self._limited(caller, arguments)
        if outcome.status is ToolStatus.OK:
            caller.cache.put(key, outcome.answer)
        return outcome

    async def _limited(self, caller: ToolCaller, arguments: dict[str, Any]) -> CallOutcome:
        """Wait for the tool's limiters, then execute the call within its deadline."""
        try:
            async with AsyncExitStack() as slots:
                waited = [await slots.enter_async_context(limiter.slot()) for limiter in caller.limiters]
                started = time.perf_counter()
                work, timeout = self._execute(caller, arguments), self._timeout(caller)
                ended = await (outcome_of(work) if caller.instant else outcome_within(work, timeout))
                seconds = time.perf_counter() - started
                outcome = _read_end(caller, ended, timeout)._replace(seconds=seconds, queued=sum(waited))
                late = outcome.status is ToolStatus.TIMEOUT
                failed = outcome.status in (ToolStatus.ERROR, ToolStatus.UNAVAILABLE)
                for limiter in caller.limiters:
                    limiter.record(seconds, late=late, failed=failed)
                return outcome
        except QueueFull as full:
            return _failed(ToolStatus.REJECTED, f"{caller.tool.name} is busy: {full}.")

    async def _execute(self, caller: ToolCaller, arguments: dict[str, Any]) -> ToolReturn:
        try:
            instance_id = await self._instance(caller)
        except Exception as error:  # no argument of the policy is involved
            raise ToolUnavailable(describe(error)) from error
        return await caller.execute(instance_id, arguments, self._row(caller.tool.name, "execute_kwargs"))

    def _timeout(self, caller: ToolCaller) -> float:
        return caller.tool.limits.timeout or max(self._limits.timeout, caller.tool.own_timeout or 0.0)

    async def _instance(self, caller: ToolCaller) -> str:
        """The id of the episode's instance. Concurrent first calls share one creation; a failed one is tried again."""
        name = caller.tool.name
        if caller.stateless:
            return self._instance_id(name)
        pending = self._instances.get(name)
        if pending is None or (pending.done() and (pending.cancelled() or pending.exception() is not None)):
            pending = asyncio.create_task(self._create(caller))
            self._instances[name] = pending
        # Shielded: the deadline of one call must not cancel a creation that another call waits for.
        return await asyncio.shield(pending)

    async def _create(self, caller: ToolCaller) -> str:
        name = caller.tool.name
        on_abandoned.set(lambda: None)  # `_end` counts an abandoned creation
        try:
            create_kwargs = self._row(name, "create_kwargs")
            if caller.tool.sees_images:
                create_kwargs = {"images": loaded_images(self._task.prompt), **create_kwargs}
            return await caller.create(self._instance_id(name), create_kwargs)
        except SystemExit as error:
            raise RallyError(f"create of tool {name!r} called exit({error.code})") from None
        except (Exception, asyncio.CancelledError):
            raise
        except BaseException as error:  # a task must not raise it: asyncio would end the event loop
            if is_keyboard(error):
                raise
            raise RallyError(f"create of tool {name!r} raised {describe(error)}") from None

    async def _end(self, name: str, instance: asyncio.Task[str]) -> float | None:
        caller = self._callers[name]
        timeout = self._timeout(caller)
        if not instance.done():  # an instance that is still being created must be released too
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
            scored = await outcome_within(
                caller.calc_reward(instance_id, self._row(name, "calc_reward_kwargs")), timeout
            )
            self._count_failure("calc_reward_errors", scored)
        finally:
            released = await outcome_within(caller.release(instance_id, self._row(name, "release_kwargs")), timeout)
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
        """The row's keywords for a method. None values are dropped: Parquet fills the keys of other rows with None."""
        keywords = (self._task.tools_kwargs.get(name) or {}).get(section) or {}
        return {key: value for key, value in keywords.items() if value is not None}


def describe(error: BaseException) -> str:
    """The text of an exception, with its type unless it is a RallyError."""
    name = type(error).__name__
    try:
        text = str(error)
    except Exception as second:  # noqa: BLE001 - a user's exception may have a __str__ that fails
        return f"{name}, whose text cannot be read ({type(second).__name__})"
    if isinstance(error, RallyError):
        return text
    return f"{name}: {text}" if text else name


def checked_arguments(call: ToolCall, tools: Mapping[str, Mapping[str, Any]]) -> dict[str, Any] | CallOutcome:
    """The arguments of a call, converted to the schema of its tool, or the answer to a call that no tool can take.
    `tools` are the parameter schemas by name."""
    parameters = tools.get(call.name)
    if call.error is not None:
        expected = "" if parameters is None else f" {usage(parameters)}"
        return _failed(ToolStatus.MALFORMED, f"{brief(call.error, LONGEST_REASON).rstrip('.')}.{expected}")
    if parameters is None:
        known = f"the tools are: {several(list(tools))}" if tools else "there are no tools here"
        return _failed(ToolStatus.UNKNOWN_TOOL, f"there is no tool {brief(call.name, LONGEST_NAME)!r}; {known}.")
    try:
        return fit(parameters, call.arguments)
    except BadArguments as error:
        return _bad_arguments(call.name, parameters, error)


def _bad_arguments(name: str, parameters: Mapping[str, Any], error: BadArguments) -> CallOutcome:
    reason = brief(str(error), LONGEST_REASON)
    return _failed(ToolStatus.BAD_ARGUMENTS, f"bad arguments for {name}: {reason}. {usage(parameters)}")


def _read_end(caller: ToolCaller, ended: CallEnd, timeout: float) -> CallOutcome:
    if ended.late:
        return _failed(ToolStatus.TIMEOUT, f"{caller.tool.name} did not answer within {timeout:g} seconds.")
    if isinstance(ended.error, BadArguments):
        return _bad_arguments(caller.tool.name, caller.tool.parameters, ended.error)
    if isinstance(ended.error, ToolTimeout):
        return _failed(ToolStatus.TIMEOUT, f"{brief(str(ended.error), LONGEST_REASON)}.")
    if ended.error is not None:
        late = isinstance(ended.error, TimeoutError) and caller.tool.timeout_counts
        down = is_outage(ended.error) and not late
        return _failed(ToolStatus.UNAVAILABLE if down else ToolStatus.ERROR, describe(ended.error))
    answer: ToolReturn = ended.value
    text = answer.response.text
    if text and (safe := redact(text)) != text:
        answer = replace(answer, response=replace(answer.response, text=safe))
    return CallOutcome(ToolStatus.OK if answer.ok else ToolStatus.ERROR, answer)


def _failed(status: ToolStatus, text: str) -> CallOutcome:
    return CallOutcome(status, ToolReturn(response=ToolResponse(text=clean(redact(f"Error: {text}"))), ok=False))
