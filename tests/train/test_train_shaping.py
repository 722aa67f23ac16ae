"""Reward keys of the configuration become settings of the rollout, which does batch scoring and shaping."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
from train_cases import TASK, Paper, episode, run_config, segment

from rally.config import load_config
from rally.loops import Job
from rally.rewards import Overlong, Score, Shaping
from rally.runs import build
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.rollout.rollout import FailurePolicy, Rollout
from rally.types import Episode, SamplingParams, StopReason


class Runner:
    async def run(
        self,
        jobs: Sequence[Job],
        sampling: SamplingParams,
        *,
        finish: Callable[[Episode], Awaitable[Episode]],
        timeout: float | None,
        admit: None,
    ) -> list[Episode]:
        ended = [episode(j.episode_id, j.group, None, segment(random.Random(1), "ssssso")) for j in jobs]
        ended[0] = replace(ended[0], segments=(), stop_reason=StopReason.ERROR, error="it broke")
        return [await finish(one) for one in ended]


@dataclass
class BatchScorer:
    """Fails the first episode of each call in `bad_calls`; the others get their index as score."""

    bad_calls: tuple[int, ...] = ()
    calls: list[list[str]] = field(default_factory=list)

    async def score_batch(self, episodes: Sequence[Episode]) -> list[Score]:
        self.calls.append([e.id for e in episodes])
        scores = [Score(reward=float(i), info={"score": float(i)}) for i in range(len(episodes))]
        if len(self.calls) in self.bad_calls:
            scores[0] = Score(error="it timed out")
        return scores


def rollout(scorer: BatchScorer, policy: FailurePolicy, shaping: Shaping | None = None) -> Rollout:
    return Rollout(
        runner=Runner(),  # type: ignore[arg-type]
        scorer=scorer,  # type: ignore[arg-type]
        policy=policy,
        shaping=shaping or Shaping(),
        in_batch=True,
    )


def test_a_batch_is_one_call_for_all_that_ended_well_and_shaping_follows() -> None:
    scorer = BatchScorer()
    shaping = Shaping(overlong=Overlong(longest=6, buffer=2, penalty_factor=0.5))
    one = rollout(scorer, FailurePolicy(max_failed_share=1.0), shaping)
    seen: list[int] = []
    result = asyncio.run(one.collect(one.jobs([TASK] * 2, 2, step=1), SamplingParams(), on_done=lambda: seen.append(1)))
    assert [len(call) for call in scorer.calls] == [3] and len(seen) == 4
    assert [e.reward for e in result.episodes] == [0.5, 1.5]
    assert [e.reward_info["score"] for e in result.episodes] == [1.0, 2.0]
    assert [e.reward for e in result.set_aside] == [-0.5] and len(result.failed) == 1


@pytest.mark.parametrize(("bad_calls", "failed"), [((1,), 1), ((1, 2), 2)])
def test_only_what_failed_is_tried_again(bad_calls: tuple[int, ...], failed: int) -> None:
    scorer = BatchScorer(bad_calls)
    one = rollout(scorer, FailurePolicy(reward="retry", max_failed_share=1.0))
    result = asyncio.run(one.collect(one.jobs([TASK] * 2, 2, step=1), SamplingParams()))
    assert [len(call) for call in scorer.calls] == [3, 1]
    assert len(result.failed) == failed
    assert all("reward_error" not in e.extra for e in [*result.episodes, *result.set_aside])


def test_the_keys_of_shaping_arrive() -> None:
    config = load_config(
        overrides=[
            "reward_shaping.intermediate_rewards.tool_call_success=0.1",
            "reward_shaping.penalties.max_turns_exceeded=-0.5",
            "reward_shaping.tool_format_reward=0.05",
        ]
    )
    weights = {"tool_call_success": 0.1, "max_turns_exceeded": -0.5, "tool_format_reward": 0.05}
    assert build.shaping_of(config) == Shaping(weights=weights)
    off = load_config(overrides=["reward_shaping.enable=false", "reward_shaping.tool_format_reward=0.05"])
    assert build.shaping_of(off) == Shaping() == build.shaping_of(load_config(overrides=[]))


def test_the_keys_of_the_managers_arrive(tmp_path: Path) -> None:
    buffer = "reward_model.reward_kwargs.overlong_buffer_cfg"
    lines = ["reward_model.reward_manager=dapo", f"{buffer}.enable=true", f"{buffer}.len=64", f"{buffer}.log=true"]
    expected = Overlong(longest=512, buffer=64, penalty_factor=1.0, log=True)
    assert build.shaping_of(load_config(overrides=lines)).overlong == expected
    (tmp_path / "mine.py").touch()
    config = load_config(overrides=["reward_manager.name=batch", f"custom_reward_function.path={tmp_path}/mine.py"])
    assert build.reward_spec_of(config).batch and not build.reward_spec_of(load_config(overrides=lines)).batch


def test_a_run_scores_in_batches_and_tells_each_component(home: Path, tmp_path: Path) -> None:
    (tmp_path / "lists.py").write_text(
        "def compute_score(data_sources, solution_strs, ground_truths, extra_infos, bonus=0.0):\n"
        "    return [{'score': i / 10, 'batch': len(solution_strs)} for i in range(len(solution_strs))]\n"
    )
    lines = (
        "reward_manager.name=batch",
        f"custom_reward_function.path={tmp_path}/lists.py",
        "reward_shaping.intermediate_rewards.valid_reasoning=0.5",
        "reward_shaping.penalties.invalid_tool_call=-0.25",
        "trainer.total_training_steps=1",
    )
    train(run_config(home, tmp_path / "run", *lines), Paper().console)
    [first, *_] = [row for row in RunFolder(tmp_path / "run").read_metrics() if row.step == 1]
    told = first.metrics
    episodes = told["episodes/count"]
    assert told["reward/batch/mean"] == episodes and told["reward/missing"] == 0
    assert told["reward/score/mean"] == pytest.approx((episodes - 1) / 20)
    shaping = told["reward/shaping/valid_reasoning/mean"] + told["reward/shaping/invalid_tool_call/mean"]
    assert told["critic/rewards/mean"] == pytest.approx(told["reward/score/mean"] + shaping)
