"""Dynamic sampling: a step trains on the first groups, in the order of their prompts, whose rewards are not all equal.

A group with equal rewards has no gradient. As soon as one ends, another prompt starts in the same rollout. Every group
that was started is awaited, and groups are chosen by the order of their prompts, not by when they end. So neither short
episodes nor fast tools are favoured, and the batch does not depend on timing.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from rally.loops import Job
from rally.train.rollout.rollout import FailurePolicy, RolloutResult, by_policy, policy_for, usable
from rally.types import Episode, RallyError, finite_number

REWARD_NAMES = ("reward", "seq_reward", "seq_final_reward")


class MetricError(RallyError):
    """The rewards lack the metric that groups are filtered by."""


@dataclass(frozen=True, kw_only=True)
class FilterSettings:
    """`metric` must differ within a group. A step starts with `first` prompts and uses at most `most`."""

    metric: str
    first: int
    most: int | None = None


@dataclass
class LiveGroups:
    """The groups of one step. `wanted` live ones fill it. There are `places` prompts in a fixed order;
    `jobs_at(first, count)` returns the jobs of `count` of them."""

    settings: FilterSettings
    wanted: int
    places: int
    jobs_at: Callable[[int, int], list[Job]]
    policy: FailurePolicy
    begun: int = 0
    live: dict[str, bool] = field(default_factory=dict)
    _running: dict[str, int] = field(default_factory=dict)  # episodes that still run, by group
    _ended: dict[str, list[Episode]] = field(default_factory=dict)
    _episodes: int = 0
    _failures: int = 0
    _outages: int = 0
    _hopeless: bool = False

    def begin(self) -> list[Job]:
        return self._begin(min(self.settings.first, self._most))

    def after(self, episodes: Sequence[Episode]) -> list[Job]:
        """Record ended episodes. Returns jobs of further prompts if the running groups can no longer fill the step."""
        for episode in episodes:
            self._note(episode)
        possible = sum(self.live.values()) + len(self._running)
        lost = self._outages > self.policy.max_outage_share * self._episodes
        if self._hopeless or lost or self._failures > self.policy.max_failed_share * self._episodes:
            return []  # the run is about to stop with an error
        return self._begin(min(self.wanted - possible, self._most - self.begun))

    def chosen(self, result: RolloutResult) -> RolloutResult:
        """Keep the first live groups. Groups with equal rewards and surplus groups are filtered."""
        groups = list(dict.fromkeys(e.group for e in result.episodes))
        kept = set([g for g in groups if self.live[g]][: self.wanted])
        return replace(
            result,
            episodes=[e for e in result.episodes if e.group in kept],
            filtered=[e for e in result.episodes if e.group not in kept],
            filtering=self._metrics(),
        )

    @property
    def shortage(self) -> str:
        """The warning for a step with too few live groups."""
        settings, have = self.settings, self.wanted - self.missing
        why = "every row has been tried" if self._most == self.places else "max_num_gen_batches allows no more"
        return (
            f"of {self.begun} groups only {have} differ in {settings.metric} ({self.wanted} wanted, {why}); the "
            "step trains on these; groups/missing counts the rest"
        )

    @property
    def missing(self) -> int:
        """How many live groups the step lacks."""
        return max(0, self.wanted - sum(self.live.values()))

    @property
    def _most(self) -> int:
        return self.places if self.settings.most is None else min(self.settings.most, self.places)

    def _metrics(self) -> dict[str, float]:
        live = sum(self.live.values())
        return {
            "train/num_gen_batches": self.begun / self.settings.first,
            "groups/begun": float(self.begun),
            "groups/refilled": float(self.begun - min(self.settings.first, self._most)),
            "groups/filtered_all_equal": float(len(self.live) - live),
            "groups/surplus": float(max(0, live - self.wanted)),
            "groups/missing": float(self.missing),
        }

    def _begin(self, count: int) -> list[Job]:
        count = max(0, count)
        jobs = self.jobs_at(self.begun, count)
        self.begun += count
        self._episodes += len(jobs)
        for job in jobs:
            self._running[job.group] = self._running.get(job.group, 0) + 1
        return jobs

    def _note(self, episode: Episode) -> None:
        group = episode.group
        self._ended.setdefault(group, []).append(episode)
        failed = episode.reward is None and episode.outage is None
        self._outages += episode.outage is not None
        self._failures += failed and not by_policy(episode)
        self._hopeless |= failed and policy_for(episode, self.policy) == "raise"
        self._running[group] -= 1
        if not self._running[group]:
            del self._running[group]
            left = usable(self._ended.pop(group), self.policy)
            if left is not None:
                self.live[group] = len({metric_of(e, self.settings.metric) for e in left}) > 1


def metric_of(episode: Episode, metric: str) -> float:
    """The metric of an episode by which its group is filtered. A failed episode that counts as 0 has 0."""
    if episode.reward is None:
        return 0.0
    info = episode.reward_info
    if metric in REWARD_NAMES:
        return episode.reward
    score = info.get("score", episode.reward)
    value = info.get(metric, score if metric in ("score", "acc") else None)
    if not isinstance(value, (bool, int, float)) or (number := finite_number(value)) is None:
        known = ", ".join(key for key, number in info.items() if isinstance(number, (bool, int, float)))
        raise MetricError(
            f"algorithm.filter_groups.metric={metric} is not a number in the reward of episode {episode.id}; "
            f"use reward, or one of its numbers: {known or 'none'}"
        )
    return number
