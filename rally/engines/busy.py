"""Adds up the seconds in which at least one piece of work was under way; what overlaps counts once."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class BusyClock:
    """One thread at a time may enter and leave; `seconds` grows when the last piece under way ends."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._under_way = 0
        self._since = 0.0

    @contextmanager
    def working(self) -> Iterator[None]:
        if not self._under_way:
            self._since = time.perf_counter()
        self._under_way += 1
        try:
            yield
        finally:
            self._under_way -= 1
            if not self._under_way:
                self.seconds += time.perf_counter() - self._since
