"""Guarantees: two written numbers are equal exactly when their values are, however they are written."""

from __future__ import annotations

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
