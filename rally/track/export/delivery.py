"""Delivery of records to trackers: each once and in order, with retries, and a ledger of what was sent.

A destination that fails is retried with growing pauses and never stops the others. Records that could not be sent are
reported as missing.
"""

from __future__ import annotations

import json
import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Generic, NamedTuple, Protocol, TypeVar

from rally.track.export.settings import without_password
from rally.track.metrics.statistics import Metrics
from rally.track.run_folder.folder import RunFolder
from rally.types import RallyError
from rally.util.atomic_files import write_atomic
from rally.util.jsonl import StepLinesTail
from rally.util.locks import LockFile

LOCK_SECONDS = 60.0  # how long to wait for what an earlier attempt still has to send


class StillSending(RallyError):
    """The export process of an earlier attempt has not ended."""


@contextmanager
def sole_exporter(state: Path, timeout: float = LOCK_SECONDS) -> Iterator[None]:
    """Wait until no other process exports the run of `state`, and keep others waiting while the block lasts."""
    state.mkdir(parents=True, exist_ok=True)
    with LockFile(state / "lock") as lock:
        if not lock.acquire(timeout):
            raise StillSending(
                f"trackers are still being sent what {state.parent} holds, by another run there or by the process "
                "of an earlier one; wait for its end and try again"
            )
        yield


@dataclass
class DeliveryLedger:
    """What a tracker has received, stored in a file. Positions up to `through` have arrived; `sending` may have."""

    path: Path
    id: str = ""  # the tracker's id of this run
    through: int = -1
    sending: int | None = None

    @classmethod
    def read(cls, path: Path) -> DeliveryLedger:
        return cls(path, **json.loads(path.read_text("utf-8"))) if path.exists() else cls(path)

    def continues(self, after: int) -> bool:
        """Whether a run that resumes after position `after` can continue in the same tracker run without duplicates."""
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
    """The metrics of one line and their position; `at` is the Unix time at which they were read."""

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
    """Follows episodes/. A file that exists is complete."""

    def __init__(self, folder: RunFolder) -> None:
        self._folder = folder
        self._seen: set[int] = set()

    def news(self, now: float) -> list[EpisodeFile]:
        """The files that appeared since the last call. `now` is unused: episodes record their own times."""
        train = self._folder.episode_steps(False)
        # Both files of a step may appear between the two listings: its validation then waits for the next call.
        val = [step for step in self._folder.episode_steps(True) if step <= max(train, default=0)]
        files = [EpisodeFile(2 * s, s, False) for s in train] + [EpisodeFile(2 * s + 1, s, True) for s in val]
        new = sorted(file for file in files if file.position not in self._seen)
        self._seen.update(file.position for file in new)
        return new


LONGEST_PAUSE = 60.0
LAST_PAUSES = (0.0, 5.0, 20.0)  # wait for a server that is being restarted


class Positioned(Protocol):
    @property
    def position(self) -> int: ...


T = TypeVar("T", bound=Positioned)
T_co = TypeVar("T_co", bound=Positioned, covariant=True)
T_contra = TypeVar("T_contra", bound=Positioned, contravariant=True)


class EventSource(Protocol[T_co]):
    def news(self, now: float) -> Sequence[T_co]: ...


class Destination(Protocol[T_contra]):
    """A tracker. `where` tells the user how to open it."""

    @property
    def where(self) -> str: ...

    def send(self, item: T_contra) -> None: ...

    def close(self, ok: bool) -> None: ...


@dataclass
class Stream(Generic[T]):
    """Delivers from one source to one destination. `report(kind, name, text)` reaches the user's console."""

    name: str
    source: EventSource[T]
    ledger: DeliveryLedger
    connect: Callable[[DeliveryLedger], Destination[T]]  # prepares the ledger: continues or starts again
    report: Callable[[str, str, str], None]
    clock: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep
    _destination: Destination[T] | None = None
    _waiting: deque[T] = field(default_factory=deque)
    _received: int = -1  # all records up to this position had arrived when it was opened
    _failures: int = 0
    _retry_at: float = 0.0

    def open(self) -> None:
        """Connect, or report why not. Nothing is sent to a destination that was never opened."""
        try:
            self._destination = self.connect(self.ledger)
        except Exception as error:  # noqa: BLE001 - a tracker's library and its server may raise anything
            problem = f"{self.name} cannot be opened ({error_text(error)}); fix that, or leave {self.name} out"
            self.report("refused", self.name, problem)
        else:
            self._received = self.ledger.through
            self.report("opened", self.name, self._destination.where)

    def pump(self, *, last: bool = False) -> None:
        """Send new records. After a failure, only when its pause is over or with `last`."""
        if self._destination is None:
            return
        now = self.clock()
        try:
            self._waiting.extend(item for item in self.source.news(now) if item.position > self._received)
            if now < self._retry_at and not last:
                return
            while self._waiting:
                self._send(self._destination, self._waiting[0])
                self._waiting.popleft()
                self._failures = 0
        except Exception as error:  # noqa: BLE001 - as above: training continues whatever a tracker does
            self._failures += 1
            self._retry_at = self.clock() + min(LONGEST_PAUSE, 2.0**self._failures)
            self.report("failed", self.name, error_text(error))

    def close(self, ok: bool) -> None:
        """Send the rest, close the tracker's run as successful or not, and report where it is."""
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
            self.report("unended", self.name, error_text(error))
        if missing:
            self.report("missing", self.name, str(missing))
        self.report("closed", self.name, self._destination.where)

    def _send(self, destination: Destination[T], item: T) -> None:
        self.ledger.will_send(item.position)
        destination.send(item)
        self.ledger.was_sent(item.position)


def error_text(error: Exception) -> str:
    """The type of an error and the first line of its message."""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}: {without_password(first)[:300]}" if first else type(error).__name__


AnyStream = Stream[Any]
