"""A failed episode never biases its group: the failure policy decides, it is counted, and past the budget the run
stops."""

import asyncio
import random
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field, replace

import pytest
from train_cases import TASK, episode, segment

from rally.loops import Job
from rally.rewards import RewardError, Score
from rally.train.rollout.rollout import FailurePolicy, Rollout, RolloutError, RolloutResult, settle
from rally.types import Episode, SamplingParams, StopReason

SAMPLING = SamplingParams()
LENIENT = FailurePolicy(max_failed_share=1.0)


def good(name: str, group: str, reward: float | None = 1.0) -> Episode:
    return episode(name, group, reward, segment(random.Random(name), "sss"))


def broken(name: str, group: str) -> Episode:
    return episode(name, group, None, stop_reason=StopReason.ERROR, error="KeyError: 'x'")


def unscored(name: str, group: str) -> Episode:
    return replace(good(name, group, None), extra={"reward_error": "it timed out"})


def ids(episodes: Sequence[Episode]) -> list[str]:
    return [e.id for e in episodes]


@dataclass
class FakeRunner:
    """Ends each job as `endings` says, by episode id; all others succeed."""

    endings: dict[str, Callable[[str, str], Episode]] = field(default_factory=dict)
    reward: float | None = None

    async def run(
        self,
        jobs: Sequence[Job],
        sampling: SamplingParams,
        *,
        finish: Callable[[Episode], Awaitable[Episode]],
        more: None,
        timeout: float | None,
        admit: None,
    ) -> list[Episode]:
        ended = [
            self.endings.get(j.episode_id, lambda a, b: good(a, b, self.reward))(j.episode_id, j.group) for j in jobs
        ]
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(finish(e)) for e in ended]
        return [task.result() for task in tasks]


@dataclass
class FakeScorer:
    """Fails the first `failures[id]` times for an episode, then gives 0.5."""

    failures: dict[str, int] = field(default_factory=dict)
    asked: list[str] = field(default_factory=list)

    async def score(self, one: Episode) -> Score:
        self.asked.append(one.id)
        if self.asked.count(one.id) <= self.failures.get(one.id, 0):
            return Score(error="it timed out")
        return Score(reward=0.5, info={"score": 0.5, "acc": 1}, seconds=0.25)


def rollout(policy: FailurePolicy = LENIENT, runner: FakeRunner | None = None, **failures: int) -> Rollout:
    scorer = FakeScorer({name.replace("_", "-"): n for name, n in failures.items()})
    return Rollout(runner=runner or FakeRunner(), scorer=scorer, policy=policy)  # type: ignore[arg-type]


def collect(one: Rollout, tasks: int = 2, n: int = 2) -> RolloutResult:
    return asyncio.run(one.collect(one.jobs([TASK] * tasks, n, step=1), SAMPLING))


T00, T01, T10, T11 = "t000001-00000-0", "t000001-00000-1", "t000001-00001-0", "t000001-00001-1"


def test_every_job_becomes_a_scored_episode() -> None:
    done: list[int] = []
    one = rollout()
    jobs = one.jobs([TASK, TASK], 2, step=1)
    result = asyncio.run(one.collect(jobs, SAMPLING, on_done=lambda: done.append(1)))
    assert ids(result.episodes) == [T00, T01, T10, T11] and len(done) == 4
    assert [e.reward for e in result.episodes] == [0.5] * 4
    assert result.episodes[0].reward_info == {"score": 0.5, "acc": 1}
    assert result.episodes[0].timings["score"] == 0.25
    assert set(result.metrics().values()) == {0.0}


def test_an_episode_that_brings_its_own_reward_is_not_scored_again() -> None:
    one = rollout(runner=FakeRunner(reward=0.75))
    assert [e.reward for e in collect(one).episodes] == [0.75] * 4
    assert one.scorer.asked == []  # type: ignore[attr-defined]


def test_seeds_depend_on_step_place_and_sample_and_validation_keeps_its_own() -> None:
    one = rollout()
    first, again, later = (one.jobs([TASK] * 2, 2, step=s) for s in (1, 1, 2))
    assert [j.seed for j in first] == [j.seed for j in again]
    assert len({j.seed for j in [*first, *later]}) == 8
    shown = [one.jobs([TASK] * 2, 2, step=s, validate=True) for s in (0, 5)]
    assert [j.seed for j in shown[0]] == [j.seed for j in shown[1]], "a validation is compared with the one before"
    assert not {j.seed for j in shown[0]} & {j.seed for j in first}
    assert {j.group for j in first} == {"t000001-00000", "t000001-00001"}
    assert [j.check_tokens for j in first] == [True, False, True, False]


def test_a_failed_loop_takes_its_whole_group_with_it_and_is_kept_for_the_record() -> None:
    result = collect(rollout(runner=FakeRunner({T01: broken})))
    assert ids(result.episodes) == [T10, T11]
    assert ids(result.failed) == [T01] and ids(result.set_aside) == [T00]
    assert sorted(ids(result.everything)) == [T00, T01, T10, T11]
    assert result.metrics() == {
        "failures/loop": 1.0,
        "failures/reward": 0.0,
        "failures/policy": 0.0,
        "failures/outage": 0.0,
        "failures/dropped_groups": 1.0,
        "failures/set_aside": 1.0,
    }


def test_a_failed_reward_drops_the_group_by_default() -> None:
    result = collect(rollout(t000001_00001_0=99))
    assert ids(result.episodes) == [T00, T01] and result.metrics()["failures/reward"] == 1
    assert result.failed[0].extra["reward_error"] == "it timed out"


def test_retry_asks_the_reward_again_and_no_other_policy_does() -> None:
    patient = rollout(replace(LENIENT, reward="retry"), t000001_00000_0=1)
    assert ids(collect(patient).episodes) == [T00, T01, T10, T11]
    assert patient.scorer.asked.count(T00) == 2  # type: ignore[attr-defined]
    hasty = rollout(t000001_00000_0=1)
    assert ids(collect(hasty).episodes) == [T10, T11]


def test_retry_that_does_not_help_drops_the_group() -> None:
    stubborn = rollout(replace(LENIENT, reward="retry", reward_retries=2), t000001_00000_0=99)
    assert ids(collect(stubborn).episodes) == [T10, T11]
    assert stubborn.scorer.asked.count(T00) == 3  # type: ignore[attr-defined]


def test_zero_keeps_the_episode_with_reward_zero_and_counts_it() -> None:
    result = collect(rollout(replace(LENIENT, reward="zero"), t000001_00000_1=99))
    assert [(e.id, e.reward) for e in result.episodes] == [(T00, 0.5), (T01, 0.0), (T10, 0.5), (T11, 0.5)]
    assert result.metrics()["failures/reward"] == 1 and result.dropped_groups == 0
    assert len(result.everything) == 4, "an episode that was zeroed is in the record once"


def test_zero_cannot_train_on_an_episode_without_tokens() -> None:
    result = settle([broken("a0", "a"), good("a1", "a"), good("b0", "b")], replace(LENIENT, loop="zero"))
    assert ids(result.episodes) == ["b0"] and result.dropped_groups == 1


@pytest.mark.parametrize(
    ("policy", "failed", "words"),
    [
        (replace(LENIENT, loop="raise"), broken, "KeyError: 'x'"),
        (replace(LENIENT, reward="raise"), unscored, "it timed out"),
    ],
)
def test_raise_stops_with_the_reason(policy: FailurePolicy, failed: Callable[[str, str], Episode], words: str) -> None:
    with pytest.raises(RolloutError, match=f"episode a1 failed, and the failure policy is to stop the run: {words}"):
        settle([good("a0", "a"), failed("a1", "a")], policy)


def test_each_kind_of_failure_has_its_own_policy() -> None:
    policy = replace(LENIENT, loop="raise", reward="drop_group")
    assert ids(settle([unscored("a0", "a"), good("b0", "b")], policy).episodes) == ["b0"]


def test_past_the_budget_the_run_stops_and_says_what_the_first_failure_said() -> None:
    episodes = [good(f"a{i}", "a") for i in range(8)] + [broken("b0", "b"), broken("b1", "b")]
    kept = settle(episodes, FailurePolicy(max_failed_share=0.2))
    assert len(kept.episodes) == 8, "exactly the share is still allowed"
    with pytest.raises(RolloutError, match=r"2 of 10 episodes failed, more than rollout.max_failed_share=0.19") as stop:
        settle(episodes, FailurePolicy(max_failed_share=0.19))
    assert "the first failure: KeyError: 'x'" in str(stop.value)


def test_the_budget_holds_for_zeroed_episodes_too() -> None:
    with pytest.raises(RolloutError, match="2 of 2 episodes failed"):
        settle([unscored("a0", "a"), unscored("a1", "a")], FailurePolicy(reward="zero", max_failed_share=0.5))


def test_a_mistake_of_the_user_comes_out_as_itself() -> None:
    """The error is not an exception group: the command line shows its one sentence."""

    class Refusing(FakeScorer):
        async def score(self, one: Episode) -> Score:
            raise RewardError("there is no reward for data source x")

    one = Rollout(runner=FakeRunner(), scorer=Refusing(), policy=LENIENT)  # type: ignore[arg-type]
    with pytest.raises(RewardError, match="there is no reward for data source x"):
        collect(one)
    with pytest.raises(RolloutError, match=r"more than rollout.max_failed_share=0.1"):
        collect(rollout(FailurePolicy(), FakeRunner({T00: broken})))
