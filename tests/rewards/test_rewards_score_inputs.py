"""The inputs of a reward function for one episode, and the summary over many scores."""

from __future__ import annotations

import math
from typing import Any

from rally import Episode, StopReason, ToolCall, ToolResponse, ToolResult, ToolStatus, Turn
from rally.rewards import compute_score, reward_metrics, solution_text
from rally.rewards.score_inputs import request_of


def _tool_turn(text: str, reward: float | None) -> Turn:
    result = ToolResult(
        call=ToolCall(name="calc"), status=ToolStatus.OK, response=ToolResponse(text=text), reward=reward
    )
    return Turn(role="tool", text=text, tool_results=(result,))


def _conversation(make_episode: Any) -> Episode:
    turns = (
        Turn(role="assistant", text="let me ask"),
        _tool_turn("#### 72", -0.05),
        Turn(role="user", text="#### 72, is it?", reward=0.5),
        _tool_turn("again #### 72", None),
        Turn(role="assistant", text="I do not know"),
    )
    return make_episode(turns=turns, stop_reason=StopReason.MAX_TURNS, extra_info={"index": 3, "num_turns": "stale"})


def test_a_tools_echo_cannot_earn_the_reward(make_episode: Any) -> None:
    episode = _conversation(make_episode)
    assert solution_text(episode) == "let me ask\nI do not know"
    request = request_of(episode)
    assert compute_score(**request, method="flexible") == 0.0


def test_extra_info_is_the_rows_and_what_happened(make_episode: Any) -> None:
    info = request_of(_conversation(make_episode))["extra_info"]
    messages = info.pop("messages")
    assert info == {
        "index": 3,
        "num_turns": 6,
        "turn_scores": [0.5],
        "tool_rewards": [-0.05],
        "rollout_reward_scores": {"calc": [-0.05]},
        "stop_reason": "max_turns",
        "last_turn": "I do not know",
    }
    assert [message["role"] for message in messages] == ["user", "assistant", "tool", "user", "tool", "assistant"]
    assert messages[0] == {"role": "user", "text": "How many?"}


def test_a_simulated_users_score_reaches_the_reward_function(make_episode: Any) -> None:
    judged = make_episode(extra={"interaction": {"name": "gsm8k", "score": 0.5, "failures": [], "info": []}})
    assert request_of(judged)["extra_info"]["interaction_score"] == 0.5
    assert "interaction_score" not in request_of(make_episode())["extra_info"]


def test_an_episode_without_words_is_an_empty_solution(make_episode: Any) -> None:
    request = request_of(make_episode(turns=()))
    assert request["solution_str"] == "" and request["extra_info"]["last_turn"] == ""


def test_the_text_of_a_prompt_with_an_image_is_its_text_parts(make_episode: Any) -> None:
    task = make_episode().task
    content = [{"type": "image", "image": b"..."}, {"type": "text", "text": "What is this?"}]
    task = type(task)(id="t", data_source="s", prompt=({"role": "user", "content": content},))
    messages = request_of(make_episode(task=task))["extra_info"]["messages"]
    assert messages[0]["text"] == "What is this?"


def test_metrics_are_the_union_of_all_keys(make_episode: Any) -> None:
    first = make_episode().scored(1.0, {"score": 1.0, "acc": True, "pred": "72"})
    second = make_episode().scored(0.0, {"score": 0.0, "format": 0.5, "acc": None})
    third = make_episode().scored(0.5, {"score": 0.5, "acc": False, "format": math.nan})
    assert reward_metrics([first, second, third, make_episode()]) == {
        "reward/missing": 1.0,
        "reward/score/mean": 0.5,
        "reward/score/missing": 1.0,
        "reward/acc/mean": 0.5,
        "reward/acc/missing": 2.0,
        "reward/format/mean": 0.5,
        "reward/format/missing": 3.0,
    }


def test_no_episodes_are_no_columns() -> None:
    assert reward_metrics([]) == {"reward/missing": 0.0}
