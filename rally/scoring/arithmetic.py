"""Scores the arithmetic demo: the answer is the number after the last `####`, compared by value.

The number must be alone on its line, so `#### 464 or 465` scores 0.
"""

from __future__ import annotations

import re
from typing import Any

from rally.scoring.answer_extraction import same_number

# Two alternatives without ambiguity, so that a line of a million digits takes linear time.
_ALONE = re.compile(r"-?\$?(?:[0-9,]*\.[0-9]+|[0-9,]*[0-9])\.?")


def extract(text: str) -> str | None:
    """The number after the last `####` without commas, `$` and final full stop; None if there is none."""
    _, marker, rest = text.rpartition("####")
    line = rest.strip().partition("\n")[0].strip()
    if not marker or not _ALONE.fullmatch(line):
        return None
    return line.replace(",", "").replace("$", "").removesuffix(".")


def score(text: str, truth: Any) -> float:
    """1 for the right number, otherwise 0."""
    answer = extract(text)
    return float(answer is not None and same_number(answer, truth))
