"""Guarantees: two answers that are equal as mathematics are the same, however they are written.

It asks the package math-verify, and through it sympy, which may take arbitrarily long over an innocent formula: call it
only where it can be killed. Its own alarms are switched off, because a time-out that reads as "wrong" would be a lie.
"""

from __future__ import annotations

from typing import Any

from rally.scoring.latex import LONGEST, same_answer


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
