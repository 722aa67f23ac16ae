"""Tool metrics are counted per tool, and the tool that delays a rollout is named."""

from typing import Any

import pytest
from track_episodes import make_episode

from rally.track import rollout_metrics, tool_warnings
from rally.types import Episode, ToolCall, ToolResponse, ToolResult, ToolStatus, Turn


def made(name: str, status: ToolStatus = ToolStatus.OK, seconds: float = 0.0, **fields: Any) -> ToolResult:
    call = fields.pop("call", None) or ToolCall(name=name, arguments=fields.pop("arguments", {}))
    return ToolResult(call=call, status=status, response=ToolResponse(text="x"), seconds=seconds, **fields)


def episode(*results: ToolResult, **fields: Any) -> Episode:
    turns = tuple(Turn(role="tool", text="x", tool_results=(result,)) for result in results)
    return make_episode("e", turns=turns, **fields)


def test_calls_are_told_apart_by_tool_and_made_up_names_are_no_tools() -> None:
    results = (
        made("a", seconds=1.0, queued=0.5, arguments={"x": 1, "y": 2}),
        made("a", seconds=0.0, cached=True, arguments={"y": 2, "x": 1}),
        made("a", ToolStatus.REJECTED, arguments={"x": 1}),
        made("a", ToolStatus.TIMEOUT, seconds=3.0, queued=1.5, truncated=True),
        made("b", ToolStatus.BAD_ARGUMENTS),
        made("nonsense", ToolStatus.UNKNOWN_TOOL),
        made("", ToolStatus.MALFORMED, call=ToolCall(name="a", error="no", raw="{")),
    )
    told = rollout_metrics([episode(*results), episode(results[0])])
    a = {key.removeprefix("tool/a/"): value for key, value in told.items() if key.startswith("tool/a/")}
    assert a == pytest.approx(
        {
            "calls": 5,
            "success_rate": 3 / 5,
            "timeouts": 1,
            "rejected": 1,
            "outages": 0,
            "truncations": 1,
            "cached": 1,
            "redundant": 1,
            "latency_s/p50": 1.0,
            "latency_s/p95": 2.8,
            "queue_s/p50": 0.5,
            "queue_s/p95": 1.4,
        }
    ), "another episode's same call is not redundant"
    assert told["tool/b/calls"] == 1 and "tool/b/latency_s/p50" not in told
    assert not [key for key in told if key.startswith("tool/nonsense/")]
    assert (told["tool/calls"], told["tool/rejected"], told["tool/redundant"]) == (8, 1, 1)


def test_what_went_wrong_beside_the_calls_is_summed() -> None:
    troubled = [episode(extra={"tool_trouble": {"abandoned": 2}}), episode(extra={"tool_trouble": {"abandoned": 1}})]
    told = rollout_metrics([*troubled, episode()])
    assert (told["tool/abandoned"], told["tool/release_errors"]) == (3, 0)


def test_arguments_nested_too_deeply_to_write_are_still_counted() -> None:
    deep: Any = 1
    for _ in range(5000):
        deep = [deep]
    assert rollout_metrics([episode(made("a", arguments={"x": deep}))])["tool/a/calls"] == 1


@pytest.mark.parametrize(("queued", "advice"), [(2.0, "make it faster"), (5.0, "its limits hold the calls back")])
def test_the_tool_that_takes_the_time_is_named(queued: float, advice: str) -> None:
    slow = episode(
        made("quick", seconds=0.1), made("slow", seconds=4.0, queued=queued), timings={"generate": 1.0, "tools": 6.1}
    )
    [found] = tool_warnings([slow, slow])
    assert found.key == "slow tool slow"
    assert f"'slow': 2 calls, latency p50 4.00 s, p95 4.00 s, in the queue p50 {queued:.2f} s" in found.text
    assert f"0 timeouts; {advice}" in found.text


@pytest.mark.parametrize("timings", [{"generate": 9.0, "tools": 6.1}, {"generate": 0.01, "tools": 0.5}, {}])
def test_tools_that_do_not_matter_are_not_named(timings: dict[str, float]) -> None:
    assert tool_warnings([episode(made("slow", seconds=4.0), timings=timings)]) == []


def test_a_tool_that_answers_none_of_its_calls_is_named_with_what_it_said() -> None:
    failed = [episode(made("broken", ToolStatus.ERROR), made("fine"), made("broken", ToolStatus.TIMEOUT))] * 4
    [found] = tool_warnings(failed)
    assert found.key == "failing tool broken"
    assert found.text.startswith("all 8 calls of the tool 'broken' failed in one step, the first with 'x';")


def test_few_calls_one_answer_or_wrong_arguments_are_the_policys_doing() -> None:
    few = [episode(made("a", ToolStatus.ERROR))] * 7
    assert tool_warnings(few) == []
    assert tool_warnings([*few, episode(made("a"))]) == []
    assert tool_warnings([*few, episode(made("a", ToolStatus.BAD_ARGUMENTS))]) == []
