"""Scores short answers to questions by exact match, containment or F1 against the accepted answers.

Texts are normalized as usual in question answering: lower case, no punctuation, no articles, single spaces. The answer
is the content of the last `<answer>...</answer>`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence
from typing import Literal

from rally.scoring.answer_extraction import last_tagged

Match = Literal["exact", "contains", "f1"]

MANY_ANSWERS = 10  # more answer tags than this count as guessing
GUESSED = 0.25

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)
_CLOSED = frozenset({"yes", "no", "noanswer"})


def normalise(text: str) -> str:
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact(answer: str, targets: Sequence[str]) -> float:
    return float(normalise(answer) in {normalise(target) for target in targets})


def contains(answer: str, targets: Sequence[str]) -> float:
    """1 if an accepted answer is part of this one, otherwise 0."""
    words = f" {normalise(answer)} "
    return float(any(f" {normalise(target)} " in words for target in targets))


def f1(answer: str, targets: Sequence[str]) -> float:
    """The best word F1 with an accepted answer."""
    return max((_f1(normalise(answer), normalise(target)) for target in targets), default=0.0)


def score(text: str, targets: Sequence[str], match: Match = "exact") -> float:
    """The score of the last tagged answer: a quarter of it if there are more than ten, 0 if there is none."""
    measures = {"exact": exact, "contains": contains, "f1": f1}
    if match not in measures:
        raise ValueError(f"the search match must be exact, contains or f1, not {match!r}")
    answer = last_tagged(text)
    if answer is None:
        return 0.0
    tags = max(text.count("<answer>"), text.count("</answer>"))
    return measures[match](answer, targets) * (GUESSED if tags > MANY_ANSWERS else 1.0)


def _f1(answer: str, target: str) -> float:
    if answer != target and (answer in _CLOSED or target in _CLOSED):
        return 0.0  # "yes" gets no partial credit for "yes and no"
    ours, theirs = answer.split(), target.split()
    shared = (Counter(ours) & Counter(theirs)).total()
    return 2 * shared / (len(ours) + len(theirs)) if shared else 0.0
