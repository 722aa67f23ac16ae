"""Which rows a step trains on, and the seed of each episode, are pure functions of the run's seed and the step.

Nothing is kept between calls, so a resumed run asks for step k and gets what the first run would have had.
The rows form one endless stream, epoch after epoch, each epoch a permutation of its own; step k takes the k-th
slice of `batch_size`. A batch may therefore straddle two epochs (and may then hold a row twice), but within an epoch
no row is lost and none comes twice.
"""

from __future__ import annotations

import hashlib

import numpy as np

from rally.data.read import DataError


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
    """How many whole batches lie in `epochs` epochs, at least 1: only what is left at the very end is not used."""
    _check(num_rows, batch_size)
    return max(1, num_rows * epochs // batch_size)


def steps_per_epoch(num_rows: int, batch_size: int) -> int:
    """How many whole batches lie in one epoch, at least 1."""
    return total_steps(num_rows, batch_size, 1)


def episode_seed(seed: int, step: int, row_index: int, sample_index: int) -> int:
    """A 63-bit seed for one episode: the same on every machine and in every process."""
    text = f"{seed}:{step}:{row_index}:{sample_index}"
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest()) >> 1


def generator(seed: int, *numbers: int) -> np.random.Generator:
    """Random numbers for an epoch or step of a run, or for one purpose in it: the same on every machine."""
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
