"""An address as it can be told to anybody: what was written before its `@` goes with requests as a header, and is in
no name, no sentence and no log."""

from __future__ import annotations

import base64
from typing import NamedTuple
from urllib.parse import unquote, urlsplit, urlunsplit


class Address(NamedTuple):
    """Where a server is, and who asks it."""

    url: str
    headers: dict[str, str]

    @classmethod
    def of(cls, written: str) -> Address:
        """`http://user:password@host:8000/` as http://host:8000 and basic authentication."""
        parts = urlsplit(written)
        who, at, where = parts.netloc.rpartition("@")
        url = urlunsplit(parts._replace(netloc=where)).rstrip("/")
        user, _, password = who.partition(":")
        credentials = base64.b64encode(f"{unquote(user)}:{unquote(password)}".encode()).decode()
        return cls(url, {"Authorization": f"Basic {credentials}"} if at else {})
