"""Runs a server so that nothing of it outlives the program that asked for it: python launcher.py SECONDS COMMAND...

It leads a process group of its own, which the server and whatever that starts belong to. It is told by the kernel when
its parent dies, in whatever way, ends the server (politely for SECONDS), and its last act is to kill the whole group.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
from types import FrameType

PR_SET_PDEATHSIG = 1


def main(seconds: float, command: list[str]) -> None:
    parent = os.getppid()
    signal.signal(signal.SIGTERM, _leave)
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    code = 0
    server = None
    try:
        if os.getppid() == parent:  # else it died before the kernel knew that we want to be told
            server = subprocess.Popen(command, stdin=subprocess.DEVNULL)
            code = server.wait()
    except KeyboardInterrupt:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if server is not None:
            server.terminate()
            _wait(server, seconds)
    _say(code)
    os.killpg(0, signal.SIGKILL)


def _say(code: int) -> None:
    """The group is killed with us in it, so how the server ended is told in the log."""
    how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
    os.write(2, f"the process has ended: {how}\n".encode())


def _wait(server: subprocess.Popen[bytes], seconds: float) -> None:
    try:
        server.wait(seconds)
    except subprocess.TimeoutExpired:
        return


def _leave(number: int, frame: FrameType | None) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    main(float(sys.argv[1]), sys.argv[2:])
