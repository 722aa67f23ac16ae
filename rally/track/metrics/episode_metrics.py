"""Metrics of the training episodes of a step, as a pure function of the episodes.

Names are those that are common in the field. A rate without a denominator is left out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from statistics import pstdev

from rally.images.loading import loaded_images
from rally.track.metrics.statistics import Metrics, mean, percentiles, spread
from rally.track.metrics.tool_metrics import tool_metrics
from rally.types import Episode, StopReason

SPREAD = ("requests", "segments", "tool_calls")
SUMMED = (
    "branches",
    "rewritten",
    "tool_answers",
    "malformed_calls",
    "refused",
    "overruled",
    "gone",
    "abandoned",
    "constrained",
)


def of_agent(episode: Episode) -> bool:
    """Whether an agent behind the gateway ran the episode and wrote its prompts."""
    return isinstance(episode.extra.get("agent"), dict)


def agent_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Metrics of agents behind the gateway. Per episode: completions, segments and tool calls. Over all: branched
    segments, segments with a foreign history, tool responses, unparsable calls, requests that were rejected, that asked
    for other sampling parameters or that were abandoned, and agents that could not be stopped."""
    counts = [e.extra["agent"] for e in episodes if of_agent(e)]
    if not counts:
        return {}
    metrics: Metrics = {}
    for name in SPREAD:
        metrics |= spread(f"agent/{name}", [count.get(name, 0) for count in counts])
    return metrics | {f"agent/{name}": sum(count.get(name, 0) for count in counts) for name in SUMMED}


REWARD = "critic/rewards/mean"
TOOL_SUCCESS = "tool/success_rate"
NUM_TURNS = "num_turns/mean"
TOOL_CALLS = "tool_call_counts/mean"
VALIDATION = "val-core/"


def rollout_metrics(episodes: Sequence[Episode], max_prompt_length: int | None = None) -> Metrics:
    """Rewards, lengths, turns, tools, stop reasons and times of the episodes of one step.

    `response_length` counts every response token, observed ones too; its `clip_ratio` is the share of episodes
    truncated by the response budget; an aborted episode has no response token. `prompt_length/clip_ratio` needs
    `max_prompt_length`. Unscored episodes, and those masked because a tool was unavailable, are counted separately and
    are not in the means of rewards.
    """
    if not episodes:
        return {"episodes/count": 0.0}
    scores = [e.reward for e in episodes if e.reward is not None and e.outage is None]
    metrics: Metrics = {
        "episodes/count": len(episodes),
        "episodes/unscored": sum(e.reward is None for e in episodes),
        "episodes/masked": sum(e.outage is not None for e in episodes),
    }
    metrics |= spread("critic/score", scores) | spread("critic/rewards", scores)
    if scores:
        metrics["critic/rewards/std"] = pstdev(scores)
    metrics |= _token_metrics(episodes, max_prompt_length)
    metrics |= spread("num_turns", [e.num_turns for e in episodes])
    metrics |= tool_metrics(episodes) | _interaction_metrics(episodes) | agent_metrics(episodes)
    metrics |= _image_metrics(episodes)
    if skipped := sum(bool(e.extra.get("rollout_skipped")) for e in episodes):
        metrics["episodes/skipped"] = skipped
    reasons = Counter(e.stop_reason for e in episodes)
    metrics |= {f"stop/{reason}": reasons[reason] / len(episodes) for reason in StopReason}
    for key, name in (("generate", "generate_sequences"), ("tools", "tool_calls"), ("interaction", "interaction")):
        metrics |= spread(f"timing_s/agent_loop/{name}", [e.timings[key] for e in episodes if key in e.timings])
    return metrics | _slowest(episodes) | _engine_waits(episodes) | _prefix_cache(episodes)


def off_policy_metrics(episodes: Sequence[Episode], version: int) -> Metrics:
    """How many versions older than `version`, which is about to be trained, the tokens of each trajectory are on
    average and at most, and how many versions sampled it. Trajectories without recorded versions are left out."""
    averages, oldest, counts = [], [], []
    for episode in episodes:
        spans = [span for segment in episode.segments for span in segment.spans if span.end > span.start]
        if tokens := sum(span.end - span.start for span in spans):
            averages.append(sum((version - span.version) * (span.end - span.start) for span in spans) / tokens)
            oldest.append(version - min(span.version for span in spans))
            counts.append(len({span.version for span in spans}))
    prefix = "training/off_policy/trajectory"
    return (
        spread(f"{prefix}_staleness", averages)
        | spread(f"{prefix}_staleness_worst", oldest)
        | spread(f"{prefix}_spans", counts)
    )


def _token_metrics(episodes: Sequence[Episode], max_prompt_length: int | None) -> Metrics:
    sampled = [sum(s.sampled for s in e.segments) for e in episodes]
    lengths = [sum(len(s.response_ids) for s in e.segments) for e in episodes]
    prompts = [len(e.segments[0].prompt_ids) for e in episodes if e.segments]
    metrics = spread("response_length", lengths) | spread("prompt_length", prompts)
    metrics |= spread("response_length_non_aborted", [n for n in lengths if n])
    metrics["response/aborted_ratio"] = mean([not n for n in lengths])
    metrics["response_length/clip_ratio"] = mean([e.stop_reason is StopReason.LENGTH for e in episodes])
    if max_prompt_length is not None and prompts:
        metrics["prompt_length/clip_ratio"] = mean([n >= max_prompt_length for n in prompts])
    metrics["sampled_tokens/mean"] = mean(sampled)
    metrics["observed_tokens/mean"] = mean(lengths) - mean(sampled)
    return metrics


def _image_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Images in the context and their tokens, and tool images that were left out because the model takes only text or
    they did not fit. Empty without images."""
    shown = [[span for segment in e.segments[-1:] for span in segment.images] for e in episodes]
    returned = [sum(len(result.response.image or ()) for result in e.tool_results) for e in episodes]
    if not any(shown) and not any(returned):
        return {}
    asked = [len(loaded_images(e.task.prompt)) for e in episodes]
    missing = [max(0, a + r - len(s)) for a, r, s in zip(asked, returned, shown, strict=True)]
    metrics = spread("images", [len(spans) for spans in shown])
    tokens = [sum(span.end - span.start for span in spans) for spans in shown]
    return metrics | {"images/tokens/mean": mean(tokens), "images/not_shown": sum(missing)}


def _interaction_metrics(episodes: Sequence[Episode]) -> Metrics:
    """Turns, scores and failures of simulated users, over the episodes that had one."""
    with_user = [e for e in episodes if isinstance(e.extra.get("interaction"), dict)]
    if not with_user:
        return {}
    interactions = [e.extra["interaction"] for e in with_user]
    users = [[turn for turn in e.turns if turn.role == "user"] for e in with_user]
    turn_scores = [turn.reward for turns in users for turn in turns if turn.reward is not None]
    scores = [one["score"] for one in interactions if one.get("score") is not None]
    metrics = spread("interaction/turns", [len(turns) for turns in users])
    metrics |= spread("interaction/turn_score", turn_scores) | spread("interaction/score", scores)
    return metrics | {"interaction/failures": sum(len(one.get("failures", ())) for one in interactions)}


def _slowest(episodes: Iterable[Episode]) -> Metrics:
    """The slowest episode of the step."""
    timed = [e for e in episodes if "generate" in e.timings and e.segments]
    if not timed:
        return {}
    last = max(timed, key=lambda e: e.timings["generate"] + e.timings.get("tools", 0.0))
    values = {
        "generate_sequences": last.timings["generate"],
        "tool_calls": last.timings.get("tools", 0.0),
        "prompt_length": len(last.segments[0].prompt_ids),
        "response_length": sum(len(s.response_ids) for s in last.segments),
    }
    return {f"timing_s/agent_loop/slowest/{name}": value for name, value in values.items()}


def _engine_waits(episodes: Iterable[Episode]) -> Metrics:
    """Queue time and time to first token of turns, if the engine reports them."""
    turns = [turn for episode in episodes for turn in episode.turns if turn.role == "assistant"]
    waits = percentiles("engine/queue_s", [turn.queued for turn in turns]) if any(t.queued for t in turns) else {}
    first = [turn.first_token for turn in turns if turn.first_token]
    return waits | percentiles("engine/first_token_s", first)


def _prefix_cache(episodes: Iterable[Episode]) -> Metrics:
    """The share of prompt tokens found in the prefix cache. A turn's prompt is all of its segment before it."""
    cached = prompt_tokens = 0
    for episode in episodes:
        for turn in episode.turns:
            if turn.role == "assistant":
                cached += turn.cached_tokens
                prompt_tokens += len(episode.segments[turn.segment].prompt_ids) + turn.start
    return {"prefix_cache/hit_rate": cached / prompt_tokens} if cached else {}


def validation_series(names: Iterable[str]) -> list[str]:
    """The names of validation success: the mean over prompts, per data source and sampling mode."""
    return sorted(name for name in names if name.startswith(VALIDATION) and "/mean@" in name)
