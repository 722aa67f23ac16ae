"""Every call returns in order and in time, whatever the tool does; every instance is created and released once."""

import asyncio
import sys
import threading
import time
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from pydantic import BaseModel, Field

from rally.tools import BaseTool, ToolBox, ToolConfigError, ToolLimits, ToolSession, function_tool
from rally.tools.builtin.answer_check import Gsm8kTool
from rally.tools.builtin.calculator import Calculator
from rally.types import Task, ToolCall, ToolResponse, ToolResult, ToolStatus


def task(**fields: Any) -> Task:
    return Task(id="t", data_source="test", prompt=({"role": "user", "content": "hi"},), **fields)


def session(*tools: BaseTool[Any], row: Task | None = None, **limits: Any) -> ToolSession:
    return ToolBox(tools, ToolLimits(**limits)).open(row or task(), "episode")


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


async def ask(tool: BaseTool[Any], **arguments: Any) -> ToolResult:
    return (await session(tool).run([call(tool.name, **arguments)]))[0]


def returning(value: Any) -> BaseTool[Any]:
    return function_tool(name="tool")(lambda: value)


def raising(error: BaseException) -> BaseTool[Any]:
    def fail() -> None:
        raise error

    return function_tool(name="tool")(fail)


@function_tool
def slow(seconds: float) -> str:
    time.sleep(seconds)
    return f"slept {seconds}"


async def test_calls_run_together_and_are_answered_in_order() -> None:
    together = threading.Barrier(3)

    @function_tool
    def meet(seconds: float) -> str:
        together.wait(timeout=60)  # raises unless all three calls run at once
        time.sleep(seconds)
        return f"slept {seconds}"

    results = await session(meet, timeout=120).run([call("meet", seconds=s) for s in (0.2, 0.1, 0.0)])
    assert [r.response.text for r in results] == ["slept 0.2", "slept 0.1", "slept 0.0"]


async def test_the_parallel_limit_queues_calls_without_dropping_or_charging_them() -> None:
    running, most = 0, 0

    @function_tool
    async def count() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.05)
        running -= 1
        return "ok"

    results = await session(count, max_parallel=2, timeout=1).run([call("count")] * 48)
    assert [r.status for r in results] == [ToolStatus.OK] * 48, "waiting in the queue is not the tool's time"
    assert most == 2


async def test_what_cannot_be_called_is_explained_to_the_model() -> None:
    opened = session(Calculator())
    broken = ToolCall(name="calculator", error="Expecting ',' delimiter", raw="{")
    results = await opened.run([call("search"), broken, call("calculator"), call("calculator", expression="1/0")])
    assert [r.status for r in results] == ["unknown_tool", "malformed", "bad_arguments", "error"]
    texts = [r.response.text or "" for r in results]
    assert texts[0] == "Error: there is no tool 'search'; the tools are: calculator."
    assert "Expecting ',' delimiter" in texts[1]
    assert texts[1].endswith("The arguments are: expression (string).")
    assert texts[2].startswith("Error: bad arguments for calculator: 'expression' is required but missing.")
    assert "expression (string)" in texts[2]
    assert texts[3] == "Error: division by zero"
    assert opened.counters == {"calls": 4, "unknown_tool": 1, "malformed": 1, "bad_arguments": 1, "error": 1}


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (KeyError("x"), "Error: KeyError: 'x'"),
        (RuntimeError(), "Error: RuntimeError"),
        (SystemExit(3), "Error: SystemExit: 3"),
        (StopIteration("s"), "Error: RuntimeError: coroutine raised StopIteration"),
        (asyncio.CancelledError(), "Error: CancelledError"),
    ],
)
async def test_whatever_a_tool_raises_is_a_result(error: BaseException, text: str) -> None:
    result = await ask(raising(error))
    assert (result.status, result.response.text) == (ToolStatus.ERROR, text)


async def stubborn_sleep() -> str:
    for _ in range(30):
        try:
            await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            continue
    return "late"


def blocking_sleep() -> str:
    time.sleep(30)
    return "late"


@pytest.mark.parametrize("function", [stubborn_sleep, blocking_sleep, lambda: asyncio.sleep(30)])
async def test_the_deadline_answers_on_time(function: Callable[[], str | Awaitable[str]]) -> None:
    opened = session(function_tool(name="tool")(function), timeout=0.1)
    started = time.perf_counter()
    (result,) = await opened.run([call("tool")])
    assert time.perf_counter() - started < 20, "the tool itself takes 30 s"
    assert (result.status, result.response.text) == ("timeout", "Error: tool did not answer within 0.1 seconds.")


async def test_hung_tools_do_not_starve_others() -> None:
    @function_tool
    def hang() -> str:
        time.sleep(60)
        return "late"

    opened = session(hang, slow, timeout=2)
    results = await opened.run([*[call("hang")] * 60, call("slow", seconds=0.01)])
    assert [r.status for r in results] == [ToolStatus.TIMEOUT] * 60 + [ToolStatus.OK]


async def test_plain_tools_leave_the_event_loop_free() -> None:
    beats = 0

    async def beat() -> None:
        nonlocal beats
        while True:
            await asyncio.sleep(0.01)
            beats += 1

    heart = asyncio.create_task(beat())
    await ask(slow, seconds=0.3)
    heart.cancel()
    assert beats > 5


async def test_cancelling_a_run_is_the_only_way_out() -> None:
    opened = session(slow)
    running = asyncio.create_task(opened.run([call("slow", seconds=0.5)]))
    await asyncio.sleep(0.05)
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert await opened.close() == {}


@pytest.mark.parametrize(
    ("returned", "status", "text", "reward", "metrics"),
    [
        ("plain", "ok", "plain", None, {}),
        (ToolResponse(text="t"), "ok", "t", None, {}),
        (("t",), "ok", "t", None, {}),
        (("t", 0.5), "ok", "t", 0.5, {}),
        (("t", None, {"n": 1}), "ok", "t", None, {"n": 1}),
        (
            {"résultat": 3, "success": True, "error": None},
            "ok",
            '{"résultat": 3, "success": true, "error": null}',
            None,
            {},
        ),
        ({"success": False}, "error", '{"success": false}', None, {}),
        (({"error": "no"}, -1), "error", '{"error": "no"}', -1.0, {}),
        ([1, {2}], "ok", "[1, [2]]", None, {}),
        (12, "ok", "12", None, {}),
        ("bad \ud800 half", "ok", "bad ? half", None, {}),
        (("t", float("nan")), "error", "Error: the tool returned the reward nan; it must be a finite number", None, {}),
        (
            ("t", 10**5000),
            "error",
            "Error: the tool returned the reward a value of type int; it must be a finite number",
            None,
            {},
        ),
        (("t", 0.0, [1]), "error", "Error: the tool returned metrics of type list; they must be a dict", None, {}),
    ],
)
async def test_what_a_tool_may_return(returned: Any, status: str, text: str, reward: float, metrics: dict) -> None:
    result = await ask(returning(returned))
    assert (result.status, result.response.text, result.reward, result.metrics) == (status, text, reward, metrics)


async def test_images_pass_through() -> None:
    result = await ask(returning(ToolResponse(image=["picture"])))
    assert (result.response.image, result.response.text, result.ok) == (["picture"], None, True)


@pytest.mark.parametrize(
    ("side", "text"),
    [("left", "[6 characters cut]ghij"), ("right", "abcd[6 characters cut]"), ("middle", "ab[6 characters cut]ij")],
)
async def test_long_responses_are_cut_where_asked_and_say_so(side: str, text: str) -> None:
    opened = session(returning("abcdefghij"), max_response_chars=4, truncate_side=side)
    (result,) = await opened.run([call("tool")])
    assert (result.response.text, result.truncated) == (text, True)
    assert opened.counters["truncated"] == 1


async def test_responses_of_exactly_the_limit_are_left_alone() -> None:
    (result,) = await session(returning("abcd"), max_response_chars=4).run([call("tool")])
    assert (result.response.text, result.truncated) == ("abcd", False)


class Recorder(BaseTool[Any]):
    """Records all calls of its methods."""

    def __init__(self, **options: Any) -> None:
        super().__init__(tool_schema={"name": "recorder", "parameters": {"type": "object", "properties": {}}})
        self.log: list[tuple[Any, ...]] = []
        self.options = options

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        self.log.append(("create", instance_id, kwargs))
        await asyncio.sleep(self.options.get("create_seconds", 0))
        if len(self.log) <= self.options.get("create_failures", 0):
            raise OSError("no room")
        return f"mine-{len(self.log)}", ToolResponse()

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        self.log.append(("execute", instance_id, kwargs))
        return "ok"

    async def calc_reward(self, instance_id: str, **kwargs: Any) -> float:
        self.log.append(("calc_reward", instance_id, kwargs))
        await asyncio.sleep(self.options.get("reward_seconds", 0))
        if self.options.get("reward_fails"):
            raise OSError("lost")
        return 0.75

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.log.append(("release", instance_id, kwargs))
        if self.options.get("release_fails"):
            sys.exit(1)


async def test_one_instance_lives_for_the_episode_and_gets_the_rows_keywords() -> None:
    given = {
        "create_kwargs": {"ground_truth": "42", "unused": None},
        "execute_kwargs": {"k": 3},
        "calc_reward_kwargs": {"scale": 2},
        "release_kwargs": None,
    }
    tool = Recorder(create_seconds=0.02)
    opened = session(tool, row=task(tools_kwargs={"recorder": given, "other": None}))
    await opened.run([call("recorder"), call("recorder")])
    await opened.run([call("recorder")])
    assert await opened.close() == {"recorder": 0.75}
    assert await opened.close() == {}
    created = ("create", "episode/recorder", {"ground_truth": "42", "create_kwargs": {"ground_truth": "42"}})
    executed = ("execute", "mine-1", {"k": 3})
    ended = [("calc_reward", "mine-1", {"scale": 2}), ("release", "mine-1", {})]
    assert tool.log == [created, executed, executed, executed, *ended]


async def test_a_tool_that_is_not_called_is_not_opened() -> None:
    tool = Recorder()
    opened = session(tool, Calculator())
    await opened.run([call("calculator", expression="1+1")])
    assert await opened.close() == {}
    assert tool.log == []


async def test_a_failed_create_is_an_error_and_is_tried_again() -> None:
    tool = Recorder(create_failures=1)
    opened = session(tool)
    (first,) = await opened.run([call("recorder")])
    (second,) = await opened.run([call("recorder")])
    assert (first.status, first.response.text, second.status) == ("unavailable", "Error: OSError: no room", "ok")
    assert await opened.close() == {"recorder": 0.75}


async def test_a_create_that_hangs_is_a_timeout_and_is_given_up_at_the_end() -> None:
    tool = Recorder(create_seconds=5)
    opened = session(tool, timeout=0.05)
    results = await opened.run([call("recorder"), call("recorder")])
    assert [r.status for r in results] == ["timeout", "timeout"]
    assert await opened.close() == {}
    assert [step for step, *_ in tool.log] == ["create"]
    assert opened.counters["abandoned"] == 1


@pytest.mark.parametrize(
    ("options", "rewards", "counted"),
    [
        ({"reward_fails": True}, {}, "calc_reward_errors"),
        ({"reward_seconds": 5}, {}, "calc_reward_errors"),
        ({"release_fails": True}, {"recorder": 0.75}, "release_errors"),
    ],
)
async def test_closing_always_releases_and_counts_what_failed(options: Any, rewards: Any, counted: str) -> None:
    tool = Recorder(**options)
    opened = session(tool, timeout=0.1)
    await opened.run([call("recorder")])
    assert await opened.close() == rewards
    assert tool.log[-1][0] == "release"
    assert opened.counters[counted] == 1


async def test_a_cancelled_close_still_releases() -> None:
    tool = Recorder(reward_seconds=5)
    opened = session(tool)
    await opened.run([call("recorder")])
    closing = asyncio.create_task(opened.close())
    await asyncio.sleep(0.02)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert tool.log[-1][0] == "release"


class Narrow(BaseTool[Any]):
    async def create(self, instance_id: str, precision: int = 2) -> str:  # type: ignore[override]
        self.precision = precision
        return instance_id

    def execute(self, instance_id: str, parameters: dict[str, Any]) -> str:  # type: ignore[override]
        return f"{parameters['x']:.{self.precision}f}"


class Whole(Narrow):
    async def create(self, create_kwargs: dict[str, Any]) -> None:  # type: ignore[override]
        self.precision = create_kwargs["precision"]


@pytest.mark.parametrize("kind", [Narrow, Whole])
async def test_create_kwargs_arrive_the_way_the_signature_takes_them(kind: type[BaseTool[Any]]) -> None:
    schema = {"name": "tool", "parameters": {"properties": {"x": {"type": "number"}}}}
    tool = kind(None, schema)
    row = task(tools_kwargs={"tool": {"create_kwargs": {"precision": 4}}})
    (result,) = await session(tool, row=row).run([call("tool", x=1)])
    assert result.response.text == "1.0000"


async def test_a_keyword_nobody_takes_is_not_lost_in_silence() -> None:
    row = task(tools_kwargs={"tool": {"create_kwargs": {"precison": 4}}})
    tool = Narrow(None, {"name": "tool"})
    (result,) = await session(tool, row=row).run([call("tool", x=1)])
    assert (
        result.response.text == "Error: create of tool 'tool' takes no 'precison'; remove it from the row or the config"
    )


class LookupArgs(BaseModel):
    query: str = Field(..., description="what to look for", min_length=2)


class Lookup(BaseTool[LookupArgs]):
    name = "kb_lookup"
    description = "Looks things up."
    args_schema = LookupArgs

    async def create(self, *args: Any, **kwargs: Any) -> tuple[str, ToolResponse]:
        return "inst-0", ToolResponse(text="ready")

    async def execute(self, args: LookupArgs, **kwargs: Any) -> tuple[dict[str, Any], float, dict[str, Any]]:  # type: ignore[override]
        return {"summary": args.query.upper()}, 0.0, {}


async def test_a_tool_with_a_pydantic_schema_gets_its_arguments_as_one_object() -> None:
    tool = Lookup()
    assert tool.parameters["properties"]["query"]["description"] == "what to look for"
    good, bad = await session(tool).run([call("kb_lookup", query="cache"), call("kb_lookup", query="c")])
    assert (good.response.text, good.reward) == ('{"summary": "CACHE"}', 0.0)
    assert bad.status == "bad_arguments"
    assert "'query': String should have at least 2 characters" in (bad.response.text or "")


async def test_the_reward_tool_remembers_across_turns() -> None:
    row = task(tools_kwargs={"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": "42"}}})
    tool = Gsm8kTool()
    opened = session(tool, row=row)
    answers = ["41", "#### 42", 42, "no idea"]
    results = [(await opened.run([call("calc_gsm8k_reward", answer=a)]))[0] for a in answers]
    assert [r.reward for r in results] == [-0.05, 0.0, -0.05, -0.05]
    assert [r.metrics["correct"] for r in results] == [False, True, True, False], "what stop_on_correct looks at"
    assert results[1].response.text == "Current parsed answer='42' reward=1.0"
    assert results[3].response.text == "Current parsed answer=None reward=0.0"
    assert await opened.close() == {"calc_gsm8k_reward": 1.0}
    (late,) = await session(tool).run([call("calc_gsm8k_reward", answer="42")])
    assert "create_kwargs.ground_truth" in (late.response.text or ""), "another episode starts from nothing"


async def test_a_task_may_narrow_its_tools() -> None:
    box = ToolBox([Calculator(), slow])
    assert box.names == ["calculator", "slow"]
    assert [s["function"]["name"] for s in box.schemas(["slow"])] == ["slow"]
    opened = box.open(task(extra_info={"tool_selection": ["slow"]}), "e")
    (result,) = await opened.run([call("calculator", expression="1")])
    assert result.response.text == "Error: there is no tool 'calculator'; the tools are: slow."
    with pytest.raises(ToolConfigError, match="there is no tool 'search'; the tools are calculator, slow"):
        box.schemas(["search"])


def test_shown_schemas_are_copies() -> None:
    box = ToolBox([Calculator()])
    box.schemas()[0]["function"].clear()
    assert box.schemas()[0]["function"]["name"] == "calculator"


def test_boxes_and_limits_are_checked_at_the_door() -> None:
    with pytest.raises(ToolConfigError, match="same name"):
        ToolBox([Calculator(), Calculator()])
    for wrong in ({"timeout": 0}, {"max_parallel": -1}, {"max_response_chars": 0}, {"truncate_side": "top"}):
        with pytest.raises(ToolConfigError, match=next(iter(wrong))):
            ToolLimits(**wrong)


async def test_no_tools_at_all() -> None:
    results = await session().run([call("x"), ToolCall(name="", error="not JSON")])
    assert [r.response.text for r in results] == [
        "Error: there is no tool 'x'; there are no tools here.",
        "Error: not JSON.",
    ]
    assert await session().run([]) == []
