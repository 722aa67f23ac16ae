r"""Compares and grades mathematical answers: for MATH, DAPO, ReTool and Geometry3K.

`same_answer` compares normalized text and the value of numbers and fractions; `same_symbolic` also uses math-verify.
The graders differ in where the answer must be and in the score. A geometry solution scores 0.9 for the right boxed
answer and 0.1 for its form: it begins with `<think>`, closes it, and gives a `\boxed{}` answer after it.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from rally.scoring.answer_extraction import last_boxed, last_line

LONGEST = 1000  # characters; a longer answer counts as wrong

_DROPPED = re.compile(r"\\left(?![a-z])|\\right(?![a-z])|\\[!,;:$%]|\\ |[$%~]|\^\{?\\circ\}?")
_TEXT = re.compile(r"\\(?:text|textbf|textit|mbox|mathrm|mathbf)\{([^{}]*)\}")
_UNIT = re.compile(r"(-?[0-9][0-9.,]*)\s+(?!pi\b)[A-Za-z][A-Za-z ]*")
_NAMED = re.compile(r"[A-Za-z]\w?\s*=(.*)", re.DOTALL)
_BARE_FRACTION = re.compile(r"\\frac(?:\{([^{}]*)\}|([0-9A-Za-z]))(?:\{([^{}]*)\}|([0-9A-Za-z]))")
_BARE_ROOT = re.compile(r"\\sqrt([0-9A-Za-z])")
_SLASHED = re.compile(r"(-?[0-9]+)/([0-9]+)")
_THOUSANDS = re.compile(r"-?[0-9]{1,3}(?:,[0-9]{3})+(?:\.[0-9]+)?")
_DECIMAL = re.compile(r"-?(?:[0-9]{1,40}\.?[0-9]{0,40}|\.[0-9]{1,40})")
_FRACTION = re.compile(r"(-?)\\frac\{(-?[0-9]{1,40})\}\{([0-9]{1,40})\}")


def same_answer(one: Any, other: Any) -> bool:
    """Whether two answers are equal as normalized text or as numbers."""
    left, right = normalise(one), normalise(other)
    if not left or not right:
        return False
    if left == right:
        return True
    value = _value(left)
    return value is not None and value == _value(right)


def normalise(answer: Any) -> str:
    """The normalized spelling of an answer; empty if it is too long."""
    text = str(answer).strip()
    if len(text) > LONGEST:
        return ""
    text = _DROPPED.sub("", text).replace("{,}", ",").strip().removesuffix(".").strip()
    text = _without_text(text)
    if named := _NAMED.fullmatch(text):
        text = named[1].strip()
    if unit := _UNIT.fullmatch(text):
        text = unit[1]
    text = "".join(text.split()).replace("dfrac", "frac").replace("tfrac", "frac")
    text = _BARE_FRACTION.sub(lambda m: rf"\frac{{{m[1] or m[2] or ''}}}{{{m[3] or m[4] or ''}}}", text)
    text = _BARE_ROOT.sub(r"\\sqrt{\1}", text)
    if slashed := _SLASHED.fullmatch(text):
        text = rf"\frac{{{slashed[1]}}}{{{slashed[2]}}}"
    return text.replace(",", "") if _THOUSANDS.fullmatch(text) else text


def _without_text(text: str) -> str:
    r"""`\text{east}` becomes east; a `\text{}` after an answer is a unit and is removed."""
    first = _TEXT.match(text)
    if first:
        return (first[1] + text[first.end() :]).strip()
    return _TEXT.sub("", text).strip()


def _value(text: str) -> Fraction | None:
    """The value of a decimal or fraction; None for other text."""
    if _DECIMAL.fullmatch(text):
        return Fraction(text.removesuffix("."))
    parts = _FRACTION.fullmatch(text)
    if parts is None or int(parts[3]) == 0:
        return None
    return Fraction(int(parts[2]), int(parts[3])) * (-1 if parts[1] else 1)


def installed() -> bool:
    """Whether math-verify is installed. Imports it, which takes a second, so that no answer has to wait."""
    try:
        import math_verify  # noqa: F401
    except ImportError:
        return False
    return True


def same_symbolic(one: Any, other: Any) -> bool:
    """Whether two answers are equal by `same_answer` or by math-verify, which may take very long."""
    if same_answer(one, other):
        return True
    if max(len(str(one)), len(str(other))) > LONGEST:
        return False
    from math_verify import parse, verify  # an optional dependency

    answer, truth = (parse(f"${text}$", parsing_timeout=None) for text in (one, other))
    return bool(verify(truth, answer, timeout_seconds=None))


Same = Callable[[Any, Any], bool]

LINE_WINDOW = 300  # the answer must be in the last characters, so that numbers elsewhere do not count
BOX_WINDOW = 100
SOFTEST = -0.6  # the highest score of a wrong answer
TURN_CREDIT = 0.1


class Graded(NamedTuple):
    right: bool
    answer: str | None


def boxed(text: str, truth: Any, same: Same = same_answer) -> Graded:
    """Grade the last box anywhere in the text."""
    return _graded(last_boxed(text), truth, same)


def dapo(text: str, truth: Any, *, strict_box: bool = False, same: Same = same_answer) -> Graded:
    """Grade the last `Answer:` line near the end. If there is none, or with `strict_box`, grade the last box at the
    very end."""
    answer = None if strict_box else last_line(text[-LINE_WINDOW:])
    return _graded(last_boxed(text[-BOX_WINDOW:]) if answer is None else answer, truth, same)


def retool(graded: Graded, num_turns: int) -> float:
    """1 for a right answer; -1 for a wrong one, plus 0.1 for every tool turn, but at most -0.6.

    `num_turns` counts messages including prompt and answer, so a call and its result add two.
    """
    if graded.right:
        return 1.0
    return min(SOFTEST, -1.0 + TURN_CREDIT * max(0, num_turns - 2) / 2)


def _graded(answer: str | None, truth: Any, same: Same) -> Graded:
    return Graded(answer is not None and same(answer, truth), answer)


FORMAT_SHARE = 0.1


def well_formed(text: str) -> bool:
    """Whether the text begins with `<think>`, closes it, and has a box after it, as verl asks for."""
    _, closed, rest = text.partition("</think>")
    _, boxed, content = rest.partition(r"\boxed{")
    return text.startswith("<think>") and bool(closed) and bool(boxed) and "}" in content


def score(right: bool, formed: bool) -> float:
    return (1 - FORMAT_SHARE) * right + FORMAT_SHARE * formed
