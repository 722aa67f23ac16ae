"""Guarantees: a solution to a grade-school problem scores by its last `#### n` (or last number) and by nothing else.

Only the last 300 characters are read: the answer belongs at the end, and a short window keeps a long solution from
being searched for a lucky number. Numbers are compared by value, so `72`, `72.0` and `72.00` are the same answer.
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
    found = (_MARKED if method == "strict" else _ANYWHERE).findall(text[-WINDOW:])
    return found[-1].replace(",", "").replace("$", "") if found else None


def score(text: str, truth: Any, method: Method = "strict", format_score: float = 0.0, score: float = 1.0) -> float:
    """`score` for the right number, `format_score` for a wrong one, 0 when there is no answer at all."""
    answer = extract(text, method)
    if answer is None:
        return 0.0
    return score if same_number(answer, truth) else format_score
