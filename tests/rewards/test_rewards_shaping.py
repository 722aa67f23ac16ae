"""Each component of a shaped reward follows its definition, is reported by name, and belongs to the right turn."""

from __future__ import annotations

from typing import Any

import pytest

from rally.rewards import Overlong, Shaping, outcome, reward_metrics
from rally.rewards.shaping import reasons
from rally.types import Episode, Generation, Segment, StopReason, ToolCall, ToolResponse, ToolResult, ToolStatus, Turn

WEIGHTS = {
    "tool_call_success": 0.1,
    "valid_reasoning": 0.05,
    "invalid_tool_call": -0.2,
    "max_turns_exceeded": -0.5,
    "redundant_tool_call": -0.03,
    "tool_format_reward": 0.01,
}
OK, ERROR, UNKNOWN = ToolStatus.OK, ToolStatus.ERROR, ToolStatus.UNKNOWN_TOOL


def call(name: str = "add", error: str | None = None, **arguments: Any) -> ToolCall:
    return ToolCall(name=name, arguments=arguments, raw=f"<tool_call>{name}</tool_call>", error=error)


def exchange(*steps: tuple[ToolCall, ToolStatus]) -> tuple[Turn, ...]:
    """One call per assistant turn, each answered by a tool turn, and a last turn of few words."""
    turns: list[Turn] = []
    for made, status in steps:
        result = ToolResult(call=made, status=status, response=ToolResponse(text="3"))
        turns.append(Turn(role="assistant", text=made.raw, tool_calls=(made,)))
        turns.append(Turn(role="tool", text="3", tool_results=(result,)))
    return (*turns, Turn(role="assistant", text="#### 3"))


def shaped(make_episode: Any, turns: tuple[Turn, ...], **fields: Any) -> Episode:
    return Shaping(weights=WEIGHTS).apply(make_episode(turns=turns, reward=1.0, reward_info={"score": 1.0}, **fields))


def earned(episode: Episode) -> dict[str, float]:
    prefix = "shaping/"
    told = {k.removeprefix(prefix): v for k, v in episode.reward_info.items() if k.startswith(prefix) and v}
    told.pop("on_turns", None)
    return told


def test_a_call_that_is_answered_earns_once_and_its_repetition_costs(make_episode: Any) -> None:
    turns = exchange((call(a=1, b=2), OK), (call(b=2, a=1), OK), (call(a=2, b=2), OK))
    episode = shaped(make_episode, turns)
    assert earned(episode) == pytest.approx(
        {"tool_call_success": 0.2, "redundant_tool_call": -0.03, "tool_format_reward": 0.01}
    )
    assert episode.reward == pytest.approx(1.18) and episode.reward_info["score"] == 1.0
    assert [turn.reward for turn in episode.turns] == [0.1, None, -0.03, None, 0.1, None, None]
    assert episode.reward_info["shaping/on_turns"] == pytest.approx(0.17)
    assert outcome(episode) == pytest.approx(1.01)  # the score, and the components that belong to no turn
    assert outcome(make_episode(reward=0.5)) == 0.5


def test_what_failed_may_be_tried_again(make_episode: Any) -> None:
    turns = exchange((call(a={"x": 1, "y": 2}), ERROR), (call(a={"y": 2, "x": 1}), OK), (call(a={"x": 1, "y": 2}), OK))
    assert [turn.reward for turn in shaped(make_episode, turns).turns] == [None, None, 0.1, None, -0.03, None, None]


def test_the_policys_mistakes_cost_and_the_tools_do_not(make_episode: Any) -> None:
    bad = call(error="no JSON")
    turns = exchange(
        (call("fly"), UNKNOWN), (bad, ToolStatus.MALFORMED), (call(a=1), ERROR), (call(a=2), ToolStatus.TIMEOUT)
    )
    episode = shaped(make_episode, turns)
    assert earned(episode) == pytest.approx({"invalid_tool_call": -0.4})
    assert [turn.reward for turn in episode.turns if turn.role == "assistant"] == [-0.2, -0.2, None, None, None]


def test_a_turn_limit_costs_the_turn_that_met_it_whose_calls_still_count(make_episode: Any) -> None:
    turns = (*exchange((call(a=1), OK))[:-1], Turn(role="assistant", text="", tool_calls=(call(error="no JSON"),)))
    episode = shaped(make_episode, turns, stop_reason=StopReason.MAX_TURNS)
    assert earned(episode) == pytest.approx(
        {"tool_call_success": 0.1, "invalid_tool_call": -0.2, "max_turns_exceeded": -0.5}
    )
    assert [turn.reward for turn in episode.turns] == [0.1, None, pytest.approx(-0.7)]
    assert "max_turns_exceeded" not in earned(shaped(make_episode, turns, stop_reason=StopReason.LENGTH))


@pytest.mark.parametrize(
    ("turn", "reasoned"),
    [
        (Turn(role="assistant", text="First I add the two prices."), True),
        (Turn(role="assistant", text="<think>First I add the two prices.</think>"), True),
        (Turn(role="assistant", text="<think>First I add the two prices."), False),
        (Turn(role="assistant", text="First I add the two prices.", finish="length"), False),
        (Turn(role="assistant", text="先把两个价格相加"), True),
        (Turn(role="assistant", text="#### 42 !!! 1.2.3.4.5 ... --- ???"), False),
        (Turn(role="assistant", text="<tool_call>add</tool_call>", tool_calls=(call(),)), False),
        (
            Turn(
                role="assistant",
                text="<tool_call> add 1 2 3 4 </tool_call>",
                tool_calls=(ToolCall(name="add", raw="add 1 2 3 4"),),
            ),
            False,
        ),
    ],
)
def test_reasoning_is_five_words_of_its_own(turn: Turn, reasoned: bool, make_episode: Any) -> None:
    assert reasons(turn) is reasoned
    assert earned(shaped(make_episode, (turn,))).get("valid_reasoning", 0.0) == (0.05 if reasoned else 0.0)


def test_a_tools_own_reward_stays_on_its_turn(make_episode: Any) -> None:
    made = call(a=1)
    turns = exchange((made, OK))
    paid = (turns[0], Turn(role="tool", text="3", tool_results=turns[1].tool_results, reward=0.7), turns[2])
    assert [turn.reward for turn in shaped(make_episode, paid).turns] == [0.1, 0.7, None]


def test_validation_reports_the_components_and_adds_none(make_episode: Any) -> None:
    turns = exchange((call(a=1), OK))
    episode = shaped(make_episode, turns, validate=True)
    assert episode.reward == 1.0 and episode.turns == turns
    assert earned(episode) == pytest.approx({"tool_call_success": 0.1, "tool_format_reward": 0.01})


def test_components_are_metrics_of_their_own(make_episode: Any) -> None:
    episodes = [shaped(make_episode, exchange((call(a=1), OK))), shaped(make_episode, exchange())]
    metrics = reward_metrics(episodes)
    assert metrics["reward/shaping/tool_call_success/mean"] == pytest.approx(0.05)
    assert metrics["reward/shaping/tool_call_success/missing"] == 0.0


def test_an_episode_without_a_score_and_a_run_without_shaping_change_nothing(make_episode: Any) -> None:
    episode = make_episode(turns=exchange((call(a=1), OK)))
    assert Shaping(weights=WEIGHTS).apply(episode) is episode
    scored = make_episode(reward=1.0)
    assert Shaping().apply(scored) is scored


@pytest.mark.parametrize(("tokens", "penalty"), [(0, 0.0), (60, 0.0), (61, -0.05), (80, -1.0), (100, -2.0)])
def test_the_last_tokens_of_the_budget_cost_more_and_more(tokens: int, penalty: float, make_episode: Any) -> None:
    sampled = Generation(ids=(7,) * (tokens // 2), logprobs=(0.0,) * (tokens // 2), finish="stop")
    segment = Segment(prompt_ids=(1,)).append_sampled(sampled).append_observed((8,) * (tokens - tokens // 2))
    overlong = Overlong(longest=100, buffer=40, penalty_factor=2.0, log=True)
    episode = Shaping(overlong=overlong).apply(make_episode(reward=1.0, segments=(segment,)))
    assert episode.reward == pytest.approx(1.0 + penalty)
    assert episode.reward_info == {
        "score": 1.0,
        "overlong_reward": pytest.approx(penalty),
        "overlong": float(penalty < 0),
    }
