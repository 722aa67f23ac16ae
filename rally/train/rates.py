"""What a step cost, beside its seconds: milliseconds a token of each phase, and memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from rally.types import Episode

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
    """The most that the device held so far, how often it was full so far, and what the whole machine uses now; what
    cannot be asked is left out."""
    used = _machine_memory()
    if torch.cuda.is_available():
        used["perf/max_memory_allocated_gb"] = torch.cuda.max_memory_allocated() / GIB
        used["perf/max_memory_reserved_gb"] = torch.cuda.max_memory_reserved() / GIB
        used["perf/memory_retries"] = torch.cuda.memory_stats().get("num_alloc_retries", 0)
    return used


def _machine_memory(path: Path = Path("/proc/meminfo")) -> dict[str, float]:
    if not path.exists():
        return {}
    lines = (line.partition(":") for line in path.read_text().splitlines())
    kilobytes = {name: int(rest.split()[0]) for name, _, rest in lines}
    return {"perf/cpu_memory_used_gb": (kilobytes["MemTotal"] - kilobytes["MemAvailable"]) * 1024 / GIB}
