"""Everything that crosses the pipe to a reward worker is one line of plain JSON.

What JSON has no word for is translated once, here, in the same way for the row going in and the result coming out:
tuples and sets become lists, arrays and tensors become nested lists, keys become strings, bytes (images) become a note
of their size, and anything else becomes its `str`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def plain(value: Any) -> Any:
    """The nearest JSON value."""
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, (bytes, bytearray)):
        return f"<{len(value)} bytes>"
    if hasattr(value, "tolist"):  # numpy and torch, neither of which a worker needs to import
        return plain(value.tolist())
    return str(value)


def encode(value: Mapping[str, Any]) -> bytes:
    """One line. ASCII escapes carry every string a tokenizer can decode to, lone surrogates too."""
    return json.dumps(plain(value)).encode("ascii") + b"\n"


def decode(line: bytes) -> dict[str, Any]:
    message = json.loads(line)
    assert isinstance(message, dict)
    return message
