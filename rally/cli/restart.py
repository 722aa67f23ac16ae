"""`--restart`: runs a command again when it has lost a rank or a node, until it is done.

The command runs as a child process, because a lost rank can leave torch in a state that only the end of the process
clears. It resumes from its last checkpoint by itself. If this process is killed, the kernel asks the run to stop.
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import NamedTuple

from rally.types import LOST_EXIT_CODE
from rally.util.process_guard import PR_SET_PDEATHSIG

MAX_RESTARTS = 3  # in a row without a new checkpoint
PAUSE_SECONDS = 2.0


def run_with_restarts(command: Sequence[str], checkpoints: Path, note: Callable[[str], None]) -> int:
    """Run `command` and return its exit code. It is run again if it lost a rank or a node, or if it was killed, but at
    most `MAX_RESTARTS` times in a row without a new checkpoint."""
    tries, newest = 0, _newest(checkpoints)
    while True:
        code, asked = _run(command)
        if asked or code not in (LOST_EXIT_CODE, -signal.SIGKILL):
            return code if code >= 0 else 128 - code
        step = _newest(checkpoints)
        tries, newest = (1, step) if step != newest else (tries + 1, newest)
        if tries > MAX_RESTARTS:
            note(f"the run was lost {tries} times without a new checkpoint; not starting it again")
            return LOST_EXIT_CODE
        where = f"from step {step}" if step is not None else "from the beginning, because there is no checkpoint"
        note(f"starting the run again {where} (restart {tries})")
        time.sleep(PAUSE_SECONDS)


def own_command() -> list[str]:
    """The command line of this process without --restart."""
    return [sys.executable, "-m", "rally.cli", *(arg for arg in sys.argv[1:] if arg != "--restart")]


def _newest(checkpoints: Path) -> int | None:
    steps = [path.name.removeprefix("global_step_") for path in checkpoints.glob("global_step_*")]
    return max((int(step) for step in steps if step.isdigit()), default=None)


class _Outcome(NamedTuple):
    code: int
    asked: bool  # whether the run was asked to stop


def _run(command: Sequence[str]) -> _Outcome:
    """Run the command in a process group of its own and pass SIGINT and SIGTERM on, once each."""
    child: subprocess.Popen[bytes] | None = None
    asked = False

    def pass_on(number: int, frame: FrameType | None) -> None:
        nonlocal asked
        asked = True
        if child is not None:
            child.send_signal(number)

    before = {number: signal.signal(number, pass_on) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        child = subprocess.Popen(command, process_group=0, preexec_fn=_end_with_this)
        if asked:  # before it was started
            child.terminate()
        return _Outcome(child.wait(), asked)
    finally:
        for number, action in before.items():
            signal.signal(number, action)


def _end_with_this() -> None:
    """Runs in the child before the command."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
