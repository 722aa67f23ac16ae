"""Scores GSM8K solutions by the last `#### n` (strict) or the last number (flexible).

Only the last 300 characters are read, where the answer belongs; so a number elsewhere in a long solution does not
count. Numbers are compared by value: `72`, `72.0` and `72.00` are equal.
"""

from __future__ import annotations

import re
from typing import Any, Literal

from rally.scoring.answer_extraction import same_number

Method = Literal["strict", "flexible"]

WINDOW = 300
_NUMBER = r"-?\$?[0-9.,]*[0-9][0-9.,]*"
_MARKED = re.compile(rf"#### ({_NUMBER})")
_ANYWHERE = re.compile(_NUMBER)


def extract(text: str, method: Method = "strict") -> str | None:
    """The answer as written, without commas and `$`: after the last `#### ` (strict) or the last number (flexible)."""
    if method not in ("strict", "flexible"):
        raise ValueError(f"the gsm8k method must be strict or flexible, not {method!r}")
    numbers = (_MARKED if method == "strict" else _ANYWHERE).findall(text[-WINDOW:])
    return numbers[-1].replace(",", "").replace("$", "") if numbers else None


def score(text: str, truth: Any, method: Method = "strict", format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` for the right number, `format_score` for a wrong one, 0 if there is no answer."""
    answer = extract(text, method)
    if answer is None:
        return 0.0
    return score if same_number(answer, truth) else format_score
