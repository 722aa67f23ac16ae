"""Runs a server that must not outlive its parent: python process_guard.py SECONDS COMMAND...

The guard leads a process group, which contains the server and everything that the server starts. The kernel sends it
SIGTERM when its parent dies. It then terminates the server, waits up to SECONDS, and kills the whole group. If the
guard is killed, the kernel kills the server.
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys
from contextlib import suppress
from types import FrameType

PR_SET_PDEATHSIG = 1
OPEN_MAX = 2**31 - 1


def main(seconds: float, command: list[str]) -> None:
    parent = os.getppid()
    signal.signal(signal.SIGTERM, _interrupt)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    code = 0
    server = None
    try:
        if os.getppid() == parent:  # else the parent died before prctl took effect
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL, preexec_fn=_end_with_guard)
            code = server.wait()
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if server is not None:
            server.terminate()
            _wait(server, seconds)
    _log_exit(code)
    os.killpg(0, signal.SIGKILL)


def end_with_parent() -> None:
    """The kernel kills this process when the thread that started it ends: also if it hangs or is stopped, and does not
    notice the end of its input. However it ends, what it has started in its process group ends too. Call it first."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getpgrp() == os.getpid():
        with suppress(OSError):  # an old kernel, which cannot tell a process of the end of another
            _end_group_with(os.pidfd_open(os.getpid()))


def _end_group_with(leader: int) -> None:
    """A small process of the same group kills the group when its leader has ended, who cannot do so when it is killed.
    It is nobody's child, so a program that waits for all its children does not wait for it."""
    if (child := os.fork()) == 0:
        try:
            if os.fork() == 0:
                _kill_group_after(leader)
        finally:
            os._exit(0)
    os.close(leader)
    os.waitpid(child, 0)


def _kill_group_after(leader: int) -> None:
    nothing = os.open(os.devnull, os.O_RDWR)  # the pipes of the leader must end with it
    for number in (0, 1, 2):
        os.dup2(nothing, number)
    own = os.dup2(leader, 3)
    os.closerange(own + 1, OPEN_MAX)
    ended = select.poll()
    ended.register(own, select.POLLIN)
    ended.poll()
    os.killpg(0, signal.SIGKILL)


def _end_with_guard() -> None:
    """The kernel kills the server if the guard itself is killed."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


def _log_exit(code: int) -> None:
    """Write to the log how the server ended: the guard is killed with its group and cannot return the status."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    os.write(2, f"the process has ended: {how}\n".encode())


def _wait(server: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _interrupt(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
