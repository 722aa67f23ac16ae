"""Tries a chat template in a killable process before the run renders with it.

A template is a program: it may loop without end, or write more text than fits into memory. The first rendering of each
template happens in a fork of this process, with a limit of time, memory and output. A template that exceeds one raises
TemplateTooCostly with a sentence; any other failure is left to the rendering that follows.
"""

from __future__ import annotations

import os
import resource
import select
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from rally.types import RallyError

SECONDS = 20.0  # templates take milliseconds; a busy machine may be slow
MEMORY_BYTES = 1 << 30  # beyond what this process uses
OUTPUT_CHARACTERS = 1 << 24

_ENDED, _TOO_LONG, _TOO_LARGE = b"e", b"l", b"m"


class TemplateTooCostly(RallyError):
    """A chat template does not end within its limits."""


def check_rendering(render: Callable[[], int]) -> None:
    """Call `render`, which returns the number of characters of its longest text, in a fork with limits."""
    if not hasattr(os, "fork"):
        return
    read_end, write_end = os.pipe()
    with warnings.catch_warnings(), _interrupts_noted() as noted:
        # Python warns of forks with threads, whose locks stay locked. The fork only renders, and it is killed.
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            _render_and_exit(render, write_end)
    os.close(write_end)
    try:
        if noted:
            signal.raise_signal(signal.SIGINT)
        result = _first_byte(read_end)
    finally:
        os.close(read_end)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    problem = {
        None: f"took more than {SECONDS:g} seconds",
        _TOO_LONG: f"wrote more than {OUTPUT_CHARACTERS:,} characters",
        _TOO_LARGE: f"needed more than {MEMORY_BYTES >> 20:,} MB of memory",
    }.get(result)
    if problem is not None:
        raise TemplateTooCostly(
            f"the chat template {problem} to render a conversation of a few words; correct the template "
            "(custom_chat_template, or that of the tokenizer)"
        )


@contextmanager
def _interrupts_noted() -> Iterator[list[int]]:
    """Note Ctrl-C during the block instead of raising. After a fork Python calls hooks of other modules and drops what
    is raised in them, and a fork of a large process takes long."""
    noted: list[int] = []
    main = threading.current_thread() is threading.main_thread()
    if not main or signal.getsignal(signal.SIGINT) is not signal.default_int_handler:
        yield noted
        return
    signal.signal(signal.SIGINT, lambda number, _: noted.append(number))
    try:
        yield noted
    finally:
        signal.signal(signal.SIGINT, signal.default_int_handler)


def _first_byte(read_end: int) -> bytes | None:
    """What the fork reports; None if it does not end, or is killed for its time."""
    deadline, readable = time.monotonic() + SECONDS, select.poll()  # select() takes no descriptor above 1023
    readable.register(read_end, select.POLLIN)
    while (left := deadline - time.monotonic()) > 0:
        if readable.poll(1000 * left):
            return os.read(read_end, 1) or _TOO_LARGE  # it died: the kernel ended it
    return None


def _render_and_exit(render: Callable[[], int], write_end: int) -> None:
    report = _ENDED
    try:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        _limit_memory()
        if render() > OUTPUT_CHARACTERS:
            report = _TOO_LONG
    except MemoryError:
        report = _TOO_LARGE
    except BaseException:  # noqa: BLE001 - the parent renders again and reports it
        pass
    finally:
        os.write(write_end, report)
        os._exit(0)  # the fork must never continue as a second run


def _limit_memory() -> None:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmData:"):
            limit = (int(line.split()[1]) << 10) + MEMORY_BYTES
            hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
            resource.setrlimit(resource.RLIMIT_DATA, (limit if hard < 0 else min(limit, hard), hard))
