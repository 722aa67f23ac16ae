"""A tool that is down is not the policy's fault, and what the policy causes is not an outage."""

from __future__ import annotations

import asyncio
import errno
import socket
import subprocess
import urllib.error
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from search_cases import free_port

from rally.sandbox import SandboxError, UnsupportedProgram
from rally.tools import BaseTool, ToolBox, ToolConfigError, ToolLimits, ToolUnavailable, function_tool, load_tools
from rally.tools.builtin.code_interpreter import CodeInterpreter
from rally.tools.builtin.search import SearchTool
from rally.tools.invoke import is_outage
from rally.types import Task, ToolCall, ToolResult, ToolStatus

TASK = Task(id="t", data_source="test", prompt=({"role": "user", "content": "?"},))
REQUEST = httpx.Request("GET", "http://x")


def status(code: int) -> httpx.HTTPStatusError:
    return httpx.HTTPStatusError(f"HTTP {code}", request=REQUEST, response=httpx.Response(code, request=REQUEST))


def caused(outer: Exception, inner: Exception, explicit: bool) -> Exception:
    try:
        try:
            raise inner
        except Exception as seen:
            if explicit:
                raise outer from seen
            raise outer  # noqa: B904 - as users write it
    except Exception as error:  # noqa: BLE001
        return error


OUTAGES = [
    ConnectionRefusedError(),
    ConnectionResetError(),
    TimeoutError(),
    socket.gaierror(-2, "unknown"),
    OSError(errno.ENOSPC, "full"),
    OSError(errno.EHOSTUNREACH, "away"),
    httpx.ConnectError("refused"),
    httpx.ReadTimeout("late"),
    httpx.RemoteProtocolError("cut"),
    status(500),
    status(503),
    status(429),
    status(401),
    urllib.error.URLError("refused"),
    urllib.error.HTTPError("http://x", 502, "bad gateway", None, None),  # type: ignore[arg-type]
    openai.APIConnectionError(request=REQUEST),
    openai.InternalServerError("down", response=httpx.Response(500, request=REQUEST), body=None),
    ToolUnavailable("the pool is empty"),
    SandboxError("it did not start"),
    caused(RuntimeError("no answer"), ConnectionRefusedError(), explicit=True),
    caused(RuntimeError("no answer"), httpx.ConnectError("x"), explicit=False),
]
FAULTS = [
    ValueError("no such city"),
    KeyError("x"),
    ZeroDivisionError(),
    FileNotFoundError(errno.ENOENT, "no such file"),
    PermissionError(errno.EACCES, "no"),
    subprocess.TimeoutExpired("python", 5),
    status(404),
    status(400),
    urllib.error.HTTPError("http://x", 404, "not found", None, None),  # type: ignore[arg-type]
    UnsupportedProgram("no such language"),
    caused(ValueError("no such city"), KeyError("x"), explicit=False),
    caused(ToolConfigError("x"), ValueError("y"), explicit=True),
]


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: repr(error)[:40])
def test_errors_of_the_infrastructure_are_outages(error: Exception) -> None:
    assert is_outage(error)


@pytest.mark.parametrize("error", FAULTS, ids=lambda error: repr(error)[:40])
def test_errors_that_arguments_cause_are_not(error: Exception) -> None:
    assert not is_outage(error)


class Odd(BaseTool[Any]):
    """Raises or waits as its config says."""

    def __init__(self, error: Exception | None = None, seconds: float = 0.0, at: str = "execute") -> None:
        super().__init__(None, {"name": "odd", "description": "", "parameters": {"type": "object", "properties": {}}})
        self.error, self.seconds, self.at = error, seconds, at

    async def create(self, instance_id: str | None = None, **kwargs: Any) -> Any:
        await self._act("create")
        return instance_id

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> str:
        await self._act("execute")
        return "fine"

    async def _act(self, at: str) -> None:
        if at == self.at:
            await asyncio.sleep(self.seconds)
            if self.error is not None:
                raise self.error


async def ran(tool: BaseTool[Any], arguments: dict[str, Any] | None = None, box: ToolBox | None = None) -> ToolResult:
    box = box or ToolBox([tool], ToolLimits(timeout=20))
    session = box.open(TASK, "e1")
    (result,) = await session.run([ToolCall(name=tool.name, arguments=arguments or {})])
    await session.close()
    return result


@pytest.mark.drill(
    "reliability", "The server of a tool is down", "The call is an outage, which is not held against the policy"
)
async def test_a_connection_that_fails_is_unavailable_and_noted_for_the_episode() -> None:
    tool = Odd(ConnectionRefusedError("nobody listens"))
    box = ToolBox([tool])
    result = await ran(tool, box=box)
    assert (result.status, result.outage) == (ToolStatus.UNAVAILABLE, True)
    outage = box.take_outage("e1")
    assert outage is not None
    assert outage.record() == {
        "on_outage": "mask",
        "calls": {"odd": 1},
        "first": "odd: ConnectionRefusedError: nobody listens",
    }
    assert box.take_outage("e1") is None, "it is taken once"


async def test_what_a_tool_says_about_arguments_is_no_outage() -> None:
    result = await ran(Odd(ValueError("no such city")))
    assert (result.status, result.outage) == (ToolStatus.ERROR, False)


async def test_an_instance_that_cannot_be_created_is_an_outage_whatever_it_raises() -> None:
    result = await ran(Odd(ValueError("no licence"), at="create"))
    assert (result.status, result.outage) == (ToolStatus.UNAVAILABLE, True)
    assert result.response.text == "Error: ValueError: no licence"


@pytest.mark.parametrize("counts", [False, True])
async def test_a_late_call_is_an_outage_unless_arguments_decide_how_long_it_takes(counts: bool) -> None:
    for tool in (Odd(seconds=30.0), Odd(TimeoutError("the server is slow"))):
        tool.timeout_counts = counts
        result = await ran(tool, box=ToolBox([tool], ToolLimits(timeout=0.05)))
        assert result.outage is not counts


async def test_a_full_queue_is_an_outage() -> None:
    tool = Odd(seconds=0.5)
    tool.limits = tool.limits.model_copy(update={"max_concurrency": 1, "max_queue": 0})
    session = ToolBox([tool], ToolLimits(timeout=20)).open(TASK, "e1")
    results = await session.run([ToolCall(name="odd"), ToolCall(name="odd")])
    assert sorted((r.status.value, r.outage) for r in results) == [("ok", False), ("rejected", True)]


async def test_a_search_service_that_is_down_and_a_query_that_it_refuses() -> None:
    url = f"http://127.0.0.1:{free_port()}/retrieve"
    down = await ran(SearchTool({"retrieval_service_url": url, "default_timeout": 0.3}), {"query": "x"})
    assert (down.status, down.outage) == (ToolStatus.UNAVAILABLE, True)
    empty = await ran(SearchTool({"retrieval_service_url": url}), {"query": " "})
    assert (empty.status, empty.outage) == (ToolStatus.BAD_ARGUMENTS, False)


async def test_a_program_that_loops_is_the_policys_and_a_sandbox_that_is_away_is_not() -> None:
    loops = CodeInterpreter({"default_timeout": 0.5, "isolation": "auto"})
    result = await ran(loops, {"code": "while True: pass"})
    assert (result.status, result.outage) == (ToolStatus.OK, False)
    assert "was stopped" in (result.response.text or "")
    away = CodeInterpreter({"sandbox_fusion_url": f"http://127.0.0.1:{free_port()}"})
    result = await ran(away, {"code": "print(1)"})
    assert (result.status, result.outage) == (ToolStatus.UNAVAILABLE, True)


def test_the_strongest_policy_of_an_episodes_tools_applies() -> None:
    @function_tool
    async def other() -> str:
        """Fails."""
        raise ConnectionError

    async def outages(*policies: str | None) -> str:
        tools: list[Any] = [Odd(ConnectionError()), other]
        for tool, policy in zip(tools, policies, strict=True):
            tool.on_outage = policy
        box = ToolBox(tools, on_outage="mask")
        session = box.open(TASK, "e1")
        await session.run([ToolCall(name="odd"), ToolCall(name="other"), ToolCall(name="odd")])
        outage = box.take_outage("e1")
        assert outage is not None and outage.calls == {"odd": 2, "other": 1}
        return outage.on_outage

    assert asyncio.run(outages("count", "count")) == "count"
    assert asyncio.run(outages("count", None)) == "mask"
    assert asyncio.run(outages("drop_group", None)) == "drop_group"


def test_the_keys_of_an_entry(tmp_path: Path) -> None:
    (tool,) = load_tools({"tools": [{"name": "calculator", "on_outage": "drop_group", "timeout_counts": True}]})
    assert (tool.on_outage, tool.timeout_counts) == ("drop_group", True)
    for entry, sentence in (
        ({"on_outage": "zero"}, "on_outage must be one of mask, drop_group, count, not 'zero'"),
        ({"timeout_counts": "no"}, "timeout_counts must be true or false, not 'no'"),
    ):
        with pytest.raises(ToolConfigError, match=sentence):
            load_tools({"tools": [{"name": "calculator", **entry}]})


HINTED = [
    ToolCall(name="odd", error="Failed to decode tool call: a string is not closed. Write it as {...}", raw="{"),
    ToolCall(name="serach"),
    ToolCall(name="x" * 5000),
    ToolCall(name="picky", arguments={"n": "many"}),
    ToolCall(name="picky", arguments={"k" * 5000: 1}),
    ToolCall(name="broken", error="e" * 5000),
]


@pytest.mark.drill(
    "reliability",
    "The limit of tool responses is shorter than the hint about a malformed call",
    "The hint is short, and it is not cut",
)
@pytest.mark.parametrize("limit", [1, 16, 256])
async def test_hints_are_not_cut_by_the_limit_of_tool_responses(limit: int) -> None:
    @function_tool
    async def picky(n: int) -> str:
        """Counts."""
        return "a long answer of the tool" * n

    limits = ToolLimits(max_response_chars=limit, timeout=20)
    session = ToolBox([Odd(seconds=30.0), picky], limits).open(TASK, "e1")
    for call in HINTED:
        (result,) = await session.run([call])
        text = result.response.text or ""
        assert not result.truncated and "characters cut" not in text and result.is_hint
        assert text.startswith("Error: ") and len(text) < 480
    (first,) = await session.run(HINTED[:1])
    assert first.response.text == (
        "Error: Failed to decode tool call: a string is not closed. Write it as {...}. It takes no arguments."
    )
    (answer,) = await session.run([ToolCall(name="picky", arguments={"n": 40})])
    assert answer.truncated and not answer.is_hint
    late = ToolBox([Odd(seconds=30.0)], ToolLimits(max_response_chars=limit, timeout=0.05)).open(TASK, "e2")
    (timeout,) = await late.run([ToolCall(name="odd")])
    assert timeout.response.text == "Error: odd did not answer within 0.05 seconds."


def test_an_unknown_value_in_the_class_of_a_tool_is_a_sentence() -> None:
    kind = type("Odd", (BaseTool,), {"on_outage": "ignore"})
    tool = kind({}, {"name": "odd", "description": "Odd.", "parameters": {"type": "object", "properties": {}}})
    with pytest.raises(ToolConfigError, match="on_outage of tool 'odd' must be one of mask, drop_group, count, not"):
        ToolBox([tool])
