"""Guarantees: a running program is followed until it ends, answers, breaks a cap or runs out of time.

What it prints is always read, so that it never waits for us; of each stream the first bytes are kept, the rest counted.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

from rally.sandbox.inside.launch import Launched
from rally.sandbox.inside.order import Caps
from rally.sandbox.inside.watch import Watch, reap

TICK = 0.02  # how often caps are measured: memory then overshoots by what a machine can touch in that time
GRACE = 1.0  # for an interrupted session to come back
_CHUNK = 1 << 16


class HostGone(ConnectionError):
    """Nobody waits for this execution any more."""


@dataclass
class Capture:
    """The first `limit` bytes of a stream, and how many more there were."""

    limit: int
    kept: bytearray = field(default_factory=bytearray)
    cut: int = 0

    def take(self, data: bytes) -> None:
        room = self.limit - len(self.kept)
        self.kept += data[:room]
        self.cut += max(0, len(data) - room)


class Follower:
    """One program, or one cell of a session, from now to its end."""

    def __init__(self, launched: Launched, host: socket.socket, watch: Watch, caps: Caps, session: bool) -> None:
        self._launched = launched
        self._host = host
        self._watch = watch
        self._session = session
        self._word = Capture(caps.output * 8)  # JSON may spell one byte with six
        self.out = Capture(caps.output)
        self.err = Capture(caps.output)
        self.reason = ""
        self.return_code: int | None = None
        self.heard: dict[str, Any] | None = None
        self.seconds = 0.0
        self._streams: list[tuple[int, Callable[[bytes], None]]] = [
            (launched.out, self.out.take),
            (launched.err, self.err.take),
            (launched.link.fileno(), self._listen),
        ]

    def until_ended(self, timeout: float, cpu_seconds: float) -> None:
        started = now = time.monotonic()
        deadline, next_watch = started + timeout, started + TICK
        with selectors.DefaultSelector() as selector, _ending(self._launched.pid) as ending:
            for end, take in [*self._streams, (self._host.fileno(), self._hung_up), (ending, None)]:
                selector.register(end, selectors.EVENT_READ, take)
            while not self._ended():
                if now >= deadline:
                    if self.reason or not self._interrupt():
                        self.reason = "timeout"
                        break
                    self.reason, deadline = "timeout", now + GRACE
                elif now >= next_watch:
                    if breach := self._watch.breach(cpu_seconds):
                        self.reason = breach
                        break
                    next_watch = now + TICK
                for key, _ in selector.select(max(0.0, min(next_watch, deadline) - now)):
                    if key.data is not None and not _read_some(key.fd, key.data):
                        selector.unregister(key.fd)
                now = time.monotonic()
        self.seconds = time.monotonic() - started

    def drain(self) -> None:
        """What was printed but not read yet. At the end nobody writes any more, so this ends."""
        for end, take in self._streams:
            while _read_some(end, take) == _CHUNK:
                pass

    def _ended(self) -> bool:
        status = reap().get(self._launched.pid)
        if status is not None:
            self.return_code = os.waitstatus_to_exitcode(status)
        return status is not None or (self._session and self.heard is not None)

    def _listen(self, data: bytes) -> None:
        """The program's own word of what came of it: it can lie only about itself."""
        self._word.take(data)
        if b"\n" in data and self.heard is None:
            try:
                word = json.loads(self._word.kept.partition(b"\n")[0])
            except (ValueError, RecursionError):
                word = None
            told = isinstance(word, dict) and isinstance(word.get("code", 0), int)
            self.heard = word if told else {}

    def _hung_up(self, data: bytes) -> None:
        raise HostGone("the host hung up")

    def _interrupt(self) -> bool:
        """A session is first asked to stop, so that its variables survive."""
        if self._session:
            with suppress(ProcessLookupError):
                os.kill(self._launched.pid, signal.SIGINT)
        return self._session


def _read_some(end: int, take: Callable[[bytes], None]) -> int:
    """How many bytes there were; 0 at the end of the stream. The host's end is handed on too."""
    try:
        data = os.read(end, _CHUNK)
    except BlockingIOError:
        return -1
    except ConnectionError:
        data = b""
    take(data)
    return len(data)


@contextmanager
def _ending(pid: int) -> Iterator[int]:
    end = os.pidfd_open(pid)
    try:
        yield end
    finally:
        os.close(end)
