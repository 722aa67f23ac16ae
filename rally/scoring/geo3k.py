r"""Guarantees: a geometry solution earns 0.9 for the right boxed answer and 0.1 for its form, each on its own.

The form: it begins with `<think>`, closes it, and gives a `\boxed{}` answer after that.
"""

from __future__ import annotations

from rally.scoring.answers import last_boxed

FORMAT_SHARE = 0.1


def well_formed(text: str) -> bool:
    thought, closed, rest = text.strip().partition("</think>")
    return thought.startswith("<think>") and bool(closed) and last_boxed(rest) is not None


def score(right: bool, formed: bool) -> float:
    return (1 - FORMAT_SHARE) * right + FORMAT_SHARE * formed
