"""The first Ctrl-C lets the step under way end and saves it, the second stops at once; SIGTERM counts as Ctrl-C does.

A run that stopped so ends as KeyboardInterrupt does, with exit code 130: it must not look as if it were complete.
"""

from __future__ import annotations

import os
import shlex
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rally.redact import HIDDEN
from rally.track import RunConsole

SIGNALS = (signal.SIGINT, signal.SIGTERM)
EXIT_CODE = 128 + signal.SIGINT
GRACE_SECONDS = 5.0  # for tools and servers to be closed after the second; whoever hangs then is left to the system
STDERR = 2
SHOW_CURSOR = "\x1b[?25h"


class RunStopped(KeyboardInterrupt):
    """The run ended before its last step because it was asked to; what it did is saved."""


class Interrupt:
    """`requested` says whether the run is to end after the step under way. Listens in the main thread only."""

    def __init__(self) -> None:
        self.requested = False
        self._forced = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._heard) for number in SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _heard(self, number: int, frame: FrameType | None) -> None:
        if self._forced:
            _leave()
        if self.requested:
            self._forced = True
            _say("stopping at once; what was done since the last checkpoint is done again when the run goes on")
            timer = threading.Timer(GRACE_SECONDS, _leave)
            timer.daemon = True
            timer.start()
            raise KeyboardInterrupt
        self.requested = True
        _say("this step is finished and saved first; once more stops at once")


def resume_command(verb: str, config_path: Path, config_text: str, resume_mode: str) -> str:
    """What to type to go on with a run. Its own configuration file is enough unless a secret had to be left out."""
    if HIDDEN in config_text:
        return "the same command again"
    overrides = [] if resume_mode == "auto" else ["trainer.resume_mode=auto"]
    return shlex.join(["rally", verb, str(config_path), *overrides])


def stopped(console: RunConsole, done: int, total: int, command: str) -> RunStopped:
    """Say where the run stands and how to go on; what to raise."""
    where = f"stopped after step {done} of {total}, which is saved" if done else "stopped before the first step"
    console.note(f"{where}; to go on: {command}")
    return RunStopped()


def _say(words: str) -> None:
    # A signal handler may run in the midst of a print, so it keeps away from the buffers that prints share.
    _write(f"\nrally: {words}\n")


def _leave() -> None:
    if os.isatty(STDERR):
        _write(SHOW_CURSOR)  # a progress bar had hidden it
    os._exit(EXIT_CODE)


def _write(text: str) -> None:
    with suppress(OSError):  # Ctrl-C also ended the `tee` that would have read it; the signal still counts
        os.write(STDERR, text.encode())
