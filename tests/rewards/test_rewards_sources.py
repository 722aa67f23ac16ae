"""Scores of the built-in data sources, their keyword arguments and their errors."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import pytest

from rally.rewards import RewardError, RewardSpec, Scorer, compute_score, reward_metrics
from rally.scoring import math_answers
from rally.types import Turn

BOXED, LINE = r"so \boxed{\frac12}", "so\nAnswer: 0.5"


@pytest.mark.parametrize(
    ("source", "text", "truth", "keywords", "score"),
    [
        ("lighteval/MATH", BOXED, "0.5", {}, 1.0),
        ("HuggingFaceH4/MATH-500", BOXED, "0.6", {}, 0.0),
        ("DigitalLearningGmbH/MATH-lighteval", LINE, "0.5", {}, 0.0),
        ("math_dapo", LINE, "1/2", {}, 1.0),
        ("math_dapo_reasoning", LINE, "1/3", {}, -1.0),
        ("aime_2024", BOXED, "1/2", {}, 1.0),
        ("aime_2024", BOXED + "\nAnswer: 3", "1/2", {}, -1.0),
        ("aime_2024", BOXED, "1/2", {"strict_box_verify": True}, 1.0),
        ("retool/aime_2025", BOXED, "1/2", {}, 1.0),
        ("searchR1_nq", "<answer>The Seine</answer>", {"target": ["Seine"]}, {}, 1.0),
        ("searchR1_hotpotqa", "<answer>river Seine</answer>", ["Seine"], {}, 0.0),
        ("hotpotqa", "<answer>river Seine</answer>", "Seine", {"match": "f1"}, 2 / 3),
        ("hiyouga/geometry3k", r"<think>a</think>\boxed{5}", "5", {}, 1.0),
        ("hiyouga/geometry3k", r"\boxed{5}", "5", {}, 0.9),
    ],
)
def test_a_data_source_has_its_own_score(source: str, text: str, truth: Any, keywords: Any, score: float) -> None:
    result = compute_score(source, text, truth, **keywords)
    assert isinstance(result, dict) and result["score"] == pytest.approx(score)


def test_the_prediction_and_the_accuracy_are_told_apart_from_the_score() -> None:
    assert compute_score("math_dapo", "Answer: 3", "4") == {"score": -1.0, "acc": 0.0, "pred": "3"}
    assert compute_score("hotpotqa", "<answer>a b</answer>", "b c") == {
        "score": 0.0,
        "acc": 0.0,
        "f1": pytest.approx(2 / 3),
        "pred": "a b",
    }


@pytest.mark.parametrize(("source", "keywords"), [("retool", {}), ("aime_2024", {"tool_credit": True})])
def test_a_wrong_answer_costs_less_after_tools_were_tried(source: str, keywords: Any) -> None:
    def score(turns: int) -> float:
        result = compute_score(source, "", "1", {"num_turns": turns}, **keywords)
        assert isinstance(result, dict)
        return float(result["score"])

    assert [score(2), score(4), score(40)] == pytest.approx([-1.0, -0.9, -0.6])


async def test_num_turns_reaches_a_built_in_function(make_episode: Any) -> None:
    turns = tuple(Turn(role=role, text="?") for role in ("assistant", "tool", "assistant"))
    async with Scorer(RewardSpec(), 1, 20) as scorer:
        assert (await scorer.score(make_episode(source="retool", truth="1", turns=turns))).reward == pytest.approx(-0.9)
        own = make_episode(source="retool", truth="1", turns=turns[:1], extra={"num_turns": 6})
        assert (await scorer.score(own)).reward == pytest.approx(-0.8)


@pytest.mark.parametrize(
    ("source", "truth"),
    [("lighteval/MATH", ""), ("aime_2024", None), ("hiyouga/geometry3k", ["5"]), ("searchR1_nq", {"target": []})],
)
def test_a_truth_no_answer_can_equal_is_an_error(source: str, truth: Any) -> None:
    with pytest.raises(RewardError, match=f"the ground_truth of a {source} row must be .*; fix the row"):
        compute_score(source, "", truth)


def test_an_unknown_equality_is_refused_before_training() -> None:
    with pytest.raises(RewardError, match="equality must be text, symbolic or verl, not 'sympy'"):
        Scorer(RewardSpec(kwargs={"equality": "sympy"}), 1, 20)


async def test_without_the_package_symbolic_equality_says_what_to_install() -> None:
    if math_answers.installed():
        pytest.skip("math-verify is installed")
    with pytest.raises(RewardError, match=r"needs the package math-verify; run pip install 'rally-rl\[math\]'"):
        await Scorer(RewardSpec(kwargs={"equality": "symbolic"}), 1, 20).start()


async def test_symbolic_equality_runs_in_a_worker_that_a_runaway_formula_cannot_hold(make_episode: Any) -> None:
    if not math_answers.installed():
        pytest.skip("math-verify is not installed")
    async with Scorer(RewardSpec(kwargs={"equality": "symbolic"}), 1, 5.0) as scorer:
        algebra = make_episode(r"\boxed{2(x+1)}", source="lighteval/MATH", truth="2x+2")
        assert (await scorer.score(algebra)).reward == 1.0
        runaway = make_episode(r"\boxed{9^{9^{9^{9}}}}", source="lighteval/MATH", truth="2x+2")
        late = await asyncio.wait_for(scorer.score(runaway), 30)
        assert late.reward == 0.0 or "timed out" in str(late.error)
        assert (await scorer.score(algebra)).reward == 1.0


async def test_data_sets_with_different_fields_share_a_batch(make_episode: Any) -> None:
    mixed = [
        make_episode("#### 72", extra_info={"index": 3}),
        make_episode("Answer: 1", source="aime_2024", truth="2", extra_info={"level": "hard"}),
        make_episode("<answer>b c</answer>", source="hotpotqa", truth="b"),
    ]
    async with Scorer(RewardSpec(), 1, 20) as scorer:
        scores = [await scorer.score(episode) for episode in mixed]
    scored = [replace(e, reward=s.reward, reward_info=s.info) for e, s in zip(mixed, scores, strict=True)]
    metrics = reward_metrics(scored)
    assert metrics["reward/score/mean"] == pytest.approx((1.0 - 1.0 + 0.0) / 3)
    assert (metrics["reward/f1/mean"], metrics["reward/f1/missing"]) == (pytest.approx(2 / 3), 2.0)
    assert (metrics["reward/acc/mean"], metrics["reward/acc/missing"]) == (0.0, 1.0)
