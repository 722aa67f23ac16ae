"""Handling of Ctrl-C, SIGTERM and SIGHUP: the first finishes the current step and saves it, the second stops at once.

SIGHUP means that the terminal has closed. It may arrive twice, from the kernel and from the shell, so a second one has
no effect; output to the closed terminal is discarded. A run under `nohup` ignores it. An interrupted run ends with exit
code 130, so that it does not look complete.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from rally.redact import HIDDEN
from rally.track import RunConsole

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
EXIT_CODE = 128 + signal.SIGINT
GRACE_SECONDS = 5.0  # for tools and servers to close after the second signal
STDOUT, STDERR = 1, 2
SHOW_CURSOR = "\x1b[?25h"


class RunStopped(KeyboardInterrupt):
    """The run was interrupted before its last step; its completed steps are saved."""


class Interrupt:
    """`requested`: the run is to end after the current step. Signals are handled in the main thread only."""

    def __init__(self) -> None:
        self.requested = False
        self._forced = False

    @contextmanager
    def listening(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        handled = [number for number in SIGNALS if number != signal.SIGHUP or not _ignored(number)]
        before = {number: signal.signal(number, self._handle) for number in handled}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGHUP:
            _discard_output_of_closed_terminals()
        if self._forced:
            _leave()
        if self.requested and number == signal.SIGHUP:
            return
        if self.requested:
            self._forced = True
            _say("stopping now; steps after the last checkpoint are repeated when the run resumes")
            timer = threading.Timer(GRACE_SECONDS, _leave)
            timer.daemon = True
            timer.start()
            raise KeyboardInterrupt
        self.requested = True
        _say("stopping after this step, which is saved; interrupt again to stop now")


def resume_command(verb: str, config_path: Path, config_text: str, resume_mode: str) -> str:
    """The command that resumes a run. The saved configuration is enough unless a secret was removed from it."""
    if HIDDEN in config_text:
        return "the same command again"
    overrides = [] if resume_mode == "auto" else ["trainer.resume_mode=auto"]
    return shlex.join(["rally", verb, str(config_path), *overrides])


def stopped(console: RunConsole, done: int, total: int, command: str) -> RunStopped:
    """Print where the run stopped and how to resume it; returns the exception to raise."""
    where = f"stopped after step {done} of {total}, which is saved" if done else "stopped before the first step"
    console.note(f"{where}; to resume: {command}")
    return RunStopped()


def _ignored(number: int) -> bool:
    """Whether the program was started with this signal ignored, as `nohup` does with SIGHUP."""
    return signal.getsignal(number) is signal.SIG_IGN


def _discard_output_of_closed_terminals() -> None:
    """Otherwise the next line of output would raise an OSError and end the run before its step is saved."""
    descriptors = {STDOUT, STDERR}
    for stream in (sys.stdout, sys.stderr):
        with suppress(AttributeError, OSError, ValueError):  # no file, as in a notebook
            descriptors.add(stream.fileno())
    for descriptor in descriptors:
        try:
            os.write(descriptor, b"\n")
        except OSError:
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, descriptor)
            os.close(nowhere)


def _say(text: str) -> None:
    # A signal handler may interrupt a print, so it must not touch the buffers of stdout and stderr.
    _write(f"\nrally: {text}\n")


def _leave() -> None:
    if os.isatty(STDERR):
        _write(SHOW_CURSOR)  # hidden by the progress bar
    os._exit(EXIT_CODE)


def _write(text: str) -> None:
    with suppress(OSError):  # Ctrl-C may also have ended a `tee` that reads it
        os.write(STDERR, text.encode())
