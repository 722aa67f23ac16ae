"""Limits how many calls run at a time and how many start per second.

`TokenBucket` limits the rate alone. `RateLimiter` limits rate, concurrency and the length of its queue; its concurrency
may adapt to how the calls go. Both are first come, first served. A caller that is cancelled while it waits uses up
neither a slot nor a token. A limiter is shared only by the callers that hold the object, never by name.
"""

from __future__ import annotations

import asyncio
import time
import weakref
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rally.types import RallyError

TOO_SLOW = 2.0
TIMED_OUT, FAILED = 0.1, 0.5
DECREASE = 0.75
SHORTEST_ROUND = 8  # the mean of fewer calls says little


class QueueFull(RallyError):
    """A call was rejected because too many are waiting. The text goes to the model."""


class TokenBucket:
    """At most `rate` calls a second (None: no limit), with bursts of at most `burst_seconds` times as many.

    `burst_seconds` 0 spaces the calls evenly. One bucket may be used from several event loops, one after the other.
    """

    def __init__(self, rate: float | None, burst_seconds: float = 1.0) -> None:
        self._interval = 1 / rate if rate else 0.0
        self._tolerance = max(0.0, burst_seconds - self._interval)
        self._even = burst_seconds == 0
        self._next = 0.0  # when the next call is due at an even rate (the theoretical arrival time of GCRA)

    def delay(self) -> float:
        """The seconds that a call made now has to wait."""
        return max(0.0, self._next - self._tolerance - time.monotonic())

    async def acquire(self) -> float:
        """Wait for a token. Returns the seconds waited."""
        delay = self.delay()
        self._next = mine = max(self._next, time.monotonic()) + self._interval
        if delay > 0:
            try:
                await asyncio.sleep(delay)
            except asyncio.CancelledError:
                if not self._even or self._next == mine:  # else a later call would start together with another one
                    self._next -= self._interval
                raise
        return delay


@dataclass
class AdaptiveConcurrency:
    """Additive increase, multiplicative decrease of `limit`, between `least` and `most`.

    The limit doubles until the first decrease, then grows by one a round. It shrinks when calls take more than TOO_SLOW
    times the best mean, or when too many time out or fail.
    """

    least: int
    most: int
    _limit: float = field(init=False)
    _starting: bool = field(init=False, default=True)
    _best: float = field(init=False, default=float("inf"))
    _calls: int = field(init=False, default=0)
    _late: int = field(init=False, default=0)
    _failed: int = field(init=False, default=0)
    _seconds: float = field(init=False, default=0.0)

    def __post_init__(self) -> None:
        self._limit = float(self.least)

    @property
    def limit(self) -> int:
        return int(self._limit)

    def record(self, seconds: float, *, late: bool, failed: bool, waiting: bool) -> None:
        """Count one finished call; `waiting` says whether others are queued."""
        self._calls += 1
        self._late += late
        self._failed += failed
        self._seconds += seconds
        if self._calls >= max(self.limit, SHORTEST_ROUND):
            self._adjust(waiting)
            self._calls = self._late = self._failed = 0
            self._seconds = 0.0

    def _adjust(self, waiting: bool) -> None:
        mean = self._seconds / self._calls
        late, failed = self._late / self._calls, self._failed / self._calls
        if self.limit == self.least:
            self._best, self._starting = mean, True
        self._best = min(self._best, mean)
        if mean > TOO_SLOW * self._best or late > TIMED_OUT or failed > FAILED:
            self._starting = False
            self._limit = max(float(self.least), self._limit * DECREASE)
        elif waiting:
            self._limit = min(float(self.most), self._limit * 2 if self._starting else self._limit + 1)


@dataclass
class _LoopState:
    """The state for one event loop: calls running and waiting, the futures of those without a slot, the tokens."""

    bucket: TokenBucket
    running: int = 0
    waiting: int = 0
    queue: deque[asyncio.Future[None]] = field(default_factory=deque)


class RateLimiter:
    """At most `max_concurrency` calls at a time and `rate` a second, with bursts of one second's worth.

    A call that would have to wait behind `max_queue` others is rejected. With `min_concurrency`, the concurrency adapts
    between the two bounds. A limiter may serve several event loops; each loop gets the full limits.
    """

    def __init__(
        self,
        *,
        max_concurrency: int | None = None,
        rate: float | None = None,
        max_queue: int | None = None,
        min_concurrency: int | None = None,
    ) -> None:
        self._max_concurrency = max_concurrency
        self._rate = rate
        self._max_queue = max_queue
        self._adaptive: AdaptiveConcurrency | None = None
        if min_concurrency is not None:
            assert max_concurrency is not None, "adaptive concurrency needs an upper bound"
            self._adaptive = AdaptiveConcurrency(min_concurrency, max_concurrency)
        self._states: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _LoopState] = weakref.WeakKeyDictionary()

    @property
    def concurrency(self) -> int | None:
        """How many calls may run now."""
        return self._adaptive.limit if self._adaptive else self._max_concurrency

    @asynccontextmanager
    async def slot(self) -> AsyncIterator[float]:
        """Wait for a slot and a token, and hold the slot for the block. Yields the seconds waited."""
        loop = asyncio.get_running_loop()
        state = self._states.get(loop)
        if state is None:
            state = self._states[loop] = _LoopState(TokenBucket(self._rate))
        arrived = loop.time()
        full = self._max_queue is not None and state.waiting >= self._max_queue
        if full and (not self._has_slot(state) or state.bucket.delay() > 0):
            raise QueueFull(f"{state.waiting} calls are waiting already; call it again later")
        state.waiting += 1
        try:
            await self._take_slot(state, loop)
            try:
                await state.bucket.acquire()
            except asyncio.CancelledError:
                self._release_slot(state)
                raise
        finally:
            state.waiting -= 1
        try:
            yield loop.time() - arrived
        finally:
            self._release_slot(state)

    def record(self, seconds: float, *, late: bool, failed: bool) -> None:
        """Report how a call went, for adaptive concurrency. Call it while the slot is held."""
        if self._adaptive:
            state = self._states[asyncio.get_running_loop()]
            self._adaptive.record(seconds, late=late, failed=failed, waiting=state.waiting > 0)

    def _has_slot(self, state: _LoopState) -> bool:
        limit = self.concurrency
        return limit is None or state.running < limit

    async def _take_slot(self, state: _LoopState, loop: asyncio.AbstractEventLoop) -> None:
        if self._has_slot(state):  # then the queue is empty: a released slot goes to its head at once
            state.running += 1
            return
        granted: asyncio.Future[None] = loop.create_future()
        state.queue.append(granted)
        try:
            await granted
        except asyncio.CancelledError:
            if granted.done() and not granted.cancelled():  # granted and cancelled in one iteration of the loop
                self._release_slot(state)
            raise

    def _release_slot(self, state: _LoopState) -> None:
        state.running -= 1
        while state.queue and self._has_slot(state):
            granted = state.queue.popleft()
            if not granted.done():
                state.running += 1
                granted.set_result(None)
