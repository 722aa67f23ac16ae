"""Every call that tools were asked for is counted, over all and by tool, as a pure function of the episodes.

A tool's own numbers are of the calls that reached its name: a name the model made up, or a call that could not be read,
is in the overall numbers alone. A call is redundant when its episode made the same one before.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rally.track.metrics.statistics import Metrics, percentiles, spread
from rally.track.run_folder.episode_json import plain
from rally.types import TOOL_TROUBLE, Episode, ToolCall, ToolResult, ToolStatus

SLOW_SECONDS = 1.0  # an episode that waits less than this for its tools is not worth a word
FAILED_CALLS = 8  # fewer calls than this may all fail by chance


class CountedCall(NamedTuple):
    """One call, and whether its episode had made the same before."""

    result: ToolResult
    redundant: bool


class ToolWarning(NamedTuple):
    """A sentence about a tool; `key` is the same for what needs to be said only once."""

    key: str
    text: str


def tool_metrics(episodes: Sequence[Episode]) -> Metrics:
    made = list(_made(episodes))
    statuses = Counter(one.result.status for one in made)
    metrics = spread("tool_call_counts", [len(e.tool_results) for e in episodes])
    metrics |= {
        "tool/calls": len(made),
        "tool/truncated": sum(one.result.truncated for one in made),
        "tool/redundant": sum(one.redundant for one in made),
    }
    metrics |= {f"tool/{status}": statuses[status] for status in ToolStatus}
    for name in TOOL_TROUBLE:
        metrics[f"tool/{name}"] = sum(e.extra.get("tool_trouble", {}).get(name, 0) for e in episodes)
    if made:
        metrics["tool/success_rate"] = statuses[ToolStatus.OK] / len(made)
        metrics |= percentiles("tool/latency_s", [one.result.seconds for one in made])
        metrics |= percentiles("tool/queue_s", [one.result.queued for one in made])
    for name, calls in _by_tool(made).items():
        metrics |= {f"tool/{name}/{key}": value for key, value in _of_one_tool(calls).items()}
    return metrics


def tool_warnings(episodes: Sequence[Episode]) -> list[ToolWarning]:
    """What a person should look at in the tools of a step."""
    slow = slow_tool(episodes)
    return [*failing_tools(episodes), *([] if slow is None else [slow])]


def failing_tools(episodes: Sequence[Episode]) -> list[ToolWarning]:
    """The tools that answered none of their calls: the policy reads errors, and the run would go on without a word."""
    told = []
    for name, made in _by_tool(list(_made(episodes))).items():
        failed = [one.result for one in made if one.result.status in (ToolStatus.ERROR, ToolStatus.TIMEOUT)]
        if len(failed) == len(made) >= FAILED_CALLS:
            first = failed[0].response.text
            text = (
                f"all {len(made)} calls of the tool {name!r} failed in one step, the first with {first!r}; if that is "
                "not the policy's doing, correct the tool: `rally doctor` with the same words calls each tool once"
            )
            told.append(ToolWarning(f"failing tool {name}", text))
    return told


def slow_tool(episodes: Sequence[Episode]) -> ToolWarning | None:
    """The tool that the episodes spent most of their time on, and a sentence about it; None where the policy did."""
    generating = sum(e.timings.get("generate", 0.0) for e in episodes)
    waiting = sum(e.timings.get("tools", 0.0) for e in episodes)
    if waiting <= generating or waiting < SLOW_SECONDS * len(episodes):
        return None
    tools = _by_tool(list(_made(episodes)))
    if not tools:
        return None
    name = max(tools, key=lambda tool: sum(one.result.seconds + one.result.queued for one in tools[tool]))
    told = _of_one_tool(tools[name])
    latency = f"latency p50 {told.get('latency_s/p50', 0):.2f} s, p95 {told.get('latency_s/p95', 0):.2f} s"
    queue = f"in the queue p50 {told.get('queue_s/p50', 0):.2f} s, p95 {told.get('queue_s/p95', 0):.2f} s"
    return ToolWarning(
        f"slow tool {name}",
        f"episodes wait longer for tools than for the policy, most of all for {name!r}: {told['calls']:.0f} calls, "
        f"{latency}, {queue}, {told['timeouts']:.0f} timeouts; {_way_out([one.result for one in tools[name]])}",
    )


def _way_out(results: Sequence[ToolResult]) -> str:
    """What to do about a tool that episodes wait for: it is slow itself, or its calls are held back before it."""
    if sum(result.queued for result in results) > sum(result.seconds for result in results):
        return (
            "its limits hold the calls back, so raise num_workers and rate_limit of its config (or of its limits), if "
            "the tool bears more calls at a time"
        )
    return (
        "make it faster or give it a shorter timeout, or, where the same question has the same answer, set "
        "limits.cache=true"
    )


def _made(episodes: Sequence[Episode]) -> Iterator[CountedCall]:
    for episode in episodes:
        seen: set[str] = set()
        for result in episode.tool_results:
            key = _identity(result.call)
            yield CountedCall(result, key in seen)
            seen.add(key)


def _identity(call: ToolCall) -> str:
    if call.error is not None:
        return call.raw
    return json.dumps([call.name, plain(call.arguments)], sort_keys=True)


def _by_tool(made: Sequence[CountedCall]) -> dict[str, list[CountedCall]]:
    tools: defaultdict[str, list[CountedCall]] = defaultdict(list)
    for one in made:
        if one.result.status not in (ToolStatus.UNKNOWN_TOOL, ToolStatus.MALFORMED):
            tools[one.result.call.name].append(one)
    return tools


def _of_one_tool(made: Sequence[CountedCall]) -> Metrics:
    results = [one.result for one in made]
    statuses = Counter(result.status for result in results)
    reached = [r for r in results if not r.cached and r.status not in (ToolStatus.REJECTED, ToolStatus.BAD_ARGUMENTS)]
    metrics: Metrics = {
        "calls": len(results),
        "success_rate": statuses[ToolStatus.OK] / len(results),
        "timeouts": statuses[ToolStatus.TIMEOUT],
        "rejected": statuses[ToolStatus.REJECTED],
        "truncations": sum(result.truncated for result in results),
        "cached": sum(result.cached for result in results),
        "redundant": sum(one.redundant for one in made),
    }
    metrics |= percentiles("latency_s", [result.seconds for result in reached])
    return metrics | percentiles("queue_s", [result.queued for result in reached])
