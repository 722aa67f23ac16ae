"""The metrics of a batch are a pure function of its episodes, under the names users of this field know.

Two departures, both because a wrong number is worse than none: a rate over nothing is left out, and `best@k` and
`worst@k` are the plain maximum and minimum of a prompt's k samples, not a bootstrap estimate.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import chain

from rally.types import Episode, StopReason, ToolResult, ToolStatus

REWARD = "critic/rewards/mean"
TOOL_SUCCESS = "tool/success_rate"
NUM_TURNS = "num_turns/mean"
TOOL_CALLS = "tool_call_counts/mean"
VALIDATION = "val-core/"

Metrics = dict[str, float]


def rollout_metrics(episodes: Sequence[Episode], max_prompt_length: int | None = None) -> Metrics:
    """Rewards, lengths, turns, tools, stop reasons and times of the episodes of one step.

    `response_length` counts every response token, observed ones too; its `clip_ratio` is the share of episodes cut by
    the response budget. `prompt_length/clip_ratio` needs `max_prompt_length`. Unscored episodes are counted apart.
    """
    if not episodes:
        return {"episodes/count": 0.0}
    scores = [e.reward for e in episodes if e.reward is not None]
    metrics: Metrics = {"episodes/count": len(episodes), "episodes/unscored": len(episodes) - len(scores)}
    metrics |= _spread("critic/score", scores) | _spread("critic/rewards", scores)
    metrics |= _token_metrics(episodes, max_prompt_length)
    metrics |= _spread("num_turns", [e.num_turns for e in episodes])
    metrics |= _tool_metrics(episodes) | _interaction_metrics(episodes)
    reasons = Counter(e.stop_reason for e in episodes)
    metrics |= {f"stop/{reason}": reasons[reason] / len(episodes) for reason in StopReason}
    for key, name in (("generate", "generate_sequences"), ("tools", "tool_calls"), ("interaction", "interaction")):
        metrics |= _spread(f"timing_s/agent_loop/{name}", [e.timings[key] for e in episodes if key in e.timings])
    return metrics | _prefix_cache(episodes)


def validation_metrics(episodes: Sequence[Episode], k: int, suffix: str = "") -> Metrics:
    """`val-core/<data_source>/<var>/mean@k` and its relatives, averaged over prompts (groups), then over nothing else.

    Variables are `reward` and every numeric entry of `reward_info`; the core one is `acc` where a data source has it,
    else `reward`. A `suffix` such as "greedy" becomes a last path part, so that two ways to sample keep two names.
    """
    tail = f"/{suffix}" if suffix else ""
    sources: dict[str, list[Episode]] = defaultdict(list)
    for episode in episodes:
        sources[episode.task.data_source].append(episode)
    metrics: Metrics = {}
    for source, members in sources.items():
        variables = _variables(members)
        core = "acc" if "acc" in variables else "reward"
        for name, groups in variables.items():
            for statistic, value in _over_groups(groups, k).items():
                room = "val-core" if name == core and not statistic.startswith("worst") else "val-aux"
                metrics[f"{room}/{source}/{name}/{statistic}{tail}"] = value
    if episodes:
        metrics[f"val-aux/unscored{tail}"] = sum(e.reward is None for e in episodes)
    turns = _spread("val-aux/num_turns", [e.num_turns for e in episodes])
    return metrics | {name + tail: value for name, value in turns.items()}


def _variables(episodes: Iterable[Episode]) -> dict[str, list[list[float]]]:
    """For each variable the values of each prompt's samples."""
    grouped: dict[str, dict[str, list[float]]] = defaultdict(lambda: defaultdict(list))
    for episode in episodes:
        if episode.reward is None:
            continue
        numeric = {k: float(v) for k, v in episode.reward_info.items() if isinstance(v, (bool, int, float))}
        for name, value in (numeric | {"reward": episode.reward}).items():
            grouped[name][episode.group].append(value)
    return {name: list(groups.values()) for name, groups in grouped.items()}


def _over_groups(groups: Sequence[Sequence[float]], k: int) -> Metrics:
    statistics: dict[str, Callable[[Sequence[float]], float]] = {f"mean@{k}": _mean}
    if k > 1:
        statistics |= {f"best@{k}": max, f"worst@{k}": min}
    return {name: _mean([function(group) for group in groups]) for name, function in statistics.items()}


def _token_metrics(episodes: Sequence[Episode], max_prompt_length: int | None) -> Metrics:
    sampled = [sum(s.sampled for s in e.segments) for e in episodes]
    lengths = [sum(len(s.response_ids) for s in e.segments) for e in episodes]
    prompts = [len(e.segments[0].prompt_ids) for e in episodes if e.segments]
    metrics = _spread("response_length", lengths) | _spread("prompt_length", prompts)
    metrics["response_length/clip_ratio"] = _mean([e.stop_reason is StopReason.LENGTH for e in episodes])
    if max_prompt_length is not None and prompts:
        metrics["prompt_length/clip_ratio"] = _mean([n >= max_prompt_length for n in prompts])
    metrics["sampled_tokens/mean"] = _mean(sampled)
    metrics["observed_tokens/mean"] = _mean(lengths) - _mean(sampled)
    return metrics


def _tool_metrics(episodes: Sequence[Episode]) -> Metrics:
    results: list[ToolResult] = list(chain.from_iterable(e.tool_results for e in episodes))
    statuses = Counter(r.status for r in results)
    metrics = _spread("tool_call_counts", [len(e.tool_results) for e in episodes])
    metrics |= {"tool/calls": len(results), "tool/truncated": sum(r.truncated for r in results)}
    metrics |= {f"tool/{status}": statuses[status] for status in ToolStatus}
    if results:
        metrics[TOOL_SUCCESS] = statuses[ToolStatus.OK] / len(results)
        seconds = sorted(r.seconds for r in results)
        metrics |= {f"tool/latency_s/p{p}": _percentile(seconds, p) for p in (50, 95)}
    return metrics


def _interaction_metrics(episodes: Sequence[Episode]) -> Metrics:
    """What simulated users did and gave, over the episodes that had one."""
    held = [e for e in episodes if isinstance(e.extra.get("interaction"), dict)]
    if not held:
        return {}
    told = [e.extra["interaction"] for e in held]
    users = [[turn for turn in e.turns if turn.role == "user"] for e in held]
    turn_scores = [turn.reward for turns in users for turn in turns if turn.reward is not None]
    scores = [one["score"] for one in told if one.get("score") is not None]
    metrics = _spread("interaction/turns", [len(turns) for turns in users])
    metrics |= _spread("interaction/turn_score", turn_scores) | _spread("interaction/score", scores)
    return metrics | {"interaction/failures": sum(len(one.get("failures", ())) for one in told)}


def _prefix_cache(episodes: Iterable[Episode]) -> Metrics:
    """The share of prompt tokens that need no computing. A turn's prompt is all of its segment before it."""
    cached = given = 0
    for episode in episodes:
        for turn in episode.turns:
            if turn.role == "assistant":
                cached += turn.cached_tokens
                given += len(episode.segments[turn.segment].prompt_ids) + turn.start
    return {"prefix_cache/hit_rate": cached / given} if cached else {}


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def _spread(name: str, values: Sequence[float]) -> Metrics:
    if not values:
        return {}
    return {f"{name}/mean": _mean(values), f"{name}/max": max(values), f"{name}/min": min(values)}


def _percentile(ordered: Sequence[float], percent: float) -> float:
    """Linear between the two nearest ranks."""
    place = (len(ordered) - 1) * percent / 100
    low = math.floor(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def validation_series(names: Iterable[str]) -> list[str]:
    """The metric names that are validation success: the mean over prompts, for each data source and way to sample."""
    return sorted(name for name in names if name.startswith(VALIDATION) and "/mean@" in name)
