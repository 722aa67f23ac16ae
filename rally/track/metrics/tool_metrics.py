"""Metrics of tool calls, overall and per tool, and warnings about failing or slow tools.

The numbers of a tool cover the calls with its name. Calls of unknown tools and malformed calls are only in the overall
numbers. A call is redundant if its episode has made the same call before.
"""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from rally.track.metrics.statistics import Metrics, percentiles, spread
from rally.track.run_folder.episode_json import plain
from rally.types import TOOL_TROUBLE, Episode, ToolCall, ToolResult, ToolStatus

SLOW_SECONDS = 1.0  # no warning if an episode waits less for its tools
FAILED = (ToolStatus.ERROR, ToolStatus.TIMEOUT, ToolStatus.UNAVAILABLE)
FAILED_CALLS = 8  # fewer calls than this may all fail by chance


class CountedCall(NamedTuple):
    """One call, and whether its episode had made the same before."""

    result: ToolResult
    redundant: bool


class ToolWarning(NamedTuple):
    """A warning about a tool. Those with the same `key` are shown once."""

    key: str
    text: str


def tool_metrics(episodes: Sequence[Episode]) -> Metrics:
    made = list(_counted(episodes))
    statuses = Counter(one.result.status for one in made)
    metrics = spread("tool_call_counts", [len(e.tool_results) for e in episodes])
    metrics |= {
        "tool/calls": len(made),
        "tool/truncated": sum(one.result.truncated for one in made),
        "tool/redundant": sum(one.redundant for one in made),
        "tool/outage_episodes": sum("tool_outage" in e.extra for e in episodes),
    }
    for name, count in _outage_episodes(episodes).items():
        metrics[f"tool/{name}/outage_episodes"] = count
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
    """The warnings about the tools of a step."""
    slow = slow_tool(episodes)
    return [*outages(episodes), *failing_tools(episodes), *([] if slow is None else [slow])]


def outages(episodes: Sequence[Episode]) -> list[ToolWarning]:
    """Tools that were unavailable in some episodes."""
    warnings = []
    for name, count in _outage_episodes(episodes).items():
        found = [e.extra["tool_outage"] for e in episodes if name in _outage_calls(e)]
        first = next((one["first"] for one in found if str(one["first"]).startswith(f"{name}: ")), found[0]["first"])
        text = (
            f"the tool {name!r} was unavailable in {count} of {len(episodes)} episodes of one step, the first time "
            f"with {first!r}; on_outage={found[0]['on_outage']} decides what is trained on, and "
            f"tool/{name}/outage_episodes counts them"
        )
        warnings.append(ToolWarning(f"outage of {name}", text))
    return warnings


def _outage_calls(episode: Episode) -> Mapping[str, int]:
    calls = (episode.extra.get("tool_outage") or {}).get("calls")
    return calls if isinstance(calls, Mapping) else {}


def _outage_episodes(episodes: Sequence[Episode]) -> Counter[str]:
    """By tool, the episodes in which it was unavailable."""
    return Counter(name for episode in episodes for name in _outage_calls(episode))


def failing_tools(episodes: Sequence[Episode]) -> list[ToolWarning]:
    """Tools all of whose calls failed: otherwise only the policy would see the errors."""
    warnings = []
    for name, made in _by_tool(list(_counted(episodes))).items():
        failed = [one.result for one in made if one.result.status in FAILED]
        if len(failed) == len(made) >= FAILED_CALLS:
            first = failed[0].response.text
            text = (
                f"all {len(made)} calls of the tool {name!r} failed in one step, the first with {first!r}; if the "
                "policy is not the cause, fix the tool: `rally doctor` with the same arguments calls each tool once"
            )
            warnings.append(ToolWarning(f"failing tool {name}", text))
    return warnings


def slow_tool(episodes: Sequence[Episode]) -> ToolWarning | None:
    """A warning about the tool that episodes wait for most; None if they wait longer for the policy."""
    generating = sum(e.timings.get("generate", 0.0) for e in episodes)
    waiting = sum(e.timings.get("tools", 0.0) for e in episodes)
    if waiting <= generating or waiting < SLOW_SECONDS * len(episodes):
        return None
    tools = _by_tool(list(_counted(episodes)))
    if not tools:
        return None
    name = max(tools, key=lambda tool: sum(one.result.seconds + one.result.queued for one in tools[tool]))
    metrics = _of_one_tool(tools[name])
    latency = f"latency p50 {metrics.get('latency_s/p50', 0):.2f} s, p95 {metrics.get('latency_s/p95', 0):.2f} s"
    queue = f"in the queue p50 {metrics.get('queue_s/p50', 0):.2f} s, p95 {metrics.get('queue_s/p95', 0):.2f} s"
    return ToolWarning(
        f"slow tool {name}",
        f"episodes wait longer for tools than for the policy, most of all for {name!r}: {metrics['calls']:.0f} calls, "
        f"{latency}, {queue}, {metrics['timeouts']:.0f} timeouts; {_advice([one.result for one in tools[name]])}",
    )


def _advice(results: Sequence[ToolResult]) -> str:
    """What to do about a slow tool: the tool itself is slow, or its calls wait in the queue."""
    if sum(result.queued for result in results) > sum(result.seconds for result in results):
        return (
            "its limits hold the calls back: raise num_workers and rate_limit of its config (or of its limits), if the "
            "tool can take more calls at a time"
        )
    return "make it faster, give it a shorter timeout, or set limits.cache=true if equal calls have equal answers"


def _counted(episodes: Sequence[Episode]) -> Iterator[CountedCall]:
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
        "outages": sum(result.outage for result in results),
        "truncations": sum(result.truncated for result in results),
        "cached": sum(result.cached for result in results),
        "redundant": sum(one.redundant for one in made),
    }
    metrics |= percentiles("latency_s", [result.seconds for result in reached])
    return metrics | percentiles("queue_s", [result.queued for result in reached])
