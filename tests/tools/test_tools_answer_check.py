"""A tool that only computes and holds no resources runs in place; any other has its task and deadline."""

import asyncio
from typing import Any

import pytest

from rally.tools import BaseTool, ToolBox, ToolLimits, ToolSession
from rally.tools.builtin.calculator import Calculator
from rally.types import Task, ToolCall, ToolResponse, ToolResult


def session(tool: BaseTool[Any], **limits: Any) -> ToolSession:
    row = Task(id="t", data_source="test", prompt=({"role": "user", "content": "hi"},))
    return ToolBox([tool], ToolLimits(**limits)).open(row, "episode")


def call(name: str, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments)


def answered_in_place(opened: ToolSession, asked: ToolCall) -> ToolResult:
    """The result of a session that never suspends: there is no event loop here."""
    running = opened.run([asked])
    with pytest.raises(StopIteration) as ended:
        running.send(None)
    results: list[ToolResult] = ended.value.value
    return results[0]


def test_a_tool_that_only_computes_is_answered_in_place() -> None:
    opened = session(Calculator())
    assert answered_in_place(opened, call("calculator", expression="6*7")).response.text == "42"
    assert answered_in_place(opened, call("calculator", expression="1/0")).response.text == "Error: division by zero"
    assert answered_in_place(opened, call("calculator")).status == "bad_arguments"
    assert opened.counters == {"calls": 3, "ok": 1, "error": 1, "bad_arguments": 1}
    assert not opened.holds_instances


class Sleepy(Calculator):
    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> ToolResponse:
        await asyncio.sleep(5)
        return await super().execute(instance_id, parameters, **kwargs)


class Sleeping(Calculator):
    async def create(self, instance_id: str | None = None, **kwargs: Any) -> tuple[str, ToolResponse]:
        await asyncio.sleep(5)
        return await super().create(instance_id, **kwargs)


@pytest.mark.parametrize("kind", [Sleepy, Sleeping])
async def test_a_subclass_with_a_method_of_its_own_has_its_deadline(kind: type[Calculator]) -> None:
    (result,) = await session(kind(), timeout=0.05).run([call("calculator", expression="1")])
    assert result.status == "timeout"


class Releasing(Calculator):
    released = ""

    async def release(self, instance_id: str, **kwargs: Any) -> None:
        self.released = instance_id


async def test_a_tool_with_a_release_of_its_own_is_released() -> None:
    tool = Releasing()
    opened = session(tool)
    await opened.run([call("calculator", expression="1")])
    assert opened.holds_instances
    await opened.close()
    assert tool.released == "episode/calculator"
