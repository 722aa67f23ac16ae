r"""Guarantees: a mathematical solution scores by its stated answer, the last `\boxed{}` or the last `Answer:` line.

`same` decides whether two answers are equal; the plain one is `latex.same_answer`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from rally.scoring.answers import last_boxed, last_line
from rally.scoring.latex import same_answer

Same = Callable[[Any, Any], bool]

LINE_WINDOW = 300  # characters at the end in which the answer must be, so that a long solution is not a lottery
BOX_WINDOW = 100
SOFTEST = -0.6  # a wrong answer never costs less, so that trying tools pays less than being right
TURN_CREDIT = 0.1


class Graded(NamedTuple):
    right: bool
    answer: str | None


def boxed(text: str, truth: Any, same: Same = same_answer) -> Graded:
    """The last box, wherever it is."""
    return _graded(last_boxed(text), truth, same)


def dapo(text: str, truth: Any, *, strict_box: bool = False, same: Same = same_answer) -> Graded:
    """The last `Answer:` line near the end, or with `strict_box` the last box at the very end."""
    answer = last_boxed(text[-BOX_WINDOW:]) if strict_box else last_line(text[-LINE_WINDOW:])
    return _graded(answer, truth, same)


def retool(graded: Graded, num_turns: int) -> float:
    """1 for right; -1 for wrong, softened by a tenth for every tool turn that was tried, but never above -0.6.

    `num_turns` counts messages, prompt and answer among them, so a call and its result are two more.
    """
    if graded.right:
        return 1.0
    return min(SOFTEST, -1.0 + TURN_CREDIT * max(0, num_turns - 2) / 2)


def _graded(answer: str | None, truth: Any, same: Same) -> Graded:
    return Graded(answer is not None and same(answer, truth), answer)
