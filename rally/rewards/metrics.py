"""Every number any reward function reported is averaged over the episodes that have it, and the others are counted.

The columns are the union over all episodes: a batch that mixes data sets, each with its own keys, loses none of them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeGuard

from rally.types import Episode


def reward_metrics(episodes: Sequence[Episode]) -> dict[str, float]:
    """`reward/<key>/mean` and `reward/<key>/missing` per numeric key; `reward/missing` counts unscored episodes."""
    keys = sorted({key for episode in episodes for key, value in episode.reward_info.items() if _is_number(value)})
    metrics = {"reward/missing": float(sum(episode.reward is None for episode in episodes))}
    for key in keys:
        values = [value for episode in episodes if _is_number(value := episode.reward_info.get(key))]
        metrics[f"reward/{key}/mean"] = math.fsum(values) / len(values)
        metrics[f"reward/{key}/missing"] = float(len(episodes) - len(values))
    return metrics


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, (bool, int, float)) and math.isfinite(value)
