"""Calls begin no more often than so many a minute, evenly spaced, in the order they came: for judges behind an API."""

from __future__ import annotations

import asyncio
import time


class Pace:
    """`per_minute` None is no limit."""

    def __init__(self, per_minute: float | None) -> None:
        self._apart = 60.0 / per_minute if per_minute else 0.0
        self._next = 0.0

    async def turn(self) -> float:
        """Wait for this call's turn; the seconds waited."""
        now = time.monotonic()
        begins = max(now, self._next)
        self._next = begins + self._apart
        if begins > now:
            await asyncio.sleep(begins - now)
        return begins - now
