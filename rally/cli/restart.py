"""`--restart`: runs a command again when it has lost a rank or a node, until it is done.

The command runs as a child process, because a lost rank can leave torch in a state that only the end of the process
clears. It resumes from the last checkpoint that it has written, whatever trainer.resume_mode is. If this process is
killed, the kernel asks the run to stop.
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
LOST = (LOST_EXIT_CODE, -signal.SIGKILL, -signal.SIGABRT)
"""Exit codes of a run that lost a rank or was killed. Where an NCCL operation fails because a rank is gone, or takes
too long, torch aborts the process, maybe before the run has noticed the loss itself."""
FROM_NEWEST = ("trainer.resume_mode=auto", "trainer.resume_from_path=null")


def run_with_restarts(command: Sequence[str], checkpoints: Path, note: Callable[[str], None]) -> int:
    """Run `command` and return its exit code. It is run again if it lost a rank or a node, or if it was killed or
    aborted, but at most `MAX_RESTARTS` times in a row without a new checkpoint. Once it has written one, it goes on
    from there."""
    found = _saved(checkpoints)
    tries, newest = 0, max(found, default=None)
    while True:
        code, asked = _run(command)
        if asked or code not in LOST:
            return code if code >= 0 else 128 - code
        saved = _saved(checkpoints)
        if not saved.items() <= found.items() and not set(FROM_NEWEST) <= set(command):
            command = [*command, *FROM_NEWEST]
        if code == -signal.SIGABRT:
            note("the run was aborted (SIGABRT), as torch does when an NCCL operation fails or takes too long")
        step = max(saved, default=None)
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


def _saved(checkpoints: Path) -> dict[int, int]:
    """The steps of the checkpoints, and when each was written."""
    paths = {path.name.removeprefix("global_step_"): path for path in checkpoints.glob("global_step_*")}
    return {int(step): path.stat().st_mtime_ns for step, path in paths.items() if step.isdigit()}


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
