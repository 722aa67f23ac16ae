"""A step trains on the first groups with signal in the order of their prompts, whatever order the episodes end in."""

import asyncio
import json
import random
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from train_cases import TASK, Paper, episode, run_config, segment, weights
from transformers import AutoModelForCausalLM

from rally.loops import Job
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.rollout.dynamic_sampling import FilterSettings, LiveGroups, MetricError, metric_of
from rally.train.rollout.rollout import FailurePolicy, Rollout, RolloutError, RolloutResult, settle
from rally.types import Episode, SamplingParams, StopReason

LENIENT = FailurePolicy(max_failed_share=1.0)
ROLLOUT = Rollout(runner=None, scorer=None)  # type: ignore[arg-type]  # only its jobs are asked for


def live_groups(
    places: int,
    wanted: int,
    first: int,
    most: int | None = None,
    policy: FailurePolicy = LENIENT,
    baseline: bool = False,
) -> LiveGroups:
    def jobs_at(begin: int, count: int) -> list[Job]:
        return ROLLOUT.jobs([TASK] * count, 2, step=1, first=begin, baseline=baseline)

    return LiveGroups(FilterSettings(metric="reward", first=first, most=most), wanted, places, jobs_at, policy)


def ended(job: Job, kind: str) -> Episode:
    """The two episodes of a group have equal rewards if it has no signal; in a failed group the second has none."""
    second = job.episode_id.endswith("-1")
    if kind == "failed" and second:
        return episode(job.episode_id, job.group, None, stop_reason=StopReason.ERROR, error="KeyError: 'x'")
    reward = float(second and kind == "live")
    return episode(job.episode_id, job.group, reward, segment(random.Random(job.episode_id), "sss"))


def place(group: str) -> int:
    return int(group.rpartition("-")[2])


def played(groups: LiveGroups, kinds: Sequence[str], order: random.Random) -> RolloutResult:
    """A rollout whose episodes end in an order drawn by `order`."""
    begun = groups.begin()
    running, done = list(begun), {}
    while running:
        job = running.pop(order.randrange(len(running)))
        done[job.episode_id] = ended(job, kinds[place(job.group)])
        more = groups.after([done[job.episode_id]])
        begun += more
        running += more
    return groups.chosen(settle([done[job.episode_id] for job in begun], groups.policy))


def places_of(episodes: Sequence[Episode]) -> list[int]:
    return list(dict.fromkeys(place(e.group) for e in episodes))


kinds_of_groups = st.lists(st.sampled_from(["live", "dead", "failed"]), min_size=1, max_size=30)


@settings(deadline=None)
@given(kinds_of_groups, st.integers(1, 6), st.integers(0, 8), st.integers(1, 30), st.randoms(use_true_random=False))
def test_what_is_trained_on_is_a_function_of_how_groups_end_and_not_of_when(
    kinds: list[str], wanted: int, extra: int, most: int, order: random.Random
) -> None:
    """In any order of ending, the rollout starts the shortest sequence of prompts with enough groups with signal, and
    the step trains on the first of these groups."""
    reach = min(most, len(kinds))
    live = [i for i, kind in enumerate(kinds[:reach]) if kind == "live"]
    enough = live[wanted - 1] + 1 if len(live) >= wanted else reach
    expected_begun = max(min(wanted + extra, reach), enough)
    groups = live_groups(len(kinds), wanted, first=wanted + extra, most=most)
    result = played(groups, kinds, order)
    assert groups.begun == expected_begun
    assert places_of(result.episodes) == live[:wanted]
    whole = [i for i, kind in enumerate(kinds[:expected_begun]) if kind != "failed"]
    assert sorted(places_of(result.scored)) == whole, "every group that was scored is told to the curriculum"
    assert len({e.id for e in result.everything}) == len(result.everything) == 2 * expected_begun
    metrics = result.metrics()
    assert metrics["groups/missing"] == max(0, wanted - len(live))
    assert metrics["groups/filtered_all_equal"] == kinds[:expected_begun].count("dead")
    assert metrics["groups/surplus"] == max(0, kinds[:expected_begun].count("live") - wanted)
    assert metrics["groups/refilled"] == expected_begun - min(wanted + extra, reach)


def test_a_replacement_begins_with_the_first_group_that_is_known_to_be_dead() -> None:
    groups = live_groups(8, wanted=3, first=3)
    jobs = groups.begin()
    assert [j.group[-1] for j in jobs] == list("001122")
    assert groups.after([ended(jobs[4], "dead")]) == [], "its mate may still differ"
    assert [j.group[-1] for j in groups.after([ended(jobs[5], "dead")])] == ["3", "3"]
    assert groups.after([ended(jobs[0], "live"), ended(jobs[1], "live")]) == []


def test_without_dead_groups_nothing_is_sampled_in_vain() -> None:
    groups = live_groups(100, wanted=4, first=4)
    result = played(groups, ["live"] * 100, random.Random(0))
    assert groups.begun == 4 and not result.filtered and result.metrics()["train/num_gen_batches"] == 1


def test_a_step_that_falls_short_says_why() -> None:
    bounded = live_groups(100, wanted=4, first=4, most=8)
    played(bounded, ["dead"] * 99 + ["live"], random.Random(0))
    assert bounded.missing == 4
    assert "of 8 groups only 0 differ in reward (4 wanted, max_num_gen_batches allows no more)" in bounded.shortage
    exhausted = live_groups(5, wanted=4, first=4)
    played(exhausted, ["live", "dead", "dead", "dead", "dead"], random.Random(0))
    assert exhausted.missing == 3 and "every row has been tried" in exhausted.shortage


@pytest.mark.parametrize("policy", [FailurePolicy(max_failed_share=0.1), FailurePolicy(loop="raise")])
def test_failures_past_the_budget_stop_the_run_before_every_row_was_tried(policy: FailurePolicy) -> None:
    groups = live_groups(1000, wanted=4, first=4, policy=policy)
    with pytest.raises(RolloutError):
        played(groups, ["failed"] * 1000, random.Random(0))
    assert groups.begun <= 5


def test_a_failure_that_counts_as_zero_is_judged_as_zero() -> None:
    groups = live_groups(2, wanted=1, first=1, policy=replace(LENIENT, reward="zero"))
    jobs = groups.begin()
    unscored = replace(ended(jobs[1], "dead"), reward=None, extra={"reward_error": "it timed out"})
    more = groups.after([replace(ended(jobs[0], "dead"), reward=0.0), unscored])
    assert [place(j.group) for j in more] == [1, 1], "both are 0, so the group is dead"


def test_a_group_that_differs_from_its_greedy_episode_alone_is_live() -> None:
    groups = live_groups(2, wanted=1, first=1, baseline=True)
    jobs = groups.begin()
    assert [job.baseline for job in jobs] == [False, False, True] and jobs[2].episode_id.endswith("-00000-greedy")
    done = [replace(ended(job, "dead"), baseline=job.baseline, reward=float(not job.baseline)) for job in jobs]
    assert groups.after(done) == []
    result = groups.chosen(settle(done, LENIENT))
    assert [e.id for e in result.episodes] == [job.episode_id for job in jobs[:2]]
    assert result.baselines == [done[2]] and result.sampled == result.episodes and len(result.everything) == 3


def test_the_metrics_a_group_may_be_judged_by() -> None:
    one = replace(ended(ROLLOUT.jobs([TASK], 1, 1)[0], "dead"), reward=0.75, reward_info={"score": 1.0, "f1": 0.5})
    found = [metric_of(one, name) for name in ("reward", "seq_reward", "seq_final_reward", "score", "acc", "f1")]
    assert found == [0.75, 0.75, 0.75, 1.0, 1.0, 0.5], "acc is the score where the function reports none"
    assert metric_of(replace(one, reward_info={}), "acc") == 0.75
    assert metric_of(replace(one, reward_info={"score": 1.0, "acc": True}), "acc") == 1.0
    with pytest.raises(MetricError, match=r"metric=em is not a number .* one of its numbers: score, f1"):
        metric_of(one, "em")


class Waves:
    """A runner and a scorer in one: episodes that end together are scored together; most groups have no signal."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    async def run(
        self, jobs: Sequence[Job], sampling: SamplingParams, *, finish: object, timeout: float | None, admit: None
    ) -> list[Episode]:
        self.sizes.append(len(jobs))
        kinds = ["live" if place(job.group) % 3 == 0 else "dead" for job in jobs]
        return [replace(ended(job, kind)) for job, kind in zip(jobs, kinds, strict=True)]

    async def score_batch(self, episodes: Sequence[Episode]) -> list[object]:
        return []


def test_a_reward_function_that_takes_all_at_once_is_refilled_wave_by_wave() -> None:
    waves = Waves()
    one = Rollout(runner=waves, scorer=waves, in_batch=True)  # type: ignore[arg-type]
    groups = live_groups(100, wanted=4, first=4)
    result = asyncio.run(one.collect(groups.begin(), SamplingParams(), refill=groups))
    assert places_of(result.episodes) == [0, 3, 6, 9] and waves.sizes == [8, 4, 4, 2, 2]


COARSE = """
import random, time

def compute_score(data_source, solution_str, ground_truth, extra_info=None):
    time.sleep(random.SystemRandom().random() / 50)
    return {"score": float(sum(map(ord, solution_str)) % 5 == 0), "length": len(solution_str)}
"""


def filtered_run(home: Path, out: Path, *overrides: str) -> Paper:
    """Two episodes a prompt and a reward for one in five: most groups have no signal; in step 1 no group has."""
    reward, paper = out.parent / "coarse.py", Paper()
    reward.write_text(COARSE, encoding="utf-8")
    config = run_config(
        home,
        out,
        f"custom_reward_function.path={reward}",
        "actor_rollout_ref.rollout={n: 2, deterministic: true}",
        "algorithm.filter_groups={enable: true, metric: score, max_num_gen_batches: 3}",
        "data.curriculum.by=success",
        "data.val_files=null",
        *overrides,
    )
    train(config, paper.console)
    return paper


def actor(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return weights(AutoModelForCausalLM.from_pretrained(folder / "checkpoints" / f"global_step_{step}" / "actor"))


def test_a_whole_run_refills_and_is_the_same_to_the_last_bit_however_long_scoring_takes(
    home: Path, tmp_path: Path
) -> None:
    runs = [tmp_path / name for name in ("whole", "cut")]
    paper, _ = (filtered_run(home, run, "trainer.total_training_steps=2") for run in runs)
    shutil.rmtree(runs[1] / "checkpoints" / "global_step_2")
    filtered_run(home, runs[1], "trainer.total_training_steps=2")
    first, second = actor(runs[0], 2), actor(runs[1], 2)
    assert all(torch.equal(first[name], second[name]) for name in first)

    folder = RunFolder(runs[0])
    sampler = json.loads((runs[0] / "checkpoints" / "global_step_2" / "sampler.json").read_text())["state"]
    tried = set()
    for row in folder.read_metrics():
        episodes, metrics = folder.read_episodes(row.step), row.metrics
        tried |= {e.task.id for e in episodes}
        assert metrics["groups/refilled"] > 0 and metrics["groups/begun"] <= 9
        assert metrics["episodes/count"] == len(episodes) == 2 * metrics["groups/begun"]
        rewards = {g: {e.reward for e in episodes if e.group == g} for g in {e.group for e in episodes}}
        live = sum(len(found) > 1 for found in rewards.values())
        assert metrics["groups/filtered_all_equal"] == len(rewards) - live
        assert metrics["groups/missing"] == max(0, 3 - live)
        if live:
            assert metrics["groups/live_share"] == 1
        rows = [next(e.task.id for e in episodes if e.group == g) for g in rewards]
        assert len(set(rows)) == len(rows), "no prompt is tried twice in a step"
    assert tried == set(sampler), "the curriculum learns from what was set aside too"
    assert ("differ in score" in paper.text) == any(r.metrics["groups/missing"] for r in folder.read_metrics())


def test_remax_compares_with_a_greedy_episode_that_is_recorded_and_never_trained_on(home: Path, tmp_path: Path) -> None:
    config = run_config(
        home,
        tmp_path / "run",
        "algorithm.adv_estimator=remax",
        "actor_rollout_ref.rollout.n=1",
        "trainer.total_training_steps=1",
        "data.val_files=null",
    )
    train(config, Paper().console)
    [row] = RunFolder(tmp_path / "run").read_metrics()
    episodes = RunFolder(tmp_path / "run").read_episodes(1)
    greedy = {e.group: e.reward for e in episodes if e.baseline}
    sampled = [e for e in episodes if not e.baseline]
    assert len(greedy) == len(sampled) == 3 == row.metrics["episodes/count"]
    assert [e.reward_info["remax/greedy_reward"] for e in sampled] == [greedy[e.group] for e in sampled]
    expected = [(e.reward or 0.0) - (greedy[e.group] or 0.0) for e in sampled]
    tokens = [sum(s.sampled for s in e.segments) for e in sampled]
    mean = sum(a * t for a, t in zip(expected, tokens, strict=True)) / sum(tokens)
    assert row.metrics["critic/advantages/mean"] == pytest.approx(mean, abs=1e-6)
    trained = sum(t for a, t in zip(expected, tokens, strict=True) if a)
    assert row.metrics["actor/trained_tokens"] == trained and trained > 0
