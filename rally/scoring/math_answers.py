r"""Guarantees: a geometry solution earns 0.9 for the right boxed answer and 0.1 for its form, each on its own.

The form: it begins with `<think>`, closes it, and gives a `\boxed{}` answer after that.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

from rally.scoring.answer_extraction import last_boxed, last_line

LONGEST = 1000  # characters; an answer is short, and what is longer is not read

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
    left, right = normalise(one), normalise(other)
    if not left or not right:
        return False
    if left == right:
        return True
    value = _value(left)
    return value is not None and value == _value(right)


def normalise(answer: Any) -> str:
    """The answer in the one spelling that answers are compared in; empty for what is too long to be one."""
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
    r"""`\text{east}` is east, but what `\text{}` adds after an answer is its unit."""
    first = _TEXT.match(text)
    if first:
        return (first[1] + text[first.end() :]).strip()
    return _TEXT.sub("", text).strip()


def _value(text: str) -> Fraction | None:
    """The number that is written there, as long as it is one."""
    if _DECIMAL.fullmatch(text):
        return Fraction(text.removesuffix("."))
    parts = _FRACTION.fullmatch(text)
    if parts is None or int(parts[3]) == 0:
        return None
    return Fraction(int(parts[2]), int(parts[3])) * (-1 if parts[1] else 1)


def installed() -> bool:
    """Also takes the second that the import needs, so that no answer has to wait for it."""
    try:
        import math_verify  # noqa: F401
    except ImportError:
        return False
    return True


def same_symbolic(one: Any, other: Any) -> bool:
    if same_answer(one, other):
        return True
    if max(len(str(one)), len(str(other))) > LONGEST:
        return False
    from math_verify import parse, verify  # an extra, so not at the top

    answer, truth = (parse(f"${text}$", parsing_timeout=None) for text in (one, other))
    return bool(verify(truth, answer, timeout_seconds=None))


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


FORMAT_SHARE = 0.1


def well_formed(text: str) -> bool:
    thought, closed, rest = text.strip().partition("</think>")
    return thought.startswith("<think>") and bool(closed) and last_boxed(rest) is not None


def score(right: bool, formed: bool) -> float:
    return (1 - FORMAT_SHARE) * right + FORMAT_SHARE * formed
