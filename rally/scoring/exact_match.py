"""Guarantees: a short answer to a question is compared with every accepted one as words, not as characters.

The normal form of question answering: lower case, no punctuation, no articles, single spaces. The answer is what stands
in the last `<answer>...</answer>`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rally.scoring.answer_extraction import last_tagged

Match = Literal["exact", "contains", "f1"]

MANY_ANSWERS = 10  # more answer tags than this is guessing
GUESSED = 0.25

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})


def normalise(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, targets: Sequence[str]) -> float:
    return float(normalise(answer) in {normalise(target) for target in targets})


def contains(answer: str, targets: Sequence[str]) -> float:
    """Whether an accepted answer stands anywhere in this one."""
    words = f" {normalise(answer)} "
    return float(any(f" {normalise(target)} " in words for target in targets))


def f1(answer: str, targets: Sequence[str]) -> float:
    """The best overlap of words with an accepted answer: harmonic mean of precision and recall."""
    return max((_f1(normalise(answer), normalise(target)) for target in targets), default=0.0)


def score(text: str, targets: Sequence[str], match: Match = "exact") -> float:
    """What the last tagged answer is worth; a quarter of it after more than ten answers, nothing without one."""
    measures = {"exact": exact, "contains": contains, "f1": f1}
    if match not in measures:
        raise ValueError(f"the search match must be exact, contains or f1, not {match!r}")
    answer = last_tagged(text)
    if answer is None:
        return 0.0
    return measures[match](answer, targets) * (GUESSED if text.count("<answer>") > MANY_ANSWERS else 1.0)


def _f1(answer: str, target: str) -> float:
    if answer != target and (answer in _CLOSED or target in _CLOSED):
        return 0.0  # "yes" shares no part of its meaning with "yes and no"
    ours, theirs = answer.split(), target.split()
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0
