"""A reward function's result is a finite number or a named error, never a silent 0."""

from __future__ import annotations

import math
import traceback
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from rally.rewards.wire import plain
from rally.types import RallyError


class RewardError(RallyError):
    """The reward is not set up as it must be: an unknown data source, or a custom function that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """What one episode earned. Either `reward` is a finite number, or `error` says why there is none."""

    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    """Everything the function reported, `score` (its own number) always among it."""
    error: str | None = None
    seconds: float = 0.0
    """How long the function ran; waiting for a free worker is not counted."""
    printed: str = ""
    """The end of what the function printed, or its traceback."""

    def __post_init__(self) -> None:
        assert (self.reward is None) == (self.error is not None), "a score has a reward or an error, and only one"

    @classmethod
    def of(cls, value: Any, seconds: float = 0.0) -> Score:
        """Read what a reward function returned: a number, or a dict with one under "score"."""
        result = value if isinstance(value, Mapping) else {"score": value}
        if "score" not in result:
            keys = ", ".join(map(str, result)) or "none"
            return cls(error=f'the reward function returned a dict without "score" (its keys: {keys})', seconds=seconds)
        info = plain(result)
        score = info["score"]
        if not isinstance(score, (bool, int, float)):
            kind = "None" if result["score"] is None else type(result["score"]).__name__
            told = f'the reward function returned {kind}; let it return a number, or a dict with one under "score"'
            return cls(error=told, seconds=seconds)
        if not math.isfinite(score):
            return cls(error=f"the reward function returned {score}; let it return a finite number", seconds=seconds)
        return cls(reward=float(score), info=info | {"score": float(score)}, seconds=seconds)


def describe(error: BaseException) -> str:
    """What a reward function raised, and where; our own sentences speak for themselves."""
    if isinstance(error, RallyError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}"
