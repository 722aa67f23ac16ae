"""Guarantees: at most so many at once, in each event loop; a semaphore alone cannot serve one loop after another."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary


class Gate:
    """Use as `async with gate.open():`."""

    def __init__(self, at_once: int) -> None:
        self._at_once = at_once
        self._by_loop: WeakKeyDictionary[asyncio.AbstractEventLoop, asyncio.Semaphore] = WeakKeyDictionary()

    def open(self) -> asyncio.Semaphore:
        return self._by_loop.setdefault(asyncio.get_running_loop(), asyncio.Semaphore(self._at_once))
