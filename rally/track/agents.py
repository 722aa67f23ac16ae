"""What agents of their own making did with the gateway, as a pure function of their episodes; without one, nothing."""

from __future__ import annotations

from collections.abc import Sequence

from rally.track.numbers import Metrics, spread
from rally.types import Episode

SPREAD = ("requests", "segments", "tool_calls")
SUMMED = ("branches", "rewritten", "tool_answers", "malformed_calls", "refused", "overruled", "gone", "abandoned")


def of_agent(episode: Episode) -> bool:
    """Whether an agent behind the gateway held it, and wrote its prompts."""
    return isinstance(episode.extra.get("agent"), dict)


def agent_metrics(episodes: Sequence[Episode]) -> Metrics:
    """By episode: completions asked for, segments, tool calls in the answers. Over all: segments that branched off, and
    those whose history was not ours; tool answers; calls that could not be read; requests that were refused, and that
    wanted other sampling than the run's, and that nobody waited for to the end; agents that could not be ended."""
    counts = [e.extra["agent"] for e in episodes if of_agent(e)]
    if not counts:
        return {}
    metrics: Metrics = {}
    for name in SPREAD:
        metrics |= spread(f"agent/{name}", [count.get(name, 0) for count in counts])
    return metrics | {f"agent/{name}": sum(count.get(name, 0) for count in counts) for name in SUMMED}
