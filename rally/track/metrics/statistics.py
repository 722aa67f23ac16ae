"""Statistics of metrics. Sums do not depend on the order of their values; a statistic over nothing is left out."""

from __future__ import annotations

import math
from collections.abc import Sequence

Metrics = dict[str, float]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def spread(name: str, values: Sequence[float]) -> Metrics:
    if not values:
        return {}
    return {f"{name}/mean": mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def percentile(ordered: Sequence[float], percent: float) -> float:
    """A percentile of sorted values, interpolated linearly."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(name: str, values: Sequence[float]) -> Metrics:
    """The median and the slow tail."""
    ordered = sorted(values)
    return {f"{name}/p{p}": percentile(ordered, p) for p in (50, 95)} if ordered else {}
