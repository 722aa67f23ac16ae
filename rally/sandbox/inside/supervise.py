"""Guarantees: an execution ends with all its processes, and what came of it is one message of bounded size.

This is process 1 of an execution. It runs the steps of an order, or the cells of a session, and tells the host. When
the host is gone, it ends everything.
"""

from __future__ import annotations

import signal
import socket
from typing import Any

from rally.sandbox import wire
from rally.sandbox.inside import launch
from rally.sandbox.inside.confine import LevelName
from rally.sandbox.inside.follow import Follower
from rally.sandbox.inside.launch import Launched
from rally.sandbox.inside.order import Order, Step
from rally.sandbox.inside.watch import Tree, Watch

_KILLED = -int(signal.SIGKILL)


class Supervisor:
    def __init__(self, level: LevelName, order: Order, host: socket.socket, path: list[str]) -> None:
        self._level: LevelName = level
        self._order = order
        self._host = host
        self._path = path
        self._tree = Tree(own_namespace=level == "bubblewrap")
        self._watch = Watch(order.caps, self._tree, order.folder)

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
        steps: list[wire.Message] = []
        echo: str | None = None
        for step in self._order.steps:
            launched = launch.start(self._level, self._order, step, self._path, first=not steps)
            follower = self._follow(launched, step)
            self._tree.kill()
            follower.drain()
            launch.close(launched)
            steps.append(_result(step, follower))
            echo = self._echo(follower)
            if follower.reason or follower.return_code != 0:
                break
        files = launch.fetch(self._level, self._order)
        self._tell(steps, echo, files=files.contents, files_left_out=files.left_out)

    def _run_session(self) -> None:
        launched = launch.start(self._level, self._order, None, self._path)
        alive = True
        while alive:
            self._tree.signal(signal.SIGSTOP)  # between cells nothing runs, so nothing needs watching
            cell = wire.receive(self._host)
            self._tree.signal(signal.SIGCONT)
            try:
                launch.send_cell(launched, cell["code"])
            except OSError:
                self._tree.kill()  # it does not listen any more; following it will find it ended
            step = Step(name="run", timeout=cell["timeout"])
            follower = self._follow(launched, step)
            alive = follower.heard is not None and follower.return_code is None
            if not alive:
                self._tree.kill()
            follower.drain()
            self._tell([_result(step, follower)], self._echo(follower), lost=not alive)

    def _follow(self, launched: Launched, step: Step) -> Follower:
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

    def _tell(self, steps: list[wire.Message], echo: str | None, **more: Any) -> None:
        wire.send(self._host, {"steps": steps, "echo": echo, "peak_memory": self._watch.peak_memory, **more})


def _result(step: Step, follower: Follower) -> wire.Message:
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
