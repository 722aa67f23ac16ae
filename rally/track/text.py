"""Text that a model, a tool or a user wrote can be shown on a terminal or a page: it neither acts nor tells secrets.

Control characters, ANSI escapes, direction overrides and lone surrogates become visible escapes such as `\\x1b`.
"""

from __future__ import annotations

import math
import re

from rally.redact import redact

# Tab and newline stay. U+200D (the joiner inside emoji) stays too: it cannot move a cursor or reorder a line.
_UNSAFE = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufeff]")


def _escape(match: re.Match[str]) -> str:
    code = ord(match.group())
    return f"\\x{code:02x}" if code < 0x100 else f"\\u{code:04x}"


def visible(text: str) -> str:
    """`text` without known secrets, and with everything that could act on a terminal written out; newlines and tabs are
    kept."""
    return _UNSAFE.sub(_escape, redact(text))


def one_line(text: str) -> str:
    """`visible(text)` on a single line."""
    return visible(text).replace("\n", "\\n").replace("\t", "\\t")


def number(value: float) -> str:
    """A number as a person reads it in a column: whole, with three decimals, or short and scientific."""
    if not math.isfinite(value):
        return str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    if abs(value) >= 1e6 or abs(value) < 0.01:
        return f"{value:.3g}"
    return f"{value:.3f}" if abs(value) < 100 else f"{value:.1f}"
