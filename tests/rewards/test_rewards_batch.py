"""A reward function that takes lists scores a whole batch in one call."""

from __future__ import annotations

from typing import Any

import pytest

from rally.rewards import RewardError, RewardSpec, Scorer

LISTS = """
    def compute_score(data_sources, solution_strs, ground_truths, extra_infos, base=0.0):
        assert len({len(data_sources), len(ground_truths), len(extra_infos)}) == 1
        longest = max(map(len, solution_strs))
        return [{"score": base + len(text) / longest, "turns": info["num_turns"]}
                for text, info in zip(solution_strs, extra_infos)]
"""


async def test_each_episode_gets_its_own_score_of_one_call(make_episode: Any, write_reward: Any) -> None:
    spec = RewardSpec(path=write_reward(LISTS), kwargs={"base": 1.0}, batch=True)
    async with Scorer(spec, 1, 20) as scorer:
        scores = await scorer.score_batch([make_episode(text) for text in ("ab", "abcd", "a")])
        assert await scorer.score_batch([]) == []
    assert [score.reward for score in scores] == [1.5, 2.0, 1.25]
    assert scores[0].info == {"score": 1.5, "turns": 2}


async def test_an_async_function_may_take_lists_too(make_episode: Any, write_reward: Any) -> None:
    path = write_reward(
        "async def compute_score(data_sources, solution_strs, ground_truths, extra_infos): return [0.5]"
    )
    async with Scorer(RewardSpec(path=path, batch=True), 1, 20) as scorer:
        assert [score.reward for score in await scorer.score_batch([make_episode()])] == [0.5]


@pytest.mark.parametrize(
    ("result", "errors"),
    [
        ("[1.0]", ["the reward function returned 1 scores for 2 episodes; return one for each"] * 2),
        ("1.0", ["TypeError: 'float' object is not iterable"] * 2),
        ("[1.0, float('nan')]", [None, "the reward function returned nan"]),
        ("[{}, 1.0]", ['the reward function returned a dict without "score" (its keys: none)', None]),
    ],
)
async def test_a_failure_is_named(result: str, errors: list[Any], make_episode: Any, write_reward: Any) -> None:
    path = write_reward(f"def compute_score(data_sources, solution_strs, ground_truths, extra_infos): return {result}")
    async with Scorer(RewardSpec(path=path, batch=True), 1, 20) as scorer:
        scores = await scorer.score_batch([make_episode(), make_episode()])
    for score, error in zip(scores, errors, strict=True):
        assert (score.error is None) == (error is None)
        assert error is None or str(score.error).startswith(error)


async def test_a_function_of_one_episode_is_refused_before_training(write_reward: Any) -> None:
    path = write_reward("def compute_score(data_source, solution_str, ground_truth, extra_info=None): return 1.0")
    with pytest.raises(
        RewardError, match="cannot be called with data_sources, solution_strs, ground_truths, extra_infos"
    ):
        await Scorer(RewardSpec(path=path, batch=True), 1, 20).start()
    with pytest.raises(RewardError, match="batch needs a function of your own"):
        await Scorer(RewardSpec(batch=True), 1, 20).start()
