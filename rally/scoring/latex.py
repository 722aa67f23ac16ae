r"""Guarantees: two short answers are the same when their values are, or when they differ only in how LaTeX spells them.

Known spellings: spacing, `\left`, `\dfrac`, `\frac12`, `1/2`, `\sqrt2`, `$`, `\%`, degrees, a unit after a number, a
short `x=` before the answer, `\text{}` around it. Values are compared exactly, as fractions. What needs algebra, such
as `2(x+1)` and `2x+2`, is for `symbolic.py`.
"""

from __future__ import annotations

import re
from fractions import Fraction
from typing import Any

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
