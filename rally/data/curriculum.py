"""Curricula: samplers that choose the rows of a step by difficulty, as a pure function of (seed, step) and their state.

`EasyToHard` starts with the easiest rows, by a number in the row, and adds harder ones. `SolvedSometimes` measures
success rates and prefers rows that are solved sometimes, because a group in which all or no episodes succeed has no
advantage to learn from.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from rally.data.messages import shown
from rally.data.row_files import DataError
from rally.data.samplers import RowSampler, SamplerSettings, generator
from rally.data.tasks import TaskSet
from rally.types import Episode, Task

_NEWEST = 0.5
"""The weight of the newest measurement of a row in its moving average."""


@dataclass(frozen=True, kw_only=True)
class EasyToHardOptions:
    """`field` is a dotted name in the row. The first step draws from the easiest `start_share` of the rows; the share
    grows linearly to 1 after `grow_steps` steps."""

    field: str
    start_share: float
    grow_steps: int


class EasyToHard(RowSampler):
    """Draws from a growing share of the easiest rows; once all rows are open, uniformly in epochs."""

    def __init__(self, tasks: TaskSet, settings: SamplerSettings, options: EasyToHardOptions) -> None:
        super().__init__(tasks, settings)
        self.options = options
        self.difficulty = {task.id: _difficulty(task, options.field) for task in tasks}
        self.order = np.argsort(list(self.difficulty.values()), kind="stable")

    def batch(self, step: int) -> Sequence[int]:
        count = self.open_rows(step)
        if count == len(self.order):
            return super().batch(step)
        chosen = generator(self.settings.seed, step).choice(count, self.settings.batch_size, replace=False)
        rows: list[int] = self.order[chosen].tolist()
        return rows

    def further(self, step: int) -> Sequence[int]:
        """The other open rows in random order, then the rows that are not open yet, easiest first."""
        count = self.open_rows(step)
        harder: list[int] = self.order[count:].tolist()
        opened = set(self.order[:count].tolist())
        return [row for row in super().further(step) if row in opened] + harder

    def open_rows(self, step: int) -> int:
        """How many rows a step draws from, at least a batch."""
        start = self.options.start_share
        share = min(1.0, start + (1.0 - start) * (step - 1) / self.options.grow_steps)
        return min(len(self.order), max(self.settings.batch_size, round(share * len(self.order))))

    def update(self, step: int, episodes: Sequence[Episode]) -> Mapping[str, float] | None:
        seen = [self.difficulty[episode.task.id] for episode in episodes]
        metrics = {"open_share": self.open_rows(step) / len(self.order)}
        return metrics | ({"difficulty": math.fsum(seen) / len(seen)} if seen else {})


@dataclass(frozen=True, kw_only=True)
class SolvedSometimesOptions:
    """Rows with a success rate from `low` to `high` fill the batch except for the share `explore`. An episode is solved
    if its `acc`, or its reward if it has none, is at least `solved_at`."""

    low: float
    high: float
    explore: float
    solved_at: float


class SolvedSometimes(RowSampler):
    """Prefers rows that are solved sometimes and explores the others: first those never tried, then those tried longest
    ago, whose success rate may have changed since."""

    def __init__(self, tasks: TaskSet, settings: SamplerSettings, options: SolvedSometimesOptions) -> None:
        super().__init__(tasks, settings)
        if len(tasks) < settings.batch_size:
            raise DataError(
                f"data.curriculum.by=success chooses among rows, and {len(tasks)} are fewer than "
                f"data.train_batch_size={settings.batch_size}; lower it"
            )
        self.options = options
        self.places = {task.id: place for place, task in enumerate(tasks)}
        self.rate = np.full(len(tasks), np.nan)  # the share of episodes that solved a row; nan: never tried
        self.last = np.zeros(len(tasks), dtype=np.int64)  # the step a row was last tried at

    def batch(self, step: int) -> Sequence[int]:
        return self._ranked(step)[: self.settings.batch_size]

    def further(self, step: int) -> Sequence[int]:
        """The remaining target rows, then the remaining others."""
        return self._ranked(step)[self.settings.batch_size :]

    def _ranked(self, step: int) -> list[int]:
        """All rows: first those of the batch, then those to try after it."""
        order = generator(self.settings.seed, step).permutation(len(self.rate))
        order = order[np.argsort(self.last[order], kind="stable")]  # longest ago first, ties in random order
        target = self._in_band()[order]
        wanted, others = order[target], order[~target]
        size = self.settings.batch_size
        exploring = min(len(others), max(round(self.options.explore * size), size - len(wanted)))
        targeted = size - exploring
        parts = (wanted[:targeted], others[:exploring], wanted[targeted:], others[exploring:])
        rows: list[int] = np.concatenate(parts).tolist()
        return rows

    def update(self, step: int, episodes: Sequence[Episode]) -> Mapping[str, float] | None:
        solved: dict[int, list[bool]] = defaultdict(list)
        for episode in episodes:
            solved[self.places[episode.task.id]].append(_success(episode) >= self.options.solved_at)
        for place, results in solved.items():
            measured, before = sum(results) / len(results), self.rate[place]
            self.rate[place] = measured if np.isnan(before) else before + _NEWEST * (measured - before)
            self.last[place] = step
        return self._metrics(list(solved))

    def state(self) -> dict[str, Any]:
        tried = np.flatnonzero(self.last)
        ids = list(self.places)
        return {ids[place]: [float(self.rate[place]), int(self.last[place])] for place in tried}

    def load_state(self, state: Mapping[str, Any]) -> None:
        for task, (rate, last) in state.items():
            if (place := self.places.get(task)) is not None:  # a row may have been removed from the file
                self.rate[place], self.last[place] = rate, last

    def _in_band(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        return (self.rate >= self.options.low) & (self.rate <= self.options.high)

    def _metrics(self, tried: Sequence[int]) -> dict[str, float]:
        shares = {
            "solved_share": self.rate > self.options.high,
            "target_share": self._in_band(),
            "unsolved_share": self.rate < self.options.low,
            "unseen_share": np.isnan(self.rate),
        }
        metrics = {name: float(rows.mean()) for name, rows in shares.items()}
        return metrics | ({"difficulty": 1.0 - float(self.rate[tried].mean())} if tried else {})


def _success(episode: Episode) -> float:
    assert episode.reward is not None, "a sampler learns from scored episodes"
    accuracy = episode.reward_info.get("acc")
    return float(accuracy) if isinstance(accuracy, (bool, int, float)) else episode.reward


def _difficulty(task: Task, field: str) -> float:
    value: Any = task.row
    for part in field.split("."):
        value = value.get(part) if isinstance(value, Mapping) else None
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise DataError(
            f"row {task.id}: {field} is {shown(value)}; data.curriculum.field must name a number in every row"
        )
    return float(value)
