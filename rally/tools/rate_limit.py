"""A tool's calls are let through at a bounded rate and a bounded number at a time, first come first served.

A gate belongs to who made it: two tools have two gates, whatever their names, so none is slowed by another's limit.
Who would have to wait where the queue is full is refused at once. Who gives up waiting leaves nothing behind.
"""

from __future__ import annotations

import asyncio
import weakref
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field

from rally.tools.limits import CallLimits
from rally.types import RallyError

TOO_SLOW = 2.0
TIMED_OUT, FAILED = 0.1, 0.5
DECREASE = 0.75
SHORTEST_ROUND = 8  # fewer calls say little about how long one takes


@dataclass
class AdaptiveConcurrency:
    """How many may run now is `limit`; every finished call is told to `learn`."""

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

    def learn(self, seconds: float, *, late: bool, failed: bool, waiting: bool) -> None:
        """One call has ended; `waiting` says whether others wait for their turn."""
        self._calls += 1
        self._late += late
        self._failed += failed
        self._seconds += seconds
        if self._calls >= max(self.limit, SHORTEST_ROUND):
            self._judge(waiting)
            self._calls = self._late = self._failed = 0
            self._seconds = 0.0

    def _judge(self, waiting: bool) -> None:
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


class QueueFull(RallyError):
    """A call was refused because too many wait already. The text is told to the model."""


@dataclass
class _Lane:
    """What belongs to one event loop: who is inside, who waits, and when the bucket will next be full."""

    inside: int = 0
    waiting: int = 0
    asleep: deque[asyncio.Future[None]] = field(default_factory=deque)
    full_at: float = 0.0


class RateLimiter:
    """At most `max_concurrency` at a time and `rate_limit` a second: a bucket that holds a second's worth and refills
    steadily.

    One gate may serve several event loops, one after the other or side by side; each loop gets the limits whole.
    """

    def __init__(self, limits: CallLimits) -> None:
        self._most = limits.max_concurrency
        self._gap = 1 / limits.rate_limit if limits.rate_limit else None
        self._max_queue = limits.max_queue
        self._adaptive: AdaptiveConcurrency | None = None
        if limits.adaptive_concurrency:
            assert self._most is not None
            self._adaptive = AdaptiveConcurrency(limits.min_concurrency, self._most)
        self._lanes: weakref.WeakKeyDictionary[asyncio.AbstractEventLoop, _Lane] = weakref.WeakKeyDictionary()

    @property
    def concurrency(self) -> int | None:
        """How many may be inside now."""
        return self._adaptive.limit if self._adaptive else self._most

    @asynccontextmanager
    async def passage(self) -> AsyncIterator[float]:
        """Wait for a slot and a token; the block holds the slot. Gives the seconds waited."""
        loop = asyncio.get_running_loop()
        lane = self._lanes.setdefault(loop, _Lane())
        came = loop.time()
        if self._max_queue is not None and lane.waiting >= self._max_queue and not self._open(lane, came):
            raise QueueFull(f"{lane.waiting} calls are waiting already; call it again later")
        lane.waiting += 1
        try:
            await self._slot(lane, loop)
            try:
                await self._token(lane, loop)
            except asyncio.CancelledError:
                self._leave(lane)
                raise
        finally:
            lane.waiting -= 1
        try:
            yield loop.time() - came
        finally:
            self._leave(lane)

    def learn(self, seconds: float, *, late: bool, failed: bool) -> None:
        """How a call went: what an adaptive gate goes by. To be told inside the passage."""
        if self._adaptive:
            lane = self._lanes[asyncio.get_running_loop()]
            self._adaptive.learn(seconds, late=late, failed=failed, waiting=lane.waiting > 0)

    def _open(self, lane: _Lane, now: float) -> bool:
        """Whether a call could pass without waiting."""
        return self._has_slot(lane) and (self._gap is None or self._early(lane.full_at + self._gap, now) <= 0)

    def _has_slot(self, lane: _Lane) -> bool:
        most = self.concurrency
        return most is None or lane.inside < most

    async def _slot(self, lane: _Lane, loop: asyncio.AbstractEventLoop) -> None:
        if self._has_slot(lane):  # then nobody waits, for a slot is handed on by who leaves it
            lane.inside += 1
            return
        turn: asyncio.Future[None] = loop.create_future()
        lane.asleep.append(turn)
        try:
            await turn
        except asyncio.CancelledError:
            if turn.done() and not turn.cancelled():  # the slot came in the same moment; it goes to the next
                self._leave(lane)
            raise

    def _leave(self, lane: _Lane) -> None:
        lane.inside -= 1
        while lane.asleep and self._has_slot(lane):
            turn = lane.asleep.popleft()
            if not turn.done():
                lane.inside += 1
                turn.set_result(None)

    async def _token(self, lane: _Lane, loop: asyncio.AbstractEventLoop) -> None:
        if self._gap is None:
            return
        lane.full_at = max(lane.full_at, loop.time()) + self._gap
        early = self._early(lane.full_at, loop.time())
        if early <= 0:
            return
        try:
            await asyncio.sleep(early)
        except asyncio.CancelledError:
            lane.full_at -= self._gap  # who gave up waiting used no token
            raise

    def _early(self, full_at: float, now: float) -> float:
        """Seconds until the bucket holds a token for a call after which it would be full at `full_at`."""
        assert self._gap is not None
        return max(full_at, now + self._gap) - max(1.0, self._gap) - now
