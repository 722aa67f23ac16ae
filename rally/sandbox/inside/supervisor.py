"""The supervisor of an execution: runs its steps or cells, enforces limits, and reports the outcome to the host.

It is process 1 of its pid namespace. Every execution ends with all its processes, and its outcome is one message of
bounded size. If the host disconnects, the supervisor kills everything.
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
from rally.sandbox.inside.execution_request import Caps, ExecutionRequest, Step
from rally.sandbox.inside.program_process import ProgramProcess
from rally.sandbox.inside.resource_monitor import ProcessTree, ProgramCgroup, ResourceWatch, reap

TICK = 0.02  # seconds between measurements; memory may exceed its limit for that long
GRACE = 1.0  # seconds for an interrupted session to respond
_CHUNK = 1 << 16


class HostGone(ConnectionError):
    """The host has disconnected."""


@dataclass
class Capture:
    """The first `limit` bytes of a stream, and the number of further bytes."""

    limit: int
    kept: bytearray = field(default_factory=bytearray)
    cut: int = 0

    def take(self, data: bytes) -> None:
        space = self.limit - len(self.kept)
        self.kept += data[:space]
        self.cut += max(0, len(data) - space)


class Follower:
    """Follows one program, or one cell of a session, to its end."""

    def __init__(
        self, launched: ProgramProcess, host: socket.socket, watch: ResourceWatch, caps: Caps, session: bool
    ) -> None:
        self._launched = launched
        self._host = host
        self._watch = watch
        self._session = session
        self._reply = Capture(caps.output * 8)  # JSON may encode one byte as six
        self.out = Capture(caps.output)
        self.err = Capture(caps.output)
        self.reason = ""
        self.return_code: int | None = None
        self.result: dict[str, Any] | None = None
        self.seconds = 0.0
        self._streams: list[tuple[int, Callable[[bytes], None]]] = [
            (launched.out, self.out.take),
            (launched.err, self.err.take),
            (launched.link.fileno(), self._read_reply),
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
        self.reason = self.reason or self._watch.killed_for() or ""
        self.seconds = time.monotonic() - started

    def drain(self) -> None:
        """Read what is left in the pipes, after all writers have ended."""
        for end, take in self._streams:
            while _read_some(end, take) == _CHUNK:
                pass

    def _ended(self) -> bool:
        status = reap().get(self._launched.pid)
        if status is not None:
            self.return_code = os.waitstatus_to_exitcode(status)
        return status is not None or (self._session and self.result is not None)

    def _read_reply(self, data: bytes) -> None:
        """Read the result that the program reports. It is not trusted beyond the program itself."""
        self._reply.take(data)
        if b"\n" in data and self.result is None:
            try:
                reply = json.loads(self._reply.kept.partition(b"\n")[0])
            except (ValueError, RecursionError):
                reply = None
            valid = isinstance(reply, dict) and isinstance(reply.get("code", 0), int)
            self.result = reply if valid else {}

    def _hung_up(self, data: bytes) -> None:
        raise HostGone("the host disconnected")

    def _interrupt(self) -> bool:
        """Interrupt a session, so that its variables survive. Returns whether this is a session."""
        if self._session:
            with suppress(ProcessLookupError):
                os.kill(self._launched.pid, signal.SIGINT)
        return self._session


def _read_some(end: int, take: Callable[[bytes], None]) -> int:
    """Pass available bytes to `take`; returns their number, 0 at the end of the stream, -1 if there are none."""
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
    """Runs one execution request."""

    def __init__(
        self,
        level: LevelName,
        request: ExecutionRequest,
        host: socket.socket,
        path: list[str],
        cgroup: ProgramCgroup | None = None,
    ) -> None:
        self._level: LevelName = level
        self._request = request
        self._host = host
        self._path = path
        self._tree = ProcessTree(own_namespace=level == "bubblewrap")
        self._cgroup = cgroup
        self._watch = ResourceWatch(request.caps, self._tree, request.folder, cgroup)

    def run(self) -> None:
        """Run the request and report, then kill all processes."""
        try:
            if self._request.session:
                self._run_session()
            else:
                self._run_steps()
        except ConnectionError:
            pass  # the host is gone
        finally:
            self._tree.kill()

    def _run_steps(self) -> None:
        steps: list[json_socket.Message] = []
        echo: str | None = None
        for step in self._request.steps:
            launched = self._start(step, first=not steps)
            follower = self._follow(launched, step)
            self._tree.kill()
            follower.drain()
            program_process.close(launched)
            steps.append(_result(step, follower))
            echo = self._echo(follower)
            if follower.reason or follower.return_code != 0:
                break
        files = program_process.fetch(self._level, self._request, self._cgroup)
        self._report(steps, echo, files=files.contents, files_left_out=files.left_out)

    def _run_session(self) -> None:
        launched = self._start(None)
        alive = True
        while alive:
            self._tree.signal(signal.SIGSTOP)  # nothing runs between cells, so nothing needs measuring
            cell = json_socket.receive(self._host)
            self._tree.signal(signal.SIGCONT)
            try:
                program_process.send_cell(launched, cell["code"])
            except OSError:
                self._tree.kill()  # it no longer reads; the follower then sees its end
            step = Step(name="run", timeout=cell["timeout"])
            follower = self._follow(launched, step)
            alive = follower.result is not None and follower.return_code is None
            if not alive:
                self._tree.kill()
            follower.drain()
            self._report([_result(step, follower)], self._echo(follower), lost=not alive)

    def _start(self, step: Step | None, first: bool = True) -> ProgramProcess:
        return program_process.start(self._level, self._request, step, self._path, self._cgroup, first)

    def _follow(self, launched: ProgramProcess, step: Step) -> Follower:
        self._watch.restart()
        follower = Follower(launched, self._host, self._watch, self._request.caps, self._request.session)
        follower.until_ended(step.timeout, self._request.caps.cpu_seconds or step.timeout)
        return follower

    def _echo(self, follower: Follower) -> str | None:
        """The value of the final expression, if the program printed nothing."""
        echo = (follower.result or {}).get("echo")
        if not isinstance(echo, str) or follower.out.kept:
            return None
        return echo[: self._request.caps.output]

    def _report(self, steps: list[json_socket.Message], echo: str | None, **more: Any) -> None:
        json_socket.send(self._host, {"steps": steps, "echo": echo, "peak_memory": self._watch.peak_memory, **more})


def _result(step: Step, follower: Follower) -> json_socket.Message:
    late = follower.reason in ("timeout", "cpu")
    code = follower.return_code
    if code is None:  # a cell that finished, or a program that was killed
        code = int((follower.result or {"code": _KILLED}).get("code") or 0)
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
