"""Curricula choose the rows of a step by how hard they are, and never by anything but (seed, step) and their state.

`EasyToHard` opens the rows from the easiest on, by a number in the row. `SolvedSometimes` measures success itself and
keeps to rows that are solved now and then, because a group that all solve, or none, teaches nothing.
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
"""How much the newest measurement of a row counts: the policy changes, so older ones fade."""


@dataclass(frozen=True, kw_only=True)
class EasyToHardOptions:
    """`field` is a dotted name in the row. The first step draws from the `start_share` of the rows that are easiest;
    the share grows evenly and is everything after `grow_steps` steps."""

    field: str
    start_share: float
    grow_steps: int


class EasyToHard(RowSampler):
    """Draws from the easiest rows, ever more of them; once all are open, evenly and epoch after epoch."""

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
        """The other open rows by chance, then the easiest of those that are not open yet."""
        count = self.open_rows(step)
        harder: list[int] = self.order[count:].tolist()
        opened = set(self.order[:count].tolist())
        return [row for row in super().further(step) if row in opened] + harder

    def open_rows(self, step: int) -> int:
        """How many rows a step draws from; enough for a batch in any case."""
        start = self.options.start_share
        share = min(1.0, start + (1.0 - start) * (step - 1) / self.options.grow_steps)
        return min(len(self.order), max(self.settings.batch_size, round(share * len(self.order))))

    def update(self, step: int, episodes: Sequence[Episode]) -> Mapping[str, float] | None:
        seen = [self.difficulty[episode.task.id] for episode in episodes]
        metrics = {"open_share": self.open_rows(step) / len(self.order)}
        return metrics | ({"difficulty": math.fsum(seen) / len(seen)} if seen else {})


@dataclass(frozen=True, kw_only=True)
class SolvedSometimesOptions:
    """Rows that are solved with a rate from `low` to `high` fill the batch but for the share `explore`. An episode is
    solved from `solved_at` on, by the `acc` of its reward function or else by its reward."""

    low: float
    high: float
    explore: float
    solved_at: float


class SolvedSometimes(RowSampler):
    """Targets rows that are solved now and then, and explores the others: those never tried first, then those that
    were not tried for longest, since a policy that learns will solve them differently."""

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
        """What is left of the target, then of the others."""
        return self._ranked(step)[self.settings.batch_size :]

    def _ranked(self, step: int) -> list[int]:
        """All rows: those of the batch, then those to try after it."""
        order = generator(self.settings.seed, step).permutation(len(self.rate))
        order = order[np.argsort(self.last[order], kind="stable")]  # longest ago first, by chance among equals
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
            if (place := self.places.get(task)) is not None:  # a row may have been taken out of the file
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
