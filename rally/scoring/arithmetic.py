"""Guarantees: the answer is the one number that stands alone after the last `####`, compared by value.

Everything else on that line is refused, so `#### 464 or 465` earns nothing: a hedge is not an answer.
"""

from __future__ import annotations

import re
from typing import Any

from rally.scoring.answer_extraction import same_number

# Two branches, so that each place can be read in one way only and a line of a million digits takes no million squared.
_ALONE = re.compile(r"-?\$?(?:[0-9,]*\.[0-9]+|[0-9,]*[0-9])\.?")


def extract(text: str) -> str | None:
    """The number after the last `####`, as written but for commas, `$` and a full stop; None when there is none."""
    _, marker, rest = text.rpartition("####")
    line = rest.strip().partition("\n")[0].strip()
    if not marker or not _ALONE.fullmatch(line):
        return None
    return line.replace(",", "").replace("$", "").removesuffix(".")


def score(text: str, truth: Any) -> float:
    """1 for the right number, 0 for any other or none."""
    answer = extract(text)
    return float(answer is not None and same_number(answer, truth))
