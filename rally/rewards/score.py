"""`Score`, the result of a reward function; its encoding for reward workers; and the metrics of a batch.

Each number that a reward function reports is averaged over the episodes that have it, and the others are counted. A
batch that mixes data sets keeps the keys of all of them.
"""

from __future__ import annotations

import json
import math
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeGuard

from rally.types import Episode, RallyError, brief, finite_number

MAX_INT_BITS = 10_000  # Python writes and reads no integers of more than 4300 digits


FACTS = (
    *("num_turns", "turn_scores", "tool_rewards", "rollout_reward_scores", "messages", "stop_reason"),
    *("interaction_score", "agent_answer", "last_turn"),
)
"""The entries of `extra_info` that are facts about the episode."""


def plain(value: Any) -> Any:
    """The nearest JSON value."""
    if isinstance(value, int) and value.bit_length() > MAX_INT_BITS:
        return f"an integer of {value.bit_length()} bits"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value)} bytes>"
    if hasattr(value, "tolist"):  # numpy and torch, neither of which a worker needs to import
        return plain(value.tolist())
    return str(value)


def encode(value: Mapping[str, Any]) -> bytes:
    """One JSON line. ASCII escapes can represent every string, lone surrogates included."""
    return json.dumps(plain(value)).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    assert isinstance(message, dict)
    return message


class RewardError(RallyError):
    """The reward is misconfigured: an unknown data source, or a custom function that cannot be used."""


@dataclass(frozen=True, kw_only=True)
class Score:
    """The score of one episode. Either `reward` is a finite number, or `error` says why there is none."""

    reward: float | None = None
    info: dict[str, Any] = field(default_factory=dict)
    """Everything the function reported. `score`, its own number, is always included."""
    error: str | None = None
    seconds: float = 0.0
    """How long the function ran, without waiting for a free worker."""
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
        score = result["score"] if isinstance(result["score"], int) else info["score"]
        if not isinstance(score, (bool, int, float)):
            kind = "None" if result["score"] is None else type(result["score"]).__name__
            error = f'the reward function returned {kind}; return a number, or a dict with one under "score"'
            return cls(error=error, seconds=seconds)
        if (reward := finite_number(score)) is None:
            return cls(error=f"the reward function returned {brief(score)}; return a finite number", seconds=seconds)
        return cls(reward=reward, info=info | {"score": reward}, seconds=seconds)


def describe(error: BaseException) -> str:
    """The text of an exception, with its type and place unless it is a RallyError."""
    if isinstance(error, RallyError):
        return str(error)
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({frames[-1].filename}, line {frames[-1].lineno})" if len(frames) > 1 else ""
    return f"{type(error).__name__}: {error}{where}"


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
    return isinstance(value, (bool, int, float)) and finite_number(value) is not None
