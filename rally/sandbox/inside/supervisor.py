"""Guarantees: an execution ends with all its processes, and what came of it is one message of bounded size.

This is process 1 of an execution. It runs the steps of an order, or the cells of a session, and tells the host. When
the host is gone, it ends everything.
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

from rally.sandbox import json_socket
from rally.sandbox.inside import program_process
from rally.sandbox.inside.confine import LevelName
from rally.sandbox.inside.program_process import ProgramProcess
from rally.sandbox.inside.request import Caps, Order, Step
from rally.sandbox.inside.resource_limits import ProcessTree, ResourceWatch, reap

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

    def __init__(
        self, launched: ProgramProcess, host: socket.socket, watch: ResourceWatch, caps: Caps, session: bool
    ) -> None:
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


_KILLED = -int(signal.SIGKILL)


class Supervisor:
    def __init__(self, level: LevelName, order: Order, host: socket.socket, path: list[str]) -> None:
        self._level: LevelName = level
        self._order = order
        self._host = host
        self._path = path
        self._tree = ProcessTree(own_namespace=level == "bubblewrap")
        self._watch = ResourceWatch(order.caps, self._tree, order.folder)

    def run(self) -> None:
        """All there is to do, whatever comes in between."""
        try:
            if self._order.session:
                self._run_session()
            else:
                self._run_steps()
        except ConnectionError:
            pass  # nobody is left to tell
        finally:
            self._tree.kill()

    def _run_steps(self) -> None:
        steps: list[json_socket.Message] = []
        echo: str | None = None
        for step in self._order.steps:
            launched = program_process.start(self._level, self._order, step, self._path, first=not steps)
            follower = self._follow(launched, step)
            self._tree.kill()
            follower.drain()
            program_process.close(launched)
            steps.append(_result(step, follower))
            echo = self._echo(follower)
            if follower.reason or follower.return_code != 0:
                break
        files = program_process.fetch(self._level, self._order)
        self._tell(steps, echo, files=files.contents, files_left_out=files.left_out)

    def _run_session(self) -> None:
        launched = program_process.start(self._level, self._order, None, self._path)
        alive = True
        while alive:
            self._tree.signal(signal.SIGSTOP)  # between cells nothing runs, so nothing needs watching
            cell = json_socket.receive(self._host)
            self._tree.signal(signal.SIGCONT)
            try:
                program_process.send_cell(launched, cell["code"])
            except OSError:
                self._tree.kill()  # it does not listen any more; following it will find it ended
            step = Step(name="run", timeout=cell["timeout"])
            follower = self._follow(launched, step)
            alive = follower.heard is not None and follower.return_code is None
            if not alive:
                self._tree.kill()
            follower.drain()
            self._tell([_result(step, follower)], self._echo(follower), lost=not alive)

    def _follow(self, launched: ProgramProcess, step: Step) -> Follower:
        self._watch.restart()
        follower = Follower(launched, self._host, self._watch, self._order.caps, self._order.session)
        follower.until_ended(step.timeout, self._order.caps.cpu_seconds or step.timeout)
        return follower

    def _echo(self, follower: Follower) -> str | None:
        """The value of the last line, when the program printed nothing."""
        echo = (follower.heard or {}).get("echo")
        if not isinstance(echo, str) or follower.out.kept:
            return None
        return echo[: self._order.caps.output]

    def _tell(self, steps: list[json_socket.Message], echo: str | None, **more: Any) -> None:
        json_socket.send(self._host, {"steps": steps, "echo": echo, "peak_memory": self._watch.peak_memory, **more})


def _result(step: Step, follower: Follower) -> json_socket.Message:
    late = follower.reason in ("timeout", "cpu")
    code = follower.return_code
    if code is None:  # a cell that answered, or a program that was ended
        code = int((follower.heard or {"code": _KILLED}).get("code") or 0)
    return {
        "name": step.name,
        "status": "TimeLimitExceeded" if late else "Finished",
        "return_code": None if late else code,
        "seconds": follower.seconds,
        "stdout": follower.out.kept.decode("utf-8", "replace"),
        "stderr": follower.err.kept.decode("utf-8", "replace"),
        "stdout_cut": follower.out.cut,
        "stderr_cut": follower.err.cut,
        "reason": follower.reason,
    }
