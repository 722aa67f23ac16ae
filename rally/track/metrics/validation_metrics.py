"""Metrics of a validation, as a pure function of its episodes: mean, best, worst and majority of k samples."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cache, lru_cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rally.track.metrics.episode_metrics import agent_metrics
from rally.track.metrics.statistics import Metrics, mean, spread
from rally.types import Episode, StopReason, ToolStatus, finite_number

RESAMPLES, SEED = 1000, 42

Ints = NDArray[np.int64]


# Cached, because many prompts have equal samples: thousands take seconds instead of a minute.
@lru_cache(maxsize=2**16)
def statistics(values: tuple[float, ...], answers: tuple[int, ...] | None, k: int) -> Mapping[str, float]:
    """Of the samples of one prompt: mean, standard deviation, and the best, worst and majority of n for n up to k."""
    values_S = np.array(values)
    result = {f"mean@{k}": float(values_S.mean())}
    if k == 1:
        return result
    result[f"std@{k}"] = float(values_S.std())
    for n in _sizes(k):
        places_nR = _draws(len(values_S), n)
        drawn_nR = values_S[places_nR]
        outcomes = {"best": drawn_nR.max(0), "worst": drawn_nR.min(0)}
        if answers is not None:
            outcomes["maj"] = values_S[_majority(np.array(answers), places_nR)]
        for rule, outcome_R in outcomes.items():
            result[f"{rule}@{n}/mean"] = float(outcome_R.mean())
            result[f"{rule}@{n}/std"] = float(outcome_R.std())
    return result


def _sizes(k: int) -> list[int]:
    """2, 4, 8, ... below k, and k."""
    return [*(2**i for i in range(1, k.bit_length()) if 2**i < k), k]


@cache
def _draws(size: int, n: int) -> Ints:
    """`n` of `size` indices, drawn with replacement, for each resample."""
    # The legacy generator, as in other trainers, so that equal samples give equal numbers.
    return np.ascontiguousarray(np.random.RandomState(SEED).choice(size, (RESAMPLES, n)).T)


def _majority(answers_S: Ints, places_nR: Ints) -> Ints:
    """For each resample, the index of the first drawn sample with the most frequent answer; ties go to the first
    drawn."""
    drawn_nR, columns_R = answers_S[places_nR], np.arange(RESAMPLES)
    keys_nR = drawn_nR * RESAMPLES + columns_R  # one number for each answer in each resample
    votes = np.bincount(keys_nR.ravel(), minlength=len(answers_S) * RESAMPLES)
    chosen: Ints = places_nR[votes[keys_nR].argmax(0), columns_R]
    return chosen


CORE_STATISTICS = ("mean", "best", "maj")


def validation_metrics(episodes: Sequence[Episode], k: int, suffix: str = "") -> Metrics:
    """`val-core/<data_source>/<var>/mean@k` and its relatives, averaged over prompts (groups).

    Variables are `reward` and every numeric entry of `reward_info`; the core one is `acc` where a data source has it,
    else `reward`. A `suffix` such as "greedy" is appended to the names, so that two sampling modes stay separate.
    """
    metrics: Metrics = {}
    for source, members in _by(episodes, lambda e: e.task.data_source).items():
        metrics |= _scores(source, [e for e in members if e.reward is not None and e.outage is None], k)
        metrics |= _behaviour(f"val-aux/{source}", members)
    if episodes:
        metrics["val-aux/unscored"] = sum(e.reward is None for e in episodes)
        metrics["val-aux/masked"] = sum(e.outage is not None for e in episodes)
    metrics |= spread("val-aux/num_turns", [e.num_turns for e in episodes])
    metrics |= {f"val-aux/{name}": value for name, value in agent_metrics(episodes).items()}
    return {f"{name}/{suffix}" if suffix else name: value for name, value in metrics.items()}


def _scores(source: str, episodes: Sequence[Episode], k: int) -> Metrics:
    prompts = _by(episodes, lambda e: e.group).values()
    names = {name: None for episode in episodes for name in _numbers(episode)}  # a dict keeps their order
    core = "acc" if "acc" in names else "reward"
    metrics: Metrics = {}
    for name in names:
        for statistic, value in _over_prompts(_samples(prompts, name), k).items():
            rule, _, size = statistic.partition("@")
            is_core = name == core and rule in CORE_STATISTICS and size.split("/")[0] == str(k)
            metrics[f"{'val-core' if is_core else 'val-aux'}/{source}/{name}/{statistic}"] = value
    return metrics


def _behaviour(prefix: str, episodes: Sequence[Episode]) -> Metrics:
    """Turns, tool use and stop reasons of one data source."""
    metrics = spread(f"{prefix}/num_turns", [e.num_turns for e in episodes])
    metrics[f"{prefix}/tool/call_rate"] = mean([bool(e.tool_results) for e in episodes])
    statuses = Counter(result.status for e in episodes for result in e.tool_results)
    if statuses:
        metrics[f"{prefix}/tool/success_rate"] = statuses[ToolStatus.OK] / statuses.total()
    reasons = Counter(e.stop_reason for e in episodes)
    return metrics | {f"{prefix}/stop/{reason}": reasons[reason] / len(episodes) for reason in StopReason}


class _Samples(NamedTuple):
    """One variable of one prompt's samples, and the number of each sample's answer if the reward reports a `pred`."""

    values: tuple[float, ...]
    answers: tuple[int, ...] | None


def _samples(prompts: Iterable[Sequence[Episode]], name: str) -> Iterator[_Samples]:
    for episodes in prompts:
        having = [(value, e) for e in episodes if (value := _numbers(e).get(name)) is not None]
        if having:
            voted = any("pred" in e.reward_info for _, e in having)
            answers = _numbered([repr(e.reward_info.get("pred")) for _, e in having]) if voted else None
            yield _Samples(tuple(value for value, _ in having), answers)


def _numbered(answers: Sequence[str]) -> tuple[int, ...]:
    """Numbers for answers, in order of appearance; equal answers get equal numbers."""
    numbers: dict[str, int] = {}
    return tuple(numbers.setdefault(answer, len(numbers)) for answer in answers)


def _over_prompts(prompts: Iterable[_Samples], k: int) -> Metrics:
    """Each statistic, averaged over the prompts that have it."""
    values_of: dict[str, list[float]] = defaultdict(list)
    for samples in prompts:
        for statistic, value in statistics(samples.values, samples.answers, k).items():
            values_of[statistic].append(value)
    return {statistic: mean(values) for statistic, values in values_of.items()}


def _numbers(episode: Episode) -> Mapping[str, float]:
    assert episode.reward is not None, "only scored episodes have numbers"
    info = {k: number for k, v in episode.reward_info.items() if (number := finite_number(v)) is not None}
    return info | {"reward": episode.reward}


def _by(episodes: Iterable[Episode], key: Callable[[Episode], str]) -> dict[str, list[Episode]]:
    parts: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        parts[key(episode)].append(episode)
    return parts
