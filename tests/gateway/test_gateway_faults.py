"""An agent that raises loses nothing of what was sampled, and the fault is told apart: the policy's or another."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from gateway_cases import black_box, held_by, row_of
from loop_cases import Reply, calculator, check_sampled_once, check_tiling, hold, said, tiny_codec

from rally.engines import EngineError
from rally.loops import LoopError
from rally.loops.base import fault_of
from rally.rewards.score_inputs import request_of
from rally.track import RunFolder
from rally.track.run_folder.episode_json import episode_from_json, episode_to_json
from rally.types import RallyError, StopReason

CODEC = tiny_codec([calculator])
GOOD = said(CODEC, "", ("calculator", {"expression": "1"}))


@pytest.mark.drill(
    "reliability",
    "An agent framework raises because the policy named an unknown tool",
    "The episode is recorded with all its turns as the policy's fault",
)
@pytest.mark.parametrize(
    ("call", "error"),
    [(("search", {"query": "x"}), "KeyError: 'search'"), (("calculator", {"query": "x"}), "TypeError: value_of()")],
)
def test_what_was_sampled_before_the_agent_raised_is_kept(call: Any, error: str, tmp_path: Any) -> None:
    held = held_by("trusts_the_policy", CODEC, [Reply(GOOD), Reply(said(CODEC, "", call))])
    episode = held.episode
    assert episode.stop_reason is StopReason.ERROR and error in str(episode.error)
    assert str(episode.error).startswith("LoopError: the agent agents_of_users:trusts_the_policy failed: ")
    assert [turn.role for turn in episode.turns] == ["assistant", "tool", "assistant"]
    assert episode.extra["fault"] == "policy" and episode.extra["agent"]["requests"] == 2
    check_tiling(episode)
    check_sampled_once(held)
    assert request_of(episode)["solution_str"] == episode.turns[-1].text
    assert episode_from_json(episode_to_json(episode)).turns == episode.turns
    folder = RunFolder(tmp_path / "run").create()
    folder.log_episodes(1, [episode])
    assert folder.read_episodes(1)[0].segments == episode.segments


@pytest.mark.parametrize("agent", ["has_a_dead_tool", "is_misspelled"])
def test_a_dead_tool_and_a_bug_are_not_the_policys_fault(agent: str) -> None:
    episode = held_by(agent, CODEC).episode
    assert episode.extra["fault"] == "infrastructure" and len(episode.turns) == 1 and episode.segments[0].sampled


def test_a_request_that_the_gateway_refused_is_not_the_policys_fault() -> None:
    episode = held_by("wants_three", CODEC).episode
    assert episode.extra["fault"] == "infrastructure" and "n must be 1" in str(episode.error)


def test_a_retry_that_fails_again_keeps_its_own_samples() -> None:
    runner = black_box("trusts_the_policy", CODEC, [Reply(said(CODEC, "", ("search", {"query": "x"})))])
    runner.max_retries = 1
    held = asyncio.run(hold(runner, row_of(CODEC)))
    assert held.episode.extra["attempts"] == 2 or held.episode.stop_reason is StopReason.STOP
    assert sum(s.sampled for s in held.episode.segments) == sum(t.end - t.start for t in held.episode.turns)


@pytest.mark.parametrize(
    ("failure", "fault"),
    [
        (KeyError("x"), "policy"),
        (TypeError("unexpected keyword"), "policy"),
        (ValueError("Expecting value: line 1"), "policy"),
        (RallyError("x"), "infrastructure"),
        (LoopError("x"), "infrastructure"),
        (EngineError("no server is left"), "infrastructure"),
        (ConnectionError(), "infrastructure"),
        (TimeoutError(), "infrastructure"),
        (NameError("aks"), "infrastructure"),
        (ModuleNotFoundError("x"), "infrastructure"),
    ],
)
def test_whose_fault_an_exception_is(failure: Exception, fault: str) -> None:
    assert fault_of(failure, sampled=True) == fault
    assert fault_of(failure, sampled=False) == "infrastructure"
