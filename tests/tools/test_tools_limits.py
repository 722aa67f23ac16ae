"""Each tool keeps the limits of its YAML entry; rejected, cached, truncated and abandoned calls are counted."""

import asyncio
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from rally.tools import (
    BaseTool,
    CallLimits,
    ToolBox,
    ToolConfigError,
    ToolLimits,
    ToolSession,
    function_tool,
    load_tools,
    run_process,
)
from rally.types import Task, ToolCall, ToolResponse, ToolStatus
from rally.util.rate_limit import RateLimiter

TASK = Task(id="t", data_source="test", prompt=({"role": "user", "content": "hi"},))
SCHEMA = {"name": "tool", "parameters": {"type": "object", "properties": {"x": {"type": "integer"}}}}


class Counting(BaseTool[Any]):
    """Sleeps for its config's `seconds` and counts its calls."""

    def __init__(self, config: Any = None, tool_schema: Any = None) -> None:
        super().__init__(config, tool_schema or SCHEMA)
        self.calls, self.running, self.most = 0, 0, 0

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.calls += 1
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            await asyncio.sleep(self.config.get("seconds", 0.0))
        finally:
            self.running -= 1
        if parameters.get("x") == 13:
            raise KeyError("13")
        return f"answer {self.calls}"


def limited(tool: BaseTool[Any], **limits: Any) -> BaseTool[Any]:
    tool.limits = CallLimits(**limits)
    return tool


def opened(*tools: BaseTool[Any], **limits: Any) -> ToolSession:
    return ToolBox(tools, ToolLimits(**limits)).open(TASK, "e")


def calls(*xs: int) -> list[ToolCall]:
    return [ToolCall(name="tool", arguments={"x": x}) for x in xs]


def test_a_yaml_entry_limits_its_tool_and_mistakes_are_said(tmp_path: Path) -> None:
    path = tmp_path / "tools.yaml"

    def load(limits: str) -> CallLimits:
        path.write_text(f"tools: [{{name: calculator, limits: {limits}}}]", encoding="utf-8")
        (tool,) = load_tools(path)
        return tool.limits

    assert load("{num_workers: 8, rate_limit: 2.5, timeout: 5}") == CallLimits(
        max_concurrency=8, rate_limit=2.5, timeout=5
    )
    with pytest.raises(
        ToolConfigError, match=r"tool 1: limits has no key 'rate'; its keys are max_concurrency, rate_l"
    ):
        load("{rate: 3}")
    with pytest.raises(ToolConfigError, match="'rate_limit': Input should be greater than 0"):
        load("{rate_limit: 0}")
    with pytest.raises(ToolConfigError, match="limits must be a mapping, not int"):
        load("3")


def test_an_entry_s_limits_go_over_those_of_the_tool(tmp_path: Path) -> None:
    config = {"retrieval_service_url": "http://127.0.0.1:1/retrieve", "num_workers": 7}
    (tool,) = load_tools({"tools": [{"name": "search", "config": config, "limits": {"rate_limit": 3}}]})
    assert (tool.limits.max_concurrency, tool.limits.rate_limit) == (7, 3)


async def test_the_number_holds_over_all_episodes_and_waiting_is_not_charged() -> None:
    tool = Counting({"seconds": 0.05})
    box = ToolBox([limited(tool, max_concurrency=2)], ToolLimits(timeout=0.9))
    sessions = [box.open(TASK, str(i)) for i in range(40)]
    results = [r for (r,) in await asyncio.gather(*(s.run(calls(1)) for s in sessions))]
    assert tool.most == 2
    assert {r.status for r in results} == {ToolStatus.OK}, "the last waited longer than a call may take"
    assert max(r.queued for r in results) > 0.9


async def test_past_the_queue_a_call_comes_back_at_once_and_says_why() -> None:
    tool = Counting({"seconds": 0.1})
    results = await opened(limited(tool, max_concurrency=1, max_queue=2)).run(calls(1, 2, 3, 4, 5))
    assert [r.status for r in results] == ["ok", "ok", "ok", "rejected", "rejected"]
    assert results[4].response.text == "Error: tool is busy: 2 calls are waiting already; call it again later."
    assert tool.calls == 3


async def test_a_tool_s_own_deadline_wins() -> None:
    tool = limited(Counting({"seconds": 5}), timeout=0.05)
    (result,) = await opened(tool).run(calls(1))
    assert result.response.text == "Error: tool did not answer within 0.05 seconds."


async def test_an_adaptive_tool_starts_small() -> None:
    tool = Counting({"seconds": 0.01})
    await opened(limited(tool, max_concurrency=64, adaptive_concurrency=True)).run(calls(*range(60)))
    assert 1 < tool.most < 60 and tool.calls == 60


async def test_identical_calls_are_answered_from_memory_when_asked_for() -> None:
    tool = Counting()
    session = opened(limited(tool, cache=True, cache_size=2))
    asked = [(await session.run(calls(x)))[0] for x in (1, 1, 13, 13, 2, 1, 3, 2)]
    assert [r.cached for r in asked] == [False, True, False, False, False, True, False, False]
    assert asked[1].response == asked[0].response and asked[1].seconds == 0.0
    assert asked[3].status is ToolStatus.ERROR, "a failure is tried again"
    assert tool.calls == 6, "of two answers the one used least recently is forgotten"
    plain = Counting()
    assert [r.cached for r in await opened(plain).run(calls(1, 1))] == [False, False]


async def test_the_row_is_part_of_what_makes_calls_identical() -> None:
    tool = limited(Counting(), cache=True)
    box = ToolBox([tool])
    for k in (1, 2, 1):
        row = Task(id="t", data_source="d", prompt=TASK.prompt, tools_kwargs={"tool": {"execute_kwargs": {"k": k}}})
        await box.open(row, "e").run(calls(1))
    assert tool.calls == 2  # type: ignore[attr-defined]


def test_a_tool_with_state_cannot_be_cached() -> None:
    class Stateful(Counting):
        async def release(self, instance_id: str, **kwargs: Any) -> None: ...

    with pytest.raises(ToolConfigError, match=r"tool 'tool' has state per episode .* remove limits.cache"):
        ToolBox([limited(Stateful(), cache=True)])


class Opening(Counting):
    """Takes time to be created, and records the calls of its methods."""

    def __init__(self, create_seconds: float) -> None:
        super().__init__({"seconds": 30})
        self.create_seconds = create_seconds
        self.log: list[str] = []

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        await asyncio.sleep(self.create_seconds)
        self.log.append("open")
        return str(instance_id), ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        try:
            return await super().execute(instance_id, parameters)
        except asyncio.CancelledError:
            self.log.append("cancelled")
            raise

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append("release")


async def test_what_opens_late_is_released_too() -> None:
    tool = Opening(create_seconds=0.4)
    session = opened(tool, timeout=0.3)
    (result,) = await session.run(calls(1))
    assert result.status is ToolStatus.TIMEOUT
    await session.close()
    assert tool.log == ["open", "release"] and session.trouble == {}


async def test_cancelling_reaches_an_async_tool_and_releases_it() -> None:
    tool = Opening(create_seconds=0.0)
    session = opened(tool)
    running = asyncio.create_task(session.run(calls(1, 2)))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    await session.close()
    assert tool.log == ["open", "cancelled", "cancelled", "release"]
    assert session.trouble == {"cancelled": 2}


async def test_a_thread_that_nobody_waits_for_is_counted() -> None:
    freed = threading.Event()

    @function_tool(name="tool")
    def hang(x: int) -> str:
        return str(freed.wait(20))

    session = opened(hang, timeout=0.05)
    assert [r.status for r in await session.run(calls(1, 2))] == ["timeout", "timeout"]
    running = asyncio.create_task(session.run(calls(3)))
    await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert session.trouble == {"cancelled": 1, "abandoned": 3}
    freed.set()


async def test_a_program_and_what_it_started_are_gone_with_the_call(tmp_path: Path) -> None:
    note = tmp_path / "pids"
    script = f"import os, subprocess, time; open({str(note)!r}, 'w').write(f'{{os.getpid()}} '); " + (
        f"child = subprocess.Popen(['sleep', '60']); open({str(note)!r}, 'a').write(str(child.pid)); time.sleep(60)"
    )

    @function_tool(name="tool")
    async def solve(x: int) -> str:
        return (await run_process([sys.executable, "-c", script])).text

    running = asyncio.create_task(opened(solve).run(calls(1)))
    while not note.exists() or len(note.read_text().split()) < 2:
        await asyncio.sleep(0.01)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    pids = [int(word) for word in note.read_text().split()]
    until = time.monotonic() + 100
    while any(map(_runs, pids)) and time.monotonic() < until:
        await asyncio.sleep(0.02)
    assert not any(map(_runs, pids))


def _runs(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return Path(f"/proc/{pid}/stat").read_text().split()[2] != "Z"


async def test_a_program_s_end_output_and_flood_are_told() -> None:
    echoed = await run_process(["cat"], b"h\xc3\xa9\xff")
    assert (echoed.code, echoed.text) == (0, "hé\ufffd")
    crashed = await run_process([sys.executable, "-c", "import os; print('bye', flush=True); os._exit(7)"], b"unread")
    assert (crashed.code, crashed.text) == (7, "bye\n")
    flood = await run_process([sys.executable, "-c", "print('x' * 3_000_000)"], max_output=1000)
    assert (flood.code, len(flood.output), flood.cut) == (0, 1000, 2_999_001)


@pytest.mark.parametrize(
    ("returned", "text"), [(b"caf\xe9", "caf\ufffd"), (b"ok", "ok"), ({"data": b"\xff\xfe"}, '{"data": "__4="}')]
)
async def test_bytes_that_are_no_text_are_told_all_the_same(returned: Any, text: str) -> None:
    (result,) = await opened(function_tool(name="tool")(lambda: returned)).run([ToolCall(name="tool")])
    assert (result.status, result.response.text) == ("ok", text)


async def test_a_flood_is_not_kept_in_memory() -> None:
    tool = limited(function_tool(name="tool")(lambda: "x" * 1_000_001), cache=True)
    session = opened(tool)
    assert [(await session.run([ToolCall(name="tool")]))[0].cached for _ in range(2)] == [False, False]


@pytest.mark.parametrize(
    ("limits", "words"),
    [
        ({"num_workers": 2, "max_concurrency": 2}, "limits.num_workers and limits.max_concurrency are one limit"),
        ({"min_concurrency": 2, "max_concurrency": 4}, "min_concurrency has no effect without adaptive_concurrency"),
        ({"cache_size": 8}, "cache_size has no effect without cache: true"),
    ],
)
def test_a_limit_without_effect_is_told(limits: dict[str, Any], words: str) -> None:
    with pytest.raises(ToolConfigError, match=words):
        load_tools({"tools": [{"name": "calculator", "limits": limits}]})


async def test_a_deadline_of_the_tools_own_config_is_honoured_also_above_that_of_all_tools() -> None:
    slow, patient = Counting({"seconds": 0.3}), Counting({"seconds": 0.3})
    patient.own_timeout = 5.0
    [late] = await opened(slow, timeout=0.1).run(calls(1))
    [answered] = await opened(patient, timeout=0.1).run(calls(1))
    assert (late.status, answered.status) == (ToolStatus.TIMEOUT, ToolStatus.OK)
    [limited_anyway] = await opened(limited(patient, timeout=0.1), timeout=9.0).run(calls(1))
    assert limited_anyway.status is ToolStatus.TIMEOUT


def test_what_users_write_as_default_timeout_is_that_deadline() -> None:
    service = {"retrieval_service_url": "http://127.0.0.1:9/retrieve"}
    for name, config in (("search", service), ("code_interpreter", {"isolation": "unprotected"})):
        unsaid, said = (
            load_tools({"tools": [{"name": name, "config": config | more}]})[0]
            for more in ({}, {"default_timeout": 90})
        )
        assert (unsaid.own_timeout, said.own_timeout) == (None, 90)


async def test_waiting_at_a_gate_that_tools_share_is_not_counted_against_a_deadline() -> None:
    first, second = Counting({"seconds": 0.6}, SCHEMA), Counting({"seconds": 0.6}, SCHEMA | {"name": "other"})
    first.shared_limiter = second.shared_limiter = RateLimiter(max_concurrency=1)
    session = opened(first, second, timeout=1.1)
    asked = [*calls(1, 2), ToolCall(name="other", arguments={"x": 3})]
    results = await session.run(asked)
    assert [result.status for result in results] == [ToolStatus.OK] * 3
    assert max(result.queued for result in results) > 1.1 > max(result.seconds for result in results)
