"""verl's score functions, with verl's signatures, computed by Rally's own."""

from __future__ import annotations

from typing import Any

from rally.rewards.registry import compute_score


def gsm8k(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for the right number, otherwise `format_score`."""
    right = compute_score("openai/gsm8k", solution_str, ground_truth, method=method)
    return score if right else format_score


def math_dapo(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: Any = None
) -> float | dict[str, Any]:
    """1 or -1, with `acc` and `pred`."""
    return compute_score("math_dapo", solution_str, ground_truth, strict_box_verify=strict_box_verify)


def search_r1(
    solution_str: str, ground_truth: Any, method: str = "strict", format_score: float = 0.0, score: float = 1.0
) -> float:
    """`score` for an exact match, less after more than ten answers; otherwise `format_score`."""
    result = compute_score("searchR1_", solution_str, ground_truth)
    assert isinstance(result, dict)
    return score * float(result["score"]) or format_score
