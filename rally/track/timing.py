"""Timing of the phases of a step, times per token, and memory use."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

from rally.platforms import named_platform
from rally.track import RunFolder
from rally.types import Episode

Timed = Callable[[str], AbstractContextManager[None]]
"""Takes the name of a phase and returns a context that times it."""


def untimed(name: str) -> AbstractContextManager[None]:
    return nullcontext()


class PhaseClock:
    """`with clock("gen"): ...` for the phases of one step; names are those of the `timing_s/` metrics."""

    def __init__(self, folder: RunFolder, step: int) -> None:
        self._folder, self._step = folder, step
        self._open: list[str] = []  # outermost first; the last one is running
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
        """Record the phase that ran until now, which ends or is interrupted."""
        now = time.perf_counter()
        if self._open:
            name, seconds = self._open[-1], now - self._began
            self.seconds[name] = self.seconds.get(name, 0.0) + seconds
            self._folder.log_phase(self._step, name, self._start, self._start + seconds)
        self._start, self._began = time.time(), time.perf_counter()


GIB = 2**30
PHASES = ("ref", "values", "update_critic", "update_actor")
"""Phases that work on every token; generation is counted by the tokens of the responses."""


def token_times(metrics: Mapping[str, float], episodes: Sequence[Episode]) -> dict[str, float]:
    """`timing_per_token_ms/` of each phase that was timed."""
    segments = [segment for episode in episodes for segment in episode.segments]
    response = sum(len(segment.response_ids) for segment in segments)
    every = sum(len(segment.ids) for segment in segments)
    counts = {"gen": response} | dict.fromkeys(PHASES, every)
    return {
        f"timing_per_token_ms/{phase}": 1000 * metrics[f"timing_s/{phase}"] / count
        for phase, count in counts.items()
        if count and f"timing_s/{phase}" in metrics
    }


def memory_used() -> dict[str, float]:
    """Peak memory of the device, how often its allocator had to retry, and the machine's current use; values that are
    not available are left out."""
    used = _machine_memory()
    platform = named_platform("auto")
    if platform.device_count():
        used["perf/max_memory_allocated_gb"] = platform.module.max_memory_allocated() / GIB
        used["perf/max_memory_reserved_gb"] = platform.module.max_memory_reserved() / GIB
        used["perf/memory_retries"] = platform.module.memory_stats().get("num_alloc_retries", 0)
    return used


def _machine_memory(path: Path = Path("/proc/meminfo")) -> dict[str, float]:
    if not path.exists():
        return {}
    lines = (line.partition(":") for line in path.read_text().splitlines())
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in lines}
    return {"perf/cpu_memory_used_gb": (kilobytes["MemTotal"] - kilobytes["MemAvailable"]) * 1024 / GIB}
