"""Sums are exact to the last bit whatever their order, and a statistic over nothing is left out."""

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
    """Of sorted values, linear between the two nearest ranks."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def percentiles(name: str, values: Sequence[float]) -> Metrics:
    """The middle and the slow end."""
    ordered = sorted(values)
    return {f"{name}/p{p}": percentile(ordered, p) for p in (50, 95)} if ordered else {}
