"""The reward of triage: the reply of round 2 must be one JSON object with the right service and incident type.

Each of the two scores 0.5. Text around the JSON, other keys, or an episode without round 2 scores 0. Round 1 is not
scored.
"""

from __future__ import annotations

import json
from typing import Any

KEYS = ("service", "incident_type")


def compute_score(
    data_source: str, solution_str: str, ground_truth: dict[str, str], extra_info: dict[str, Any] | None = None
) -> dict[str, Any]:
    info = extra_info or {}
    verdict = read_verdict(info.get("last_turn", "")) if reached_round_2(info.get("messages", [])) else None
    right = [verdict is not None and verdict[key] == ground_truth[key] for key in KEYS]
    return {"score": sum(right) / len(KEYS), "acc": float(all(right)), "json_ok": float(verdict is not None)}


def reached_round_2(messages: list[dict[str, str]]) -> bool:
    """Whether the policy replied to the user's second message."""
    roles = [message["role"] for message in messages]
    return roles.count("user") == 2 and roles[-2:] == ["user", "assistant"]


def read_verdict(text: str) -> dict[str, str] | None:
    """The verdict, if the text is exactly one."""
    try:
        verdict = json.loads(text)
    except ValueError:
        return None
    whole = isinstance(verdict, dict) and verdict.keys() == set(KEYS)
    return verdict if whole else None
