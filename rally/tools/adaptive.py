"""Guarantees: the number of calls a tool is given at a time stays between two bounds, and settles at what it bears.

Additive increase, multiplicative decrease, judged by rounds of as many calls as may run at a time. A round was too much
when its calls took twice as long as they can, when more than a tenth timed out, or when more than half failed (some
failures are the model's). Then a quarter is taken away. Otherwise, if calls had to wait, one more is let in; on the way
up from the lower bound, twice as many until the first trouble. How long calls can take is the shortest round since the
number was last at that bound: there a call takes what it takes, and a tool that has become slower is believed so.
"""

from __future__ import annotations

from dataclasses import dataclass, field

TOO_SLOW = 2.0
TIMED_OUT, FAILED = 0.1, 0.5
DECREASE = 0.75
SHORTEST_ROUND = 8  # fewer calls say little about how long one takes


@dataclass
class Adaptive:
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
