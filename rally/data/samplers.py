"""Samplers choose the rows of each step, as a pure function of (seed, step) and a state that checkpoints save.

`RowSampler` draws uniformly and has no state. A user's sampler is a subclass of it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import numpy as np

from rally.data.messages import shown
from rally.data.row_files import DataError
from rally.data.tasks import TaskSet
from rally.importing import ImportFailed, import_path
from rally.types import Episode


def batch_indices(num_rows: int, batch_size: int, *, seed: int, step: int, shuffle: bool) -> list[int]:
    """The rows of step `step`, which counts from 1."""
    _check(num_rows, batch_size)
    assert step >= 1, "steps count from 1"
    first = (step - 1) * batch_size
    epochs = range(first // num_rows, (first + batch_size - 1) // num_rows + 1)
    stream = np.concatenate([_epoch(num_rows, seed, epoch, shuffle) for epoch in epochs])
    start = first - epochs.start * num_rows
    indices: list[int] = stream[start : start + batch_size].tolist()
    return indices


def total_steps(num_rows: int, batch_size: int, epochs: int) -> int:
    """The number of whole batches in `epochs` epochs, at least 1. Only the rest at the very end is not used."""
    _check(num_rows, batch_size)
    return max(1, num_rows * epochs // batch_size)


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """The number of whole batches in one epoch, at least 1."""
    return total_steps(num_rows, batch_size, 1)


def episode_seed(seed: int, step: int, row_index: int, sample_index: int) -> int:
    """A 63-bit seed for one episode: the same on every machine and in every process."""
    text = f"{seed}:{step}:{row_index}:{sample_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """A random generator for an epoch or step of a run, the same on every machine."""
    if seed < 0:
        raise DataError(f"the data seed is {seed}; it must be 0 or more")
    return np.random.Generator(np.random.PCG64(np.random.SeedSequence([seed, *numbers])))


def _epoch(num_rows: int, seed: int, epoch: int, shuffle: bool) -> np.ndarray[tuple[int], np.dtype[np.int64]]:
    if not shuffle:
        return np.arange(num_rows)
    return generator(seed, epoch).permutation(num_rows)


def _check(num_rows: int, batch_size: int) -> None:
    if num_rows < 1:
        raise DataError("there are no rows to train on; give at least one")
    if batch_size < 1:
        raise DataError(f"the batch size is {batch_size}; it must be at least 1")


_FURTHER = 1  # separates the random numbers of `further` from those of `batch`


@dataclass(frozen=True, kw_only=True)
class SamplerSettings:
    """The settings of a run that every sampler gets."""

    batch_size: int
    total_steps: int
    seed: int = 0
    shuffle: bool = True


class RowSampler:
    """Draws rows uniformly, in epochs. Subclasses override its methods."""

    def __init__(self, tasks: TaskSet, settings: SamplerSettings) -> None:
        self.tasks = tasks
        self.settings = settings

    def batch(self, step: int) -> Sequence[int]:
        """The `batch_size` rows of a step, counted from 1. Repeated calls return the same rows."""
        settings = self.settings
        return batch_indices(
            len(self.tasks), settings.batch_size, seed=settings.seed, step=step, shuffle=settings.shuffle
        )

    def further(self, step: int) -> Sequence[int]:
        """The rows to try after `batch(step)`, in order, while groups are filtered out (filter_groups). By default all
        others, in random order or, without shuffling, from the end of the batch on. Repeated calls return the same.
        """
        batch, settings = self.batch(step), self.settings
        if settings.shuffle:
            rows = generator(settings.seed, step, _FURTHER).permutation(len(self.tasks))
        else:
            rows = np.roll(np.arange(len(self.tasks)), -(int(batch[-1]) + 1))
        left: list[int] = rows[~np.isin(rows, batch)].tolist()
        return left

    def update(self, step: int, episodes: Sequence[Episode]) -> Mapping[str, float] | None:
        """Learn from the scored episodes of a step. The returned numbers are logged as `curriculum/<name>`."""
        return None

    def state(self) -> dict[str, Any]:
        """The state of the sampler as a JSON value, saved in checkpoints."""
        return {}

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Restore what `state` returned when the checkpoint was written. Not called if that was empty."""


def draw(sampler: RowSampler, step: int, batch_size: int, num_rows: int) -> list[int]:
    """The rows of a step, validated, since a user's class may return anything."""
    rows = [int(row) for row in sampler.batch(step)]
    bad = _outside(rows, num_rows)
    if len(rows) != batch_size or bad:
        problem = f"the row {shown(bad[0])}" if bad else f"{len(rows)} rows"
        raise DataError(
            f"{type(sampler).__name__}.batch({step}) returned {problem}; it must return {batch_size} row numbers from "
            f"0 to {num_rows - 1}"
        )
    return rows


def draw_further(sampler: RowSampler, step: int, num_rows: int) -> list[int]:
    """The rows to try after those of the step, validated in the same way."""
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
    """The state of a sampler for a checkpoint; empty if it has none."""
    state = sampler.state()
    return {"class": type(sampler).__name__, "state": state} if state else {}


def restore(sampler: RowSampler, saved: Mapping[str, Any]) -> str | None:
    """Restore what `learned` returned. If it was of another class, nothing is restored and a warning is returned."""
    if not saved:
        return None
    name = type(sampler).__name__
    if not isinstance(saved.get("class"), str) or "state" not in saved:
        raise DataError("the sampler's state in the checkpoint is damaged; resume from another checkpoint")
    if saved["class"] != name:
        return f"the checkpoint has the state of the sampler {saved['class']}; {name} starts without a state"
    sampler.load_state(saved["state"])
    return None


def load_sampler_class(path: str, name: str, bases: tuple[type, ...] = (RowSampler,)) -> type:
    """The class `name` of a file (`my_sampler.py`) or of a module (`my_package.sampler`, also with `pkg://`), derived
    from one of `bases`."""
    cls = getattr(_import(path), name, None)
    if not (isinstance(cls, type) and issubclass(cls, bases)):
        raise DataError(
            f"{path} has no class {name} that is a rally.data.RowSampler, or a sampler of verl; correct "
            "data.sampler.class_name or derive the class from one of them"
        )
    return cls


def _import(path: str) -> ModuleType:
    try:
        return import_path(path, "sampler")
    except ImportFailed as failed:
        raise DataError(f"data.sampler.class_path={path} cannot be imported ({failed}); correct it") from failed
