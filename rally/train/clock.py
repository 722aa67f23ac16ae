"""Every second of a step is counted for at most one phase: how long each took, and when, goes to the run folder.

A phase that is entered inside another interrupts it. Durations are by a clock that nobody sets; the wall clock says
only when a phase began.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from rally.track import RunFolder

Timed = Callable[[str], AbstractContextManager[None]]
"""Takes the name of a phase and times what is inside."""


def untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class PhaseClock:
    """`with clock("gen"): ...` for the phases of one step; names are those of the `timing_s/` metrics."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        self._folder, self._step = folder, step
        self._open: list[str] = []  # the outermost first; the last is the one that runs
        self._start = self._began = 0.0
        self.seconds: dict[str, float] = {}

    @contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        self._change()
        self._open.append(name)
        try:
            yield
        finally:
            self._change()
            self._open.pop()

    def metrics(self) -> dict[str, float]:
        return {f"timing_s/{name}": seconds for name, seconds in self.seconds.items()}

    def _change(self) -> None:
        """What ran until now ends, or is interrupted."""
        now = time.perf_counter()
        if self._open:
            name, seconds = self._open[-1], now - self._began
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._folder.log_phase(self._step, name, self._start, self._start + seconds)
        self._start, self._began = time.time(), time.perf_counter()
