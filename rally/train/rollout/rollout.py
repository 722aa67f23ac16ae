"""One rollout: samples and scores the episodes of a step, and applies the failure policy to those that failed.

An episode is scored as soon as it ends, while others still run. A failed episode never biases its group: it is retried,
its group is dropped, it counts as 0, or the run stops. An episode that failed by the policy's fault is trained on, and
one in which a tool was unavailable is kept out of the loss and of its group's baseline. All failures are counted; more
than the allowed share stops the run with the reason.
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from types import TracebackType
from typing import Any, Literal, NamedTuple, Protocol

from rally.data import episode_seed
from rally.loops import Admit, Finish, Job, Runner
from rally.rewards import Score, Shaping
from rally.track.timing import Timed, untimed
from rally.train.batch import GREEDY
from rally.types import Episode, RallyError, SamplingParams, StopReason, Task

OnError = Literal["retry", "drop_group", "zero", "raise"]


class RolloutError(RallyError):
    """More episodes failed than the failure policy allows. `episodes` are all of the rollout, for the record."""

    episodes: Sequence[Episode] = ()


@dataclass(frozen=True, kw_only=True)
class FailurePolicy:
    """What happens to a failed episode, and the share of episodes that may fail, or be lost to tools that are
    unavailable. After its retries, an episode that failed by the policy's fault is scored as it is (`retry`): its group
    would otherwise vanish, and with it what the policy should unlearn."""

    loop: OnError = "retry"
    reward: OnError = "drop_group"
    reward_retries: int = 1
    max_failed_share: float = 0.1
    max_outage_share: float = 0.5


@dataclass(frozen=True, kw_only=True)
class RolloutResult:
    """The episodes of a rollout. `episodes` are complete, scored groups. `failed` were dropped or count as 0.
    `set_aside` succeeded, but their group was dropped. `masked` were lost because a tool was unavailable.
    `filtered` are complete groups that are not trained on. `baselines` are the greedy episodes that the others are
    compared with."""

    episodes: list[Episode]
    failed: list[Episode] = field(default_factory=list)
    set_aside: list[Episode] = field(default_factory=list)
    masked: list[Episode] = field(default_factory=list)
    filtered: list[Episode] = field(default_factory=list)
    baselines: list[Episode] = field(default_factory=list)
    filtering: dict[str, float] = field(default_factory=dict)  # metrics of dynamic sampling
    dropped_groups: int = 0

    @property
    def scored(self) -> list[Episode]:
        """The episodes of all complete groups, trained on or not."""
        return self.episodes + self.filtered

    @property
    def everything(self) -> list[Episode]:
        whole = self.scored + self.baselines
        kept = {e.id for e in whole}
        return whole + [e for e in self.failed if e.id not in kept] + self.set_aside + self.masked

    @property
    def sampled(self) -> list[Episode]:
        return [e for e in self.everything if not e.baseline]

    def metrics(self) -> dict[str, float]:
        loops = sum(e.stop_reason is StopReason.ERROR for e in self.failed)
        return {
            "failures/loop": float(loops),
            "failures/reward": float(len(self.failed) - loops),
            "failures/policy": float(sum(by_policy(e) for e in self.everything)),
            "failures/outage": float(len(self.masked)),
            "failures/dropped_groups": float(self.dropped_groups),
            "failures/set_aside": float(len(self.set_aside)),
            **self.filtering,
        }


class Refill(Protocol):
    """Starts further groups as others end."""

    def after(self, episodes: Sequence[Episode]) -> list[Job]:
        """Record episodes that have ended, scored if possible. Returns the jobs to start now."""
        ...

    def chosen(self, result: RolloutResult) -> RolloutResult:
        """The finished rollout, with the groups that are not trained on moved to `filtered`."""
        ...


class EpisodeScorer(Protocol):
    """Scores episodes while it is open."""

    async def __aenter__(self) -> Any: ...

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    async def score(self, episode: Episode) -> Score: ...

    async def score_batch(self, episodes: Sequence[Episode]) -> list[Score]: ...


class NoScorer:
    """The scorer of a process in which nothing is scored."""

    async def __aenter__(self) -> NoScorer:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """There is nothing to close."""

    async def score(self, episode: Episode) -> Score:
        raise AssertionError("episodes are scored elsewhere")

    async def score_batch(self, episodes: Sequence[Episode]) -> list[Score]:
        raise AssertionError("episodes are scored elsewhere")


@dataclass(kw_only=True)
class Rollout:
    """Runs agent loops and the scorer over jobs."""

    runner: Runner
    scorer: EpisodeScorer
    policy: FailurePolicy = field(default_factory=FailurePolicy)
    seed: int = 0
    shaping: Shaping = field(default_factory=Shaping)
    step_timeout: float | None = None  # seconds after which running training episodes end with what they have
    in_batch: bool = False  # score all episodes together, after the last has ended
    scored_by_runner: bool = False  # loop workers score what they play

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[None]:
        """The processes of the rollout run inside."""
        async with AsyncExitStack() as stack:
            if not self.scored_by_runner:
                await stack.enter_async_context(self.scorer)
            if isinstance(self.runner, AbstractAsyncContextManager):
                await stack.enter_async_context(self.runner)
            yield

    def jobs(
        self,
        tasks: Iterable[Task],
        n: int,
        step: int,
        validate: bool = False,
        *,
        first: int = 0,
        baseline: bool = False,
        suffix: str = "",
    ) -> list[Job]:
        """`n` jobs per task, and a greedy one if `baseline`. `first` is the place of the first task. Seeds depend only
        on (seed, step, place, sample); those of validation are the same in every step. `suffix` distinguishes the
        episode and group names of a further validation pass. A task that is a match has a group for each seat."""
        kind = "v" if validate else "t"
        return [
            Job(
                task=seat.task,
                episode_id=f"{kind}{step:06d}-{place:05d}{seat.apart}-{'greedy' if k == n else k}",
                group=f"{kind}{step:06d}-{place:05d}{seat.apart}",
                seed=episode_seed(self.seed + (1 if validate else 0), 0 if validate else step, place, k + seat.offset),
                step=step,
                validate=validate,
                check_tokens=k == 0,  # one of a group is enough, and the full rendering is slow
                baseline=k == n,
                place=place,
            )
            for place, task in enumerate(tasks, first)
            for k in range(n + baseline)
            for seat in _seats(task, f"{kind}{step:06d}-{place:05d}-{k}", (n + baseline), suffix)
        ]

    async def collect(
        self,
        jobs: Sequence[Job],
        sampling: SamplingParams,
        *,
        on_done: Callable[[], None] = lambda: None,
        refill: Refill | None = None,
        timed: Timed = untimed,
        admit: Admit | None = None,
    ) -> RolloutResult:
        async def finish(episode: Episode) -> Episode:
            if not self.in_batch:
                episode = self.shaping.apply(episode if self.scored_by_runner else await self.score(episode))
            on_done()
            return episode

        try:
            timeout = None if any(job.validate for job in jobs) else self.step_timeout
            if self.in_batch:
                episodes = await self._in_batches(jobs, sampling, finish, refill, timeout, timed, admit)
            else:
                more = None if refill is None else lambda episode: refill.after([episode])
                episodes = await self.runner.run(jobs, sampling, finish=finish, more=more, timeout=timeout, admit=admit)
        except* RallyError as group:
            raise group.exceptions[0] from None
        try:
            result = settle(episodes, self.policy)
        except RolloutError as stop:
            stop.episodes = episodes
            raise
        return result if refill is None else refill.chosen(result)

    async def _in_batches(
        self,
        jobs: Sequence[Job],
        sampling: SamplingParams,
        finish: Finish,
        refill: Refill | None,
        timeout: float | None,
        timed: Timed,
        admit: Admit | None,
    ) -> list[Episode]:
        """Run jobs and score them together; repeat with the jobs that `refill` adds."""
        episodes: list[Episode] = []
        began = time.perf_counter()
        while jobs:
            left = None if timeout is None else max(0.0, timeout - (time.perf_counter() - began))
            ended = await self.runner.run(jobs, sampling, finish=finish, timeout=left, admit=admit)
            with timed("reward"):
                scored = [self.shaping.apply(episode) for episode in await self._score_together(ended)]
            jobs = [] if refill is None else refill.after(scored)
            episodes += scored
        return episodes

    async def score(self, episode: Episode) -> Episode:
        for _ in range(self._tries):
            if self._can_be_scored(episode):
                episode = with_score(episode, await self.scorer.score(episode))
        return episode

    async def _score_together(self, episodes: Sequence[Episode]) -> list[Episode]:
        done = list(episodes)
        for _ in range(self._tries):
            left = [i for i, episode in enumerate(done) if self._can_be_scored(episode)]
            scores = await self.scorer.score_batch([done[i] for i in left])
            for i, score in zip(left, scores, strict=True):
                done[i] = with_score(done[i], score)
        return done

    def _can_be_scored(self, episode: Episode) -> bool:
        """Whether the reward function has to score the episode. One that failed by the policy's fault is scored, too,
        unless the failure policy decides about it."""
        whole = episode.error is None or (by_policy(episode) and self.policy.loop == "retry")
        return whole and episode.reward is None

    @property
    def _tries(self) -> int:
        return 1 + (self.policy.reward_retries if self.policy.reward == "retry" else 0)


class _Seat(NamedTuple):
    task: Task
    apart: str = ""  # a part of the names of its episodes and group
    offset: int = 0  # of its seeds


def _seats(task: Task, match: str, samples: int, suffix: str) -> list[_Seat]:
    """The seats of a task, usually one. Those of a match meet by its name."""
    if task.prompt or task.row.get("seats", 1) == 1:
        return [_Seat(task, f"-{suffix}" if suffix else "")]
    return [
        _Seat(replace(task, row={**task.row, "seat": seat, "match": match}), f"-seat{seat}", seat * samples)
        for seat in range(task.row["seats"])
    ]


def with_score(episode: Episode, score: Score) -> Episode:
    """The episode with its reward, or with the error of the reward function."""
    timings = {**episode.timings, "score": score.seconds}
    if score.reward is None:
        return replace(episode, timings=timings, extra={**episode.extra, "reward_error": score.error})
    extra = {key: value for key, value in episode.extra.items() if key != "reward_error"}
    return replace(episode, reward=score.reward, reward_info=score.info, timings=timings, extra=extra)


FAULTY_EPISODES = 8  # fewer episodes than this may all fail by the policy's fault


def settle(episodes: Sequence[Episode], policy: FailurePolicy) -> RolloutResult:
    """Apply the failure policy to a finished rollout."""
    masked = [e for e in episodes if e.outage is not None]
    failed = [e for e in episodes if e.reward is None and e.outage is None]
    _check_failures(episodes, failed, masked, policy)
    groups: dict[str, list[Episode]] = {}
    for episode in episodes:
        groups.setdefault(episode.group, []).append(episode)
    kept = {name: usable(members, policy) for name, members in groups.items()}
    dropped = [name for name, members in kept.items() if members is None]
    mates = [e for name in dropped for e in groups[name] if e.reward is not None and e.outage is None]
    sampled, baselines = _with_baselines([e for members in kept.values() for e in members or ()])
    return RolloutResult(
        episodes=sampled,
        failed=failed,
        set_aside=mates,
        masked=masked,
        baselines=baselines,
        dropped_groups=len(dropped),
    )


def usable(group: Sequence[Episode], policy: FailurePolicy) -> list[Episode] | None:
    """The episodes of a finished group to train on, all with a reward; None if the group is dropped. It is, if an
    episode failed and does not count as 0, if an outage asks for it or hit the greedy episode, or if outages left a
    single episode, which cannot be compared with another."""
    left = [e for e in group if e.outage is None]
    if any(e.outage == "drop_group" or (e.outage is not None and e.baseline) for e in group):
        return None
    if any(e.reward is None and not counts_zero(e, policy) for e in left):
        return None
    before, after = (sum(not e.baseline for e in some) for some in (group, left))
    if after < min(2, before):
        return None
    return [e.scored(0.0, e.reward_info) if e.reward is None else e for e in left]


def _check_failures(
    episodes: Sequence[Episode], failed: Sequence[Episode], masked: Sequence[Episode], policy: FailurePolicy
) -> None:
    for episode in failed:
        if policy_for(episode, policy) == "raise":
            raise RolloutError(
                f"episode {episode.id} failed, and the failure policy is to stop the run: {_reason(episode)}"
            )
    if len(masked) > policy.max_outage_share * len(episodes) or len(masked) == len(episodes) > 0:
        raise RolloutError(
            f"a tool was unavailable in {len(masked)} of {len(episodes)} episodes (rollout.max_outage_share="
            f"{policy.max_outage_share}), the first time with: {masked[0].extra['tool_outage']['first']}; repair the "
            "tool, or set on_outage=count to train on such episodes"
        )
    faults = [e for e in episodes if by_policy(e)]
    if len(faults) == len(episodes) >= FAULTY_EPISODES:
        raise RolloutError(
            f"all {len(episodes)} episodes failed in the agent's code after the policy had answered, so the code may "
            f"be at fault; the first failure: {_reason(faults[0])}"
        )
    others = [e for e in failed if not by_policy(e)]
    if len(others) > policy.max_failed_share * len(episodes):
        raise RolloutError(
            f"{len(others)} of {len(episodes)} episodes failed, more than rollout.max_failed_share="
            f"{policy.max_failed_share} allows; the first failure: {_reason(others[0])}"
        )


def by_policy(episode: Episode) -> bool:
    """Whether the episode failed by the policy's fault."""
    return episode.stop_reason is StopReason.ERROR and episode.extra.get("fault") == "policy"


class _Compared(NamedTuple):
    sampled: list[Episode]
    baselines: list[Episode]


def _with_baselines(episodes: Sequence[Episode]) -> _Compared:
    """Separate the greedy episodes, and record their rewards in the others of their groups."""
    baselines = [e for e in episodes if e.baseline]
    earned = {e.group: {GREEDY: e.reward} for e in baselines}
    sampled = [replace(e, reward_info=e.reward_info | earned.get(e.group, {})) for e in episodes if not e.baseline]
    return _Compared(sampled, baselines)


def counts_zero(episode: Episode, policy: FailurePolicy) -> bool:
    """Whether a failed episode stays, with a reward of 0."""
    return policy_for(episode, policy) == "zero" and bool(episode.segments)


def policy_for(episode: Episode, policy: FailurePolicy) -> OnError:
    return policy.loop if episode.stop_reason is StopReason.ERROR else policy.reward


def _reason(episode: Episode) -> str:
    return str(episode.error or episode.extra.get("reward_error") or "no reason was recorded")


@dataclass(frozen=True)
class ValidationPass:
    """One way to sample the validation set: `n` samples per prompt; `suffix` keeps its metrics apart."""

    sampling: SamplingParams
    n: int
    suffix: str = ""
