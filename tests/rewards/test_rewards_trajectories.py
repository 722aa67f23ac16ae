"""Reward functions over trajectories, and the score functions that reward files import from verl."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rally.rewards import RewardError, RewardSpec, Scorer, load_reward_function, registry
from rally.types import Episode, Segment, StopReason, Task, Turn

SHAPER = """
    from verl.trainer.ppo.reward_score.base import RewardManager

    @RewardManager.register("shop/*")
    def compute_reward(data):
        totals = []
        for trajectory, truth in zip(data["trajectories"], data["ground_truths"]):
            asked = sum(turn["role"] == "tool" for turn in trajectory)
            totals.append(float(truth in trajectory[-1]["content"]) + 0.25 * asked)
        return totals
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry.registered()))
    monkeypatch.setattr("sys.path", list(sys.path))


def episode(source: str = "shop/orders") -> Episode:
    return Episode(
        id="e",
        group="g",
        task=Task(id="t", data_source=source, prompt=({"role": "user", "content": "Cost?"},), ground_truth="49"),
        stop_reason=StopReason.STOP,
        segments=(Segment(prompt_ids=(1,)),),
        turns=(Turn(role="assistant", text="look"), Turn(role="tool", text="49"), Turn(role="assistant", text="49")),
    )


@pytest.mark.parametrize("name", ["compute_score", "compute_reward"])
async def test_a_registered_function_sees_the_whole_trajectory(write_reward: Any, name: str) -> None:
    async with Scorer(RewardSpec(path=write_reward(SHAPER), name=name), num_workers=1, timeout=20.0) as scorer:
        score = await scorer.score(episode())
        assert (score.reward, score.error) == (1.25, None)
        if name == "compute_score":
            elsewhere = await scorer.score(episode("openai/gsm8k"))
            assert elsewhere.reward == 0.0, "other sources keep their own function"


async def test_a_list_of_another_length_is_a_named_error(write_reward: Any) -> None:
    wrong = SHAPER.replace("return totals", "return totals * 2")
    async with Scorer(RewardSpec(path=write_reward(wrong)), num_workers=1, timeout=20.0) as scorer:
        assert "compute_reward must return a list with one score" in str((await scorer.score(episode())).error)


def test_score_functions_of_verl_can_be_imported(write_reward: Any) -> None:
    source = """
    from verl.utils.reward_score import default_compute_score, math_dapo
    from verl.utils.reward_score.gsm8k import compute_score as gsm8k
    from verl.utils.reward_score.search_r1_like_qa_em import compute_score as search

    def compute_score(data_source, solution_str, ground_truth, extra_info):
        if data_source == "search":
            return search(solution_str, {"target": [ground_truth]}, format_score=0.1)
        if data_source == "numbers":
            return gsm8k(solution_str, ground_truth, method="flexible", format_score=0.2)
        result = math_dapo.compute_score(solution_str, ground_truth, strict_box_verify=True)
        assert default_compute_score("math_dapo", solution_str, ground_truth, strict_box_verify=True) == result
        if result["score"] < 0:
            result["score"] = min(-0.6, result["score"] + (extra_info["num_turns"] - 2) / 2 * 0.1)
        return result
    """
    function = load_reward_function(write_reward(source))

    def call(data_source: str, text: str) -> Any:
        given = {"solution_str": text, "ground_truth": "7", "extra_info": {"num_turns": 6}}
        return function(data_source=data_source, **given)

    assert [call("search", f"<answer>{x}</answer>") for x in ("7", "8")] == [1.0, 0.1]
    assert [call("numbers", f"so {x}") for x in ("7", "8")] == [1.0, 0.2]
    assert [call("aime", f"\\boxed{{{x}}}")["score"] for x in ("7", "8")] == [1.0, -0.8]


def test_a_name_without_a_stand_in_is_refused_before_training(write_reward: Any) -> None:
    source = "from verl.utils.reward_score import prime_math\n"
    with pytest.raises(RewardError, match=r"cannot be imported .*prime_math"):
        load_reward_function(write_reward(source))


def test_an_object_that_scores_need_not_be_hashable(tmp_path: Path) -> None:
    file = tmp_path / "judge.py"
    file.write_text(
        "from dataclasses import dataclass\n"
        "@dataclass\n"
        "class Judge:\n"
        "    worth: float\n"
        "    def __call__(self, data_source, solution_str, ground_truth, extra_info=None):\n"
        "        return self.worth\n"
        "compute_score = Judge(0.5)\n"
    )
    assert load_reward_function(str(file))("any", "x", "y", {}) == 0.5
