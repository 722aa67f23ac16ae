"""Built-in reward functions score in process; a user's function never does."""

from __future__ import annotations

import subprocess
from typing import Any

import pytest

from rally.rewards import RewardError, RewardSpec, Scorer, register_reward, registry


async def test_no_process_is_started(make_episode: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subprocess, "Popen", None)
    async with Scorer(RewardSpec(), 2, 20) as scorer:
        score = await scorer.score(make_episode("#### 72"))
    assert (score.reward, score.info, score.error) == (1.0, {"score": 1.0}, None)
    with pytest.raises(RewardError, match="this Scorer is closed"):
        await scorer.score(make_episode())


async def test_keywords_arrive_or_are_refused_before_training(make_episode: Any) -> None:
    async with Scorer(RewardSpec(kwargs={"method": "flexible"}), 1, 20) as scorer:
        assert (await scorer.score(make_episode("is 72"))).reward == 1.0
    with pytest.raises(RewardError, match=r"takes reward_kwargs\.metod; known are .*method"):
        Scorer(RewardSpec(kwargs={"metod": "flexible"}), 1, 20)


@pytest.mark.parametrize(
    ("kwargs", "truth", "sentence"),
    [
        ({}, "many", "the ground_truth of a openai/gsm8k row must be a number, not 'many'; fix the row"),
        ({"method": "vague"}, "72", "ValueError: the gsm8k method must be strict or flexible, not 'vague'"),
    ],
)
async def test_a_failure_is_a_named_error(kwargs: Any, truth: str, sentence: str, make_episode: Any) -> None:
    async with Scorer(RewardSpec(kwargs=kwargs), 1, 20) as scorer:
        score = await scorer.score(make_episode(truth=truth))
    assert score.reward is None and score.error is not None and score.error.startswith(sentence)


async def test_what_a_user_registered_in_this_process_does_not_run_in_it(
    make_episode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry.registered()))

    @register_reward("openai/gsm8k")
    def mine(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        raise AssertionError("a user's function ran in the trainer's process")

    async with Scorer(RewardSpec(), 1, 20) as scorer:
        assert (await scorer.score(make_episode())).reward == 1.0
