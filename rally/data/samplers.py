"""A sampler chooses the rows of each step, as a pure function of (seed, step) and of a state that checkpoints carry.

`RowSampler` draws evenly and learns nothing. What a user's own class must be is a subclass of it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from rally.data.messages import shown
from rally.data.read import DataError
from rally.data.rows import TaskSet
from rally.data.sampler import batch_indices, generator
from rally.importing import ImportFailed, import_path
from rally.types import Episode

_FURTHER = 1  # apart from the random numbers of batches


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """What every sampler is told of its run."""

    batch_size: int
    total_steps: int
    seed: int = 0
    shuffle: bool = True


class RowSampler:
    """Draws rows evenly, epoch after epoch. A subclass overrides what it does otherwise."""

    def __init__(self, tasks: TaskSet, settings: SamplerSettings) -> None:
        self.tasks = tasks
        self.settings = settings

    def batch(self, step: int) -> Sequence[int]:
        """The `batch_size` rows of a step, which counts from 1. Asked twice, it answers the same."""
        settings = self.settings
        return batch_indices(
            len(self.tasks), settings.batch_size, seed=settings.seed, step=step, shuffle=settings.shuffle
        )

    def further(self, step: int) -> Sequence[int]:
        """The rows to try after `batch(step)`, in this order, while groups of it teach nothing (filter_groups): all
        others, in random order or, without shuffling, from the end of the batch on. Asked twice, it answers the same.
        """
        batch, settings = self.batch(step), self.settings
        if settings.shuffle:
            rows = generator(settings.seed, step, _FURTHER).permutation(len(self.tasks))
        else:
            rows = np.roll(np.arange(len(self.tasks)), -(int(batch[-1]) + 1))
        left: list[int] = rows[~np.isin(rows, batch)].tolist()
        return left

    def update(self, step: int, episodes: Sequence[Episode]) -> Mapping[str, float] | None:
        """Learn from the scored episodes of a step; what is returned is logged as `curriculum/<name>`."""
        return None

    def state(self) -> dict[str, Any]:
        """All that was learned, as JSON can hold it; checkpoints carry it."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Go on from what `state` returned when the checkpoint was written; not called if that was empty."""


def draw(sampler: RowSampler, step: int, batch_size: int, num_rows: int) -> list[int]:
    """The rows of a step, checked: a user's class may answer anything."""
    rows = [int(row) for row in sampler.batch(step)]
    bad = _outside(rows, num_rows)
    if len(rows) != batch_size or bad:
        found = f"the row {shown(bad[0])}" if bad else f"{len(rows)} rows"
        raise DataError(
            f"{type(sampler).__name__}.batch({step}) returned {found}; it must return {batch_size} row numbers from "
            f"0 to {num_rows - 1}"
        )
    return rows


def draw_further(sampler: RowSampler, step: int, num_rows: int) -> list[int]:
    """The rows to try after those of the step, checked in the same way."""
    rows = [int(row) for row in sampler.further(step)]
    if bad := _outside(rows, num_rows):
        raise DataError(
            f"{type(sampler).__name__}.further({step}) returned the row {shown(bad[0])}; it must return row numbers "
            f"from 0 to {num_rows - 1}"
        )
    return rows


def _outside(rows: Sequence[int], num_rows: int) -> list[int]:
    return [row for row in rows if not 0 <= row < num_rows]


def learned(sampler: RowSampler) -> dict[str, Any]:
    """What a checkpoint keeps of a sampler: nothing, where it learned nothing."""
    state = sampler.state()
    return {"class": type(sampler).__name__, "state": state} if state else {}


def restore(sampler: RowSampler, saved: Mapping[str, Any]) -> str | None:
    """Give a sampler back what `learned` told; if another kind of sampler had learned it, say so in words instead."""
    if not saved:
        return None
    name = type(sampler).__name__
    if saved["class"] != name:
        return f"the checkpoint's rows were chosen by {saved['class']}; {name} chooses now and begins anew"
    sampler.load_state(saved["state"])
    return None


def load_sampler_class(path: str, name: str) -> type[RowSampler]:
    """The class `name` of a file (`my_sampler.py`) or of a module (`my_package.sampler`, also with `pkg://`)."""
    cls = getattr(_import(path), name, None)
    if not (isinstance(cls, type) and issubclass(cls, RowSampler)):
        raise DataError(
            f"{path} has no class {name} that is a rally.data.RowSampler; correct data.sampler.class_name or derive "
            "the class from it"
        )
    return cls


def _import(path: str) -> ModuleType:
    try:
        return import_path(path, "sampler")
    except ImportFailed as failed:
        raise DataError(f"data.sampler.class_path={path} cannot be imported ({failed}); correct it") from failed
