"""Everything a source finds reaches its destination once and in order, or is told to be missing; a destination that
fails is tried again, ever more seldom, and stops nobody."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Protocol, TypeVar

from rally.track.export.ledger import Ledger
from rally.track.export.place import without_password

LONGEST_PAUSE = 60.0
LAST_PAUSES = (0.0, 5.0, 20.0)  # a server that is being started again is waited for


class Positioned(Protocol):
    @property
    def position(self) -> int: ...


T = TypeVar("T", bound=Positioned)
T_co = TypeVar("T_co", bound=Positioned, covariant=True)
T_contra = TypeVar("T_contra", bound=Positioned, contravariant=True)


class Source(Protocol[T_co]):
    def news(self, now: float) -> Sequence[T_co]: ...


class Destination(Protocol[T_contra]):
    """Where things go. `where` tells a person how to look at them."""

    @property
    def where(self) -> str: ...

    def send(self, item: T_contra) -> None: ...

    def close(self, ok: bool) -> None: ...


@dataclass
class Stream(Generic[T]):
    """From one source to one destination. `tell(kind, name, text)` reaches the person at the console."""

    name: str
    source: Source[T]
    ledger: Ledger
    connect: Callable[[Ledger], Destination[T]]  # readies the ledger: it may go on, or begin again
    tell: Callable[[str, str, str], None]
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    _destination: Destination[T] | None = None
    _waiting: deque[T] = field(default_factory=deque)
    _has: int = -1  # the position through which it had all when it was opened
    _failures: int = 0
    _retry_at: float = 0.0

    def open(self) -> None:
        """Connect, or say why not; nothing is sent to a destination that never opened."""
        try:
            self._destination = self.connect(self.ledger)
        except Exception as error:  # noqa: BLE001 - a tracker's library and its server may raise anything
            told = f"{self.name} cannot be opened ({words(error)}); mend that, or leave {self.name} out"
            self.tell("refused", self.name, told)
        else:
            self._has = self.ledger.through
            self.tell("opened", self.name, self._destination.where)

    def pump(self, *, last: bool = False) -> None:
        """Send what is new; after a failure, only when its pause is over or this is the last chance."""
        if self._destination is None:
            return
        now = self.clock()
        try:
            self._waiting.extend(item for item in self.source.news(now) if item.position > self._has)
            if now < self._retry_at and not last:
                return
            while self._waiting:
                self._send(self._destination, self._waiting[0])
                self._waiting.popleft()
                self._failures = 0
        except Exception as error:  # noqa: BLE001 - as above: training goes on whatever a tracker does
            self._failures += 1
            self._retry_at = self.clock() + min(LONGEST_PAUSE, 2.0**self._failures)
            self.tell("failed", self.name, words(error))

    def close(self, ok: bool) -> None:
        """Send the rest, end the tracker's run as `ok` or not, and say what is where."""
        if self._destination is None:
            return
        for pause in LAST_PAUSES:
            self.sleep(pause)
            self.pump(last=True)
            if not self._waiting:
                break
        missing = len(self._waiting)
        try:
            self._destination.close(ok)
        except Exception as error:  # noqa: BLE001 - as above
            self.tell("unended", self.name, words(error))
        if missing:
            self.tell("missing", self.name, str(missing))
        self.tell("closed", self.name, self._destination.where)

    def _send(self, destination: Destination[T], item: T) -> None:
        self.ledger.will_send(item.position)
        destination.send(item)
        self.ledger.was_sent(item.position)


def words(error: Exception) -> str:
    """The first line of what a library said, with the kind of the error: its text alone may say nothing."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {without_password(first)[:300]}" if first else type(error).__name__


AnyStream = Stream[Any]
