"""Times two ways to do the same work alternately, after a warm-up each, and compares them by their medians.

Alternating matters more than many repetitions: other load on the machine then slows both.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable
from dataclasses import dataclass, field

REPETITIONS = 3

Timed = Callable[[], float]
"""Does the work once and returns the seconds it took."""


@dataclass(frozen=True)
class Timings:
    """Seconds of each repetition. Without `other`, the alternative could not run here."""

    ours: tuple[float, ...]
    other: tuple[float, ...] = ()

    @property
    def ours_median(self) -> float:
        return statistics.median(self.ours)

    @property
    def other_median(self) -> float | None:
        return statistics.median(self.other) if self.other else None

    @property
    def ratio(self) -> float | None:
        """How many times faster ours is."""
        return self.other_median / self.ours_median if self.other_median is not None else None

    @property
    def spread(self) -> tuple[float, float] | None:
        """The lowest and the highest ratio of two consecutive runs."""
        ratios = [b / a for a, b in zip(self.ours, self.other, strict=False)]
        return (min(ratios), max(ratios)) if ratios else None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One line of the table: the same work, our way and the other way."""

    what: str
    against: str
    goal: float
    timings: Timings
    note: str
    load: float = field(default_factory=lambda: os.getloadavg()[0])

    @property
    def verdict(self) -> str:
        if self.timings.ratio is None:
            return "not measured"
        return "ok" if self.timings.ratio >= self.goal else "missed"


def alternate(ours: Timed, other: Timed, repetitions: int = REPETITIONS) -> Timings:
    """Ours, other, ours, other, ...; the first of each is a warm-up and does not count."""
    pairs = [(ours(), other()) for _ in range(repetitions + 1)][1:]
    return Timings(tuple(a for a, _ in pairs), tuple(b for _, b in pairs))
