"""A user's tool may crash, hang, block, leak or raise anything: its calls fail with a sentence and the run goes on."""

import asyncio
import os
import signal
import textwrap
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from rally.tools import BaseTool, ToolBox, ToolConfigError, ToolLimits, function_tool, load_tools
from rally.tools import process_tool as module
from rally.tools.loader import load_function_tools
from rally.types import Task, ToolCall, ToolResult, ToolStatus

TASK = Task(id="t", data_source="d", prompt=({"role": "user", "content": "hi"},))
FUNCTIONS = """
import asyncio, ctypes, os, signal, subprocess, sys, time
from rally.tools import function_tool

@function_tool
def fault(kind: str) -> str:
    '''Fails in a way of its own.'''
    if kind == "exit": os._exit(9)
    if kind == "segfault": ctypes.string_at(0)
    if kind == "abort": os.abort()
    if kind == "kill": os.kill(os.getpid(), signal.SIGKILL)
    if kind == "group": os.killpg(0, signal.SIGKILL)
    if kind == "sys.exit": sys.exit(3)
    if kind == "interrupt": raise KeyboardInterrupt
    if kind == "generator": raise GeneratorExit
    if kind == "cancelled": raise asyncio.CancelledError
    if kind == "unreadable": raise type("Odd", (Exception,), {"__str__": lambda self: 1 / 0})
    if kind == "hang": time.sleep(1000)
    if kind == "recurse":
        sys.setrecursionlimit(10**9)
        def down(): down()
        down()
    if kind == "leak":
        keep = []
        while True: keep.append(bytearray(os.urandom(1)) * (20 << 20)); time.sleep(0.01)
    return f"fine {kind} {os.getpid()}"

@function_tool
def report(kind: str) -> str:
    '''Returns odd metrics.'''
    loop, deep = {}, []
    loop["again"] = loop
    for _ in range(100_000): deep = [deep]
    odd = type("Odd", (), {"__str__": lambda self: 1 / 0, "__repr__": lambda self: 1 / 0})()
    metrics = {"loop": loop, "deep": deep, "odd": odd, "digits": 10**5000, "surrogate": {"\\udc00": ["a\\ud800"]}}
    if kind == "raise": raise ValueError("a\\ud800b")
    return "fine", 0.0, {"it": metrics[kind]}

@function_tool
def intrude() -> str:
    '''Writes to whatever file is open.'''
    for number in range(3, 20):
        try: os.write(number, b'{"tools": []}\\n')
        except OSError: pass
    return "done"

@function_tool
async def block(seconds: float) -> str:
    '''Blocks its event loop.'''
    time.sleep(seconds)
    return "awake"

@function_tool
async def stubborn() -> str:
    '''Ignores its cancellation.'''
    for _ in range(1000):
        try: await asyncio.sleep(1)
        except asyncio.CancelledError: pass
    return ""

@function_tool
async def wait(seconds: float) -> str:
    '''Waits as a tool should.'''
    await asyncio.sleep(seconds)
    return f"waited {os.getpid()}"
"""
COUNTER = """
import os, time
from rally.tools import BaseTool

class Counter(BaseTool):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)
        self.counts = {}
    async def create(self, instance_id=None, start=0, **kwargs):
        self.counts[instance_id] = start
        return instance_id, None
    async def execute(self, instance_id, parameters, **kwargs):
        if parameters.get("fatal"): os._exit(4)
        self.counts[instance_id] += 1
        return f"{self.counts[instance_id]}", 0.5, {"pid": os.getpid()}
    async def calc_reward(self, instance_id, **kwargs):
        return float(self.counts[instance_id])
    async def release(self, instance_id, **kwargs):
        del self.counts[instance_id]
"""
SCHEMA = {
    "name": "counter",
    "description": "Counts.",
    "parameters": {"type": "object", "properties": {"fatal": {"type": "boolean"}}},
}


@pytest.fixture
def boxes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ToolBox]]:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / f"counting_{tmp_path.name}.py").write_text(COUNTER)
    opened: list[ToolBox] = []
    yield opened
    for box in opened:
        box.close()


def functions(boxes: list[ToolBox], timeout: float = 60.0) -> ToolBox:
    boxes.append(ToolBox(load_function_tools("functions.py", processes=True), ToolLimits(timeout=timeout)))
    return boxes[-1]


async def ask(box: ToolBox, tool: str, **arguments: Any) -> ToolResult:
    session = box.open(TASK, "e")
    (result,) = await session.run([ToolCall(name=tool, arguments=arguments)])
    await session.close()
    return result


@pytest.mark.drill(
    "reliability", "A tool calls os._exit or crashes", "Its call is an error, and its process is restarted"
)
async def test_a_tool_that_ends_its_process_costs_one_call(boxes: list[ToolBox]) -> None:
    box = functions(boxes)
    expected = {
        "exit": "Error: the process of the tool ended with exit code 9",
        "segfault": "Error: the process of the tool was killed by SIGSEGV",
        "abort": "Error: the process of the tool was killed by SIGABRT",
        "kill": "Error: the process of the tool was killed by SIGKILL",
        "group": "Error: the process of the tool was killed by SIGKILL",
    }
    for kind, words in expected.items():
        result = await ask(box, "fault", kind=kind)
        assert (result.status, result.response.text) == (ToolStatus.ERROR, words), kind
        assert ((await ask(box, "fault", kind="none")).response.text or "").startswith("fine none")


RAISED = {
    "sys.exit": "Error: SystemExit: 3",
    "interrupt": "Error: KeyboardInterrupt",
    "generator": "Error: GeneratorExit",
    "cancelled": "Error: CancelledError",
    "unreadable": "Error: Odd, whose text cannot be read (ZeroDivisionError)",
}


@pytest.mark.drill(
    "reliability", "A tool raises KeyboardInterrupt, SystemExit or GeneratorExit", "Its call is an error"
)
@pytest.mark.parametrize("processes", [True, False], ids=["process", "in process"])
async def test_whatever_a_tool_raises_is_the_error_of_its_call(boxes: list[ToolBox], processes: bool) -> None:
    box = ToolBox(load_function_tools("functions.py", processes=processes))
    boxes.append(box)
    before = (await ask(box, "fault", kind="none")).response.text
    for kind, words in RAISED.items():
        result = await ask(box, "fault", kind=kind)
        assert (result.status, result.response.text) == (ToolStatus.ERROR, words), kind
    assert (await ask(box, "fault", kind="none")).response.text == before, "the same process"


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, GeneratorExit, BaseException, asyncio.CancelledError])
@pytest.mark.parametrize("method", ["create", "execute", "calc_reward", "release"])
async def test_an_async_method_in_the_run_may_raise_anything(error: type[BaseException], method: str) -> None:
    async def fail(self: Any, *args: Any, **kwargs: Any) -> Any:
        raise error

    async def answer(self: Any, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        return "fine"

    kind = type("Failing", (BaseTool,), {"execute": answer} | {method: fail})
    session = ToolBox([kind({}, SCHEMA)]).open(TASK, "e")
    (result,) = await session.run([ToolCall(name="counter", arguments={})])
    assert result.ok is (method in ("calc_reward", "release"))
    await session.close()


def test_an_interrupt_from_the_keyboard_still_ends_the_run() -> None:
    @function_tool
    async def press() -> str:
        """Presses Ctrl-C."""
        os.kill(os.getpid(), signal.SIGINT)
        await asyncio.sleep(30)
        return ""

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(ask(ToolBox([press]), "press"))


@pytest.mark.drill(
    "reliability", "A tool returns a value that cannot be sent to the run", "Its call is an error at once, no other is"
)
async def test_a_return_value_that_cannot_be_sent_costs_no_other_call(boxes: list[ToolBox]) -> None:
    box = functions(boxes)
    other = asyncio.create_task(ask(box, "wait", seconds=1.5))
    for kind in ("loop", "deep", "odd", "digits"):
        result = await ask(box, "report", kind=kind)
        assert (result.status, result.outage) == (ToolStatus.ERROR, False), kind
        assert "Error: it returned a value that cannot be sent to the run (" in (result.response.text or "")
    surrogate = await ask(box, "report", kind="surrogate")
    assert (surrogate.ok, surrogate.metrics) == (True, {"it": {"?": ["a?"]}})
    assert (await ask(box, "report", kind="raise")).response.text == "Error: ValueError: a?b"
    assert (await other).ok, "its process was not killed"


async def test_a_tool_that_writes_into_the_protocol_costs_its_process(boxes: list[ToolBox]) -> None:
    box = functions(boxes)
    result = await ask(box, "intrude")
    assert result.response.text == "Error: the process of the tool wrote an answer that cannot be read"
    assert (await ask(box, "wait", seconds=0)).ok


@pytest.mark.drill("reliability", "A tool blocks its event loop for ever", "Its process is killed at the deadline")
async def test_a_tool_that_blocks_or_ignores_its_deadline_is_killed(
    boxes: list[ToolBox], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "RETIRED_SECONDS", 2.0)
    monkeypatch.setattr(module, "ACKNOWLEDGE_SECONDS", 1.5)
    box = functions(boxes, timeout=1.0)
    long = functions(boxes, timeout=60.0)
    for tool, arguments in (("block", {"seconds": 1000}), ("fault", {"kind": "hang"}), ("stubborn", {})):
        first = box.tools[0]._host._current  # type: ignore[attr-defined]
        result = await ask(box, tool, **arguments)
        assert result.status is ToolStatus.TIMEOUT, (tool, result)
        deadline = time.monotonic() + 60
        while not first.ended:
            assert time.monotonic() < deadline, tool
            await asyncio.sleep(0.05)
        assert ((await ask(long, "wait", seconds=0)).response.text or "").startswith("waited")
    again = await ask(functions(boxes), "wait", seconds=0.01)
    assert again.ok


async def test_a_call_that_only_is_late_disturbs_no_other(boxes: list[ToolBox]) -> None:
    box = functions(boxes, timeout=2.0)
    first = (await ask(box, "wait", seconds=0)).response.text
    slow, late = await asyncio.gather(ask(box, "wait", seconds=1.0), ask(box, "wait", seconds=50))
    assert (slow.ok, late.status) == (True, ToolStatus.TIMEOUT)
    await asyncio.sleep(module.WATCH_SECONDS * 3)
    assert (await ask(box, "wait", seconds=0)).response.text == first, "an async call that ends costs no process"


@pytest.mark.drill("reliability", "A tool leaks memory", "Its process is killed at its limit, and the run goes on")
async def test_a_tool_that_leaks_is_killed_at_its_limit(boxes: list[ToolBox]) -> None:
    entry = {"class_name": "functions.fault", "process": {"memory_mb": 400}}
    box = ToolBox(load_tools({"tools": [entry]}, processes=True), ToolLimits(timeout=60.0))
    boxes.append(box)
    result = await ask(box, "fault", kind="leak")
    assert result.status is ToolStatus.ERROR
    assert result.response.text == (
        "Error: the process of the tool was killed because it used more than 400 MB of memory"
    )
    assert (await ask(box, "fault", kind="none")).ok


async def test_the_state_of_an_episode_lives_in_one_process(boxes: list[ToolBox], tmp_path: Path) -> None:
    entry = {"class_name": f"counting_{tmp_path.name}.Counter", "tool_schema": SCHEMA}
    box = ToolBox(load_tools({"tools": [entry]}, processes=True))
    boxes.append(box)
    task = Task(
        id="t",
        data_source="d",
        prompt=({"role": "user", "content": "hi"},),
        tools_kwargs={"counter": {"create_kwargs": {"start": 10}}},
    )
    one, two = box.open(task, "one"), box.open(TASK, "two")
    call, fatal = ToolCall(name="counter", arguments={}), ToolCall(name="counter", arguments={"fatal": True})
    (first,) = await one.run([call])
    assert (first.response.text, first.reward) == ("11", 0.5) and first.metrics["pid"] != os.getpid()
    assert [(await two.run([call]))[0].response.text for _ in range(3)] == ["1", "2", "3"]
    assert await two.close() == {"counter": 3.0}
    assert (await one.run([call]))[0].response.text == "12"
    (died,) = await one.run([fatal])
    assert died.response.text == "Error: the process of the tool ended with exit code 4"
    (told,) = await one.run([call])
    assert told.status is ToolStatus.ERROR and "with it the state of earlier calls; it was created anew" in str(told)
    assert (await one.run([call]))[0].response.text == "11"
    assert await one.close() == {"counter": 11.0}


def test_a_module_that_ends_its_process_is_one_sentence(boxes: list[ToolBox], tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("import os\nos._exit(7)")
    with pytest.raises(ToolConfigError, match=r"broken\.py: the process of the tool ended with exit code 7, while"):
        load_function_tools("broken.py", processes=True)
    (tmp_path / "wrong.py").write_text("import nonsense_that_is_missing")
    with pytest.raises(ToolConfigError, match=r"wrong\.py cannot be imported"):
        load_function_tools("wrong.py", processes=True)
    with pytest.raises(ToolConfigError, match="process must be true, false or"):
        load_tools({"tools": [{"class_name": "functions.fault", "process": "maybe"}]}, processes=True)


def test_tools_may_stay_in_the_run(boxes: list[ToolBox], tmp_path: Path) -> None:
    (tmp_path / "mixed.py").write_text(
        textwrap.dedent("""
        import os
        from rally.tools import function_tool

        @function_tool(process=False)
        def near() -> str:
            '''In the run.'''
            return str(os.getpid())

        @function_tool
        def far() -> str:
            '''In its own process.'''
            return str(os.getpid())
        """)
    )
    box = ToolBox(load_function_tools("mixed.py", processes=True))
    boxes.append(box)
    assert box.names == ["near", "far"]
    assert asyncio.run(ask(box, "near")).response.text == str(os.getpid())
    assert asyncio.run(ask(box, "far")).response.text != str(os.getpid())
    entry = {"class_name": "functions.fault", "process": False}
    for tool in load_tools({"tools": [entry, {"name": "calculator"}]}, processes=True):
        assert not isinstance(tool, module.ProcessTool)


def test_a_tool_with_a_shared_limiter_stays_in_the_run(boxes: list[ToolBox], tmp_path: Path) -> None:
    (tmp_path / f"sharing_{tmp_path.name}.py").write_text(
        f"from counting_{tmp_path.name} import Counter\n"
        "from rally.util.rate_limit import RateLimiter\n"
        "class Sharing(Counter):\n"
        "    shared_limiter = RateLimiter(max_concurrency=1)\n"
    )
    entry = {"class_name": f"sharing_{tmp_path.name}.Sharing", "tool_schema": SCHEMA}
    (tool,) = load_tools({"tools": [entry]}, processes=True)
    assert not isinstance(tool, module.ProcessTool) and tool.shared_limiter is not None


def test_nothing_is_left_when_the_tools_are_closed(boxes: list[ToolBox]) -> None:
    box = functions(boxes)
    text = asyncio.run(ask(box, "wait", seconds=0)).response.text or ""
    pid = int(text.split()[1])
    box.close()
    wait_until_gone(pid)


def wait_until_gone(pid: int) -> None:
    deadline = time.monotonic() + 120
    while Path(f"/proc/{pid}").exists():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_a_process_that_starts_while_the_tools_are_closed_ends_too(
    boxes: list[ToolBox], monkeypatch: pytest.MonkeyPatch
) -> None:
    box = functions(boxes)
    host: module.ToolHost = box.tools[0]._host  # type: ignore[attr-defined]
    real, started, closed = module._Process, threading.Event(), threading.Event()
    made: list[module._Process] = []

    def start_slowly(*args: Any) -> module._Process:
        made.append(real(*args))
        started.set()
        assert closed.wait(60)
        return made[0]

    host._current.retire()
    monkeypatch.setattr(module, "_Process", start_slowly)
    with ThreadPoolExecutor() as threads:
        starting = threads.submit(host._living)
        assert started.wait(120)
        box.close()
        closed.set()
        starting.result()
    wait_until_gone(made[0]._process.pid)
