"""What a growing run folder holds is read once each, in the order in which it was written.

A position says where in that order something stands: a step for its metrics, and for its episodes twice the step, plus
one for those of the validation, which follow those of the training.
"""

from __future__ import annotations

import json
import math
from typing import NamedTuple

from rally.track.folder import RunFolder
from rally.track.numbers import Metrics


class Found(NamedTuple):
    """Something of the folder and its position; `at` is the Unix time of its finding."""

    position: int
    at: float
    metrics: Metrics


class EpisodeFile(NamedTuple):
    position: int
    step: int
    validate: bool


class MetricsTail:
    """The lines of metrics.jsonl, as they come."""

    def __init__(self, folder: RunFolder) -> None:
        self._path = folder.metrics_path
        self._read = 0

    def news(self, now: float) -> list[Found]:
        """The lines finished since the last call; null is nan, as everywhere."""
        if not self._path.exists():
            return []
        with self._path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read().rpartition(b"\n")
        rows = [json.loads(line) for line in whole.split(b"\n") if line]
        self._read += len(whole) + len(newline)  # last, so that what could not be read is read again
        return [Found(row.pop("step"), now, {k: math.nan if v is None else v for k, v in row.items()}) for row in rows]


class EpisodeFiles:
    """The files of episodes/, as they come; each is whole when it is there."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._seen: set[int] = set()

    def news(self, now: float) -> list[EpisodeFile]:
        """The files that came since the last call. `now` is not looked at: episodes know when they began."""
        train = self._folder.episode_steps(False)
        # Between the two listings both files of a step may come: its validation then waits for the next call.
        val = [step for step in self._folder.episode_steps(True) if step <= max(train, default=0)]
        files = [EpisodeFile(2 * s, s, False) for s in train] + [EpisodeFile(2 * s + 1, s, True) for s in val]
        new = sorted(file for file in files if file.position not in self._seen)
        self._seen.update(file.position for file in new)
        return new
