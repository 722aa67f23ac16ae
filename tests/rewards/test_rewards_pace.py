"""Calls of a judge are paced, and waiting costs no score."""

import asyncio
import time
from typing import Any

from rally.rewards import RewardSpec, Scorer
from rally.rewards.worker_pool import CallPacer


async def test_calls_begin_evenly_spaced_in_their_order() -> None:
    pace, began, order = CallPacer(1200), time.monotonic(), []

    async def call(number: int) -> None:
        await pace.turn()
        order.append((number, time.monotonic() - began))

    await asyncio.gather(*(call(number) for number in range(4)))
    assert [number for number, _ in order] == [0, 1, 2, 3]
    assert all(at >= number * 0.05 - 0.01 for number, at in order) and order[0][1] < 0.05


async def test_without_a_limit_nobody_waits() -> None:
    pace = CallPacer(None)
    assert [await pace.turn() for _ in range(3)] == [0.0] * 3


async def test_a_scorer_keeps_the_pace(write_reward: Any, make_episode: Any) -> None:
    source = "def compute_score(data_source, solution_str, ground_truth, extra_info=None):\n    return 1.0\n"
    async with Scorer(RewardSpec(path=write_reward(source)), num_workers=2, timeout=20.0, per_minute=600) as scorer:
        began = time.monotonic()
        scores = await asyncio.gather(*(scorer.score(make_episode()) for _ in range(4)))
        assert time.monotonic() - began >= 0.29
    assert [score.reward for score in scores] == [1.0] * 4
