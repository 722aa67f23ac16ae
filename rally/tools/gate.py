"""A tool's work is let through at a bounded rate and a bounded number at a time, first come first served.

A gate belongs to who made it: two tools have two gates, whatever their names, so none is slowed by another's limit.
"""

from __future__ import annotations

import asyncio
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rally.tools.schema import ToolConfigError


@dataclass
class _Lane:
    """What belongs to one event loop: its slots, and when the bucket will next be full."""

    slots: asyncio.Semaphore
    full_at: float = field(default=0.0)


class Gate:
    """At most `slots` at a time and `per_second` a second: a bucket that holds a second's worth and refills steadily.

    One gate may serve several event loops, one after the other or side by side; each loop gets the limits whole.
    """

    def __init__(self, slots: int, per_second: float) -> None:
        if slots < 1 or not per_second > 0:
            raise ToolConfigError(f"limits must be more than 0, not {slots} at a time and {per_second} a second")
        self._slots = slots
        self._gap = 1 / per_second
        self._lanes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Lane] = weakref.WeakKeyDictionary()

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[float]:
        """Wait for a slot and a token; the block holds the slot. Gives the seconds waited."""
        loop = asyncio.get_running_loop()
        lane = self._lanes.setdefault(loop, _Lane(asyncio.Semaphore(self._slots)))
        came = loop.time()
        async with lane.slots:
            await self._token(lane, loop)
            yield loop.time() - came

    async def _token(self, lane: _Lane, loop: asyncio.AbstractEventLoop) -> None:
        lane.full_at = max(lane.full_at, loop.time()) + self._gap
        early = lane.full_at - max(1.0, self._gap) - loop.time()
        try:
            await asyncio.sleep(early)
        except asyncio.CancelledError:
            lane.full_at -= self._gap  # who gave up waiting used no token
            raise
