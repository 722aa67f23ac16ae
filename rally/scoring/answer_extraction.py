r"""Extracts the answer of a solution: the last `\boxed{}`, `Answer:` line or tagged text. Parses numbers.

Each function takes one pass over the text, however brackets are nested. A truncated answer (`\boxed{1`) is none.
"""

from __future__ import annotations

import re
from decimal import Decimal, InvalidOperation
from typing import Any


def parse_number(written: Any) -> Decimal | None:
    """The value of `72`, `72.00`, `1,234`, `$5` or `-3.`; None for anything that is not one finite number."""
    try:
        value = Decimal(str(written).replace(",", "").replace("$", "").strip())
    except InvalidOperation:
        return None
    return value if value.is_finite() else None


def same_number(one: Any, other: Any) -> bool:
    value = parse_number(one)
    return value is not None and value == parse_number(other)


BOXES = (r"\boxed{", r"\fbox{")
_LINE = re.compile(r"answer\s*:\s*([^\n]+)", re.IGNORECASE)


def last_boxed(text: str) -> str | None:
    r"""The content of the last `\boxed{...}` or `\fbox{...}`."""
    at = max(text.rfind(box) for box in BOXES)
    content = braced(text, at)
    return None if content is None else content.strip()


def braced(text: str, at: int) -> str | None:
    """The text between the first brace from `at` on and the one that closes it. None if `at` is negative."""
    start = text.find("{", at) + 1 if at >= 0 else 0
    depth = 1
    for end in range(start, len(text) if start else 0):
        depth += {"{": 1, "}": -1}.get(text[end], 0)
        if depth == 0:
            return text[start:end]
    return None


def last_line(text: str) -> str | None:
    r"""The text after the last `Answer:`, on its line or the next, without a box around it."""
    found = _LINE.findall(text)
    if not found:
        return None
    line: str = found[-1].strip().strip("*").strip()
    return last_boxed(line) or line


def last_tagged(text: str, tag: str = "answer") -> str | None:
    """The content of the last `<tag>...</tag>`. A tag ends at the first closing tag after it."""
    opening, closing, found, at = f"<{tag}>", f"</{tag}>", None, 0
    while (start := text.find(opening, at)) >= 0 and (end := text.find(closing, start)) >= 0:
        found, at = text[start + len(opening) : end].strip(), end + len(closing)
    return found
