"""Everything a source finds reaches its destination once and in order, or is told to be missing; a destination that
fails is tried again, ever more seldom, and stops nobody."""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rally.track.export.settings import without_password
from rally.track.metrics.statistics import Metrics
from rally.track.run_folder.folder import RunFolder
from rally.util.atomic import write_atomic
from rally.util.jsonl import StepLinesTail


@dataclass
class DeliveryLedger:
    """Kept in a file beside the run. Positions below or at `through` have arrived; `sending` may have."""

    path: Path
    id: str = ""  # what the tracker calls this run
    through: int = -1
    sending: int | None = None

    @classmethod
    def read(cls, path: Path) -> DeliveryLedger:
        return cls(path, **json.loads(path.read_text("utf-8"))) if path.exists() else cls(path)

    def continues(self, after: int) -> bool:
        """Whether a run that goes on after position `after` can go on in the same place, with no point there twice."""
        return bool(self.id) and self.sending is None and self.through <= after

    def begin(self, id: str, through: int = -1) -> None:
        self.id, self.through, self.sending = id, through, None
        self._write()

    def will_send(self, position: int) -> None:
        self.sending = position
        self._write()

    def was_sent(self, position: int) -> None:
        self.through, self.sending = position, None
        self._write()

    def _write(self) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        known = {"id": self.id, "through": self.through, "sending": self.sending}
        write_atomic(self.path, json.dumps(known) + "\n")


class PositionedMetrics(NamedTuple):
    """Something of the folder and its position; `at` is the Unix time of its finding."""

    position: int
    at: float
    metrics: Metrics


class EpisodeFile(NamedTuple):
    position: int
    step: int
    validate: bool


class MetricsLines:
    """Follows metrics.jsonl."""

    def __init__(self, folder: RunFolder) -> None:
        self._tail = StepLinesTail(folder.metrics_path, strict=True)

    def news(self, now: float) -> list[PositionedMetrics]:
        """The lines finished since the last call. null is nan, as everywhere."""
        return [
            PositionedMetrics(
                row["step"], now, {k: math.nan if v is None else v for k, v in row.items() if k != "step"}
            )
            for row in self._tail.read()
        ]


class EpisodeFiles:
    """The files of episodes/, as they come; each is whole when it is there."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._seen: set[int] = set()

    def news(self, now: float) -> list[EpisodeFile]:
        """The files that came since the last call. `now` is not looked at: episodes know when they began."""
        train = self._folder.episode_steps(False)
        # Between the two listings both files of a step may come: its validation then waits for the next call.
        val = [step for step in self._folder.episode_steps(True) if step <= max(train, default=0)]
        files = [EpisodeFile(2 * s, s, False) for s in train] + [EpisodeFile(2 * s + 1, s, True) for s in val]
        new = sorted(file for file in files if file.position not in self._seen)
        self._seen.update(file.position for file in new)
        return new


LONGEST_PAUSE = 60.0
LAST_PAUSES = (0.0, 5.0, 20.0)  # a server that is being started again is waited for


class Positioned(Protocol):
    @property
    def position(self) -> int: ...


T = TypeVar("T", bound=Positioned)
T_co = TypeVar("T_co", bound=Positioned, covariant=True)
T_contra = TypeVar("T_contra", bound=Positioned, contravariant=True)


class EventSource(Protocol[T_co]):
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
    source: EventSource[T]
    ledger: DeliveryLedger
    connect: Callable[[DeliveryLedger], Destination[T]]  # readies the ledger: it may go on, or begin again
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
