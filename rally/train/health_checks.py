"""Health checks of a training run: rules over the metrics of all steps so far, each with advice.

A rule is a pure function that returns a warning or None. Means over `patience` steps keep a single outlier from raising
one.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import NamedTuple

ENTROPY, CALLS, CLIPPED = "actor/entropy", "tool_call_counts/mean", "response_length/clip_ratio"
RETRIES = "perf/memory_retries"
LIVE, HIGHEST, LOWEST = "groups/live_share", "critic/rewards/max", "critic/rewards/min"
WATCHED = (ENTROPY, CALLS, CLIPPED, LIVE, HIGHEST, LOWEST, RETRIES)
USES_TOOLS = 0.2  # calls an episode from which on a policy counts as one that uses tools

Steps = Sequence[Mapping[str, float]]


@dataclass(frozen=True, kw_only=True)
class HealthSettings:
    """Thresholds of the rules, over means of `patience` steps. A share of 0 (for clipped_share 1) turns a rule off."""

    patience: int = 5
    entropy_share: float = 0.05
    tool_share: float = 0.1
    clipped_share: float = 0.5


class HealthWarning(NamedTuple):
    """A warning for the user. Those with the same `key` are shown once."""

    key: str
    text: str


def watched(metrics: Mapping[str, float]) -> dict[str, float]:
    """The metrics of a step that the rules use, without non-finite values."""
    return {name: metrics[name] for name in WATCHED if name in metrics and math.isfinite(metrics[name])}


def findings(steps: Steps, settings: HealthSettings) -> list[HealthWarning]:
    """All warnings after these steps, which start with the first step of the run."""
    return [warning for rule in RULES if (warning := rule(steps, settings)) is not None]


def constant_reward(steps: Steps, settings: HealthSettings) -> HealthWarning | None:
    """Every episode so far has had the same reward."""
    value = _only_reward(steps)
    if value is None or len(steps) < settings.patience:
        return None
    fact = f"every reward of the first {len(steps)} steps was {value:g}, so nothing can be learned yet; "
    look = "read some episodes beside their ground truth (episodes/ in the run folder): "
    cause = (
        "the task may be too hard for this model (fine-tune it with rally sft first, or start with easier rows), or "
        "the reward function may expect an answer format that the prompt does not ask for"
        if value <= 0
        else "the reward function may ignore the answer, or the rows may be too easy"
    )
    return HealthWarning("constant_reward", fact + look + cause)


def flat_groups(steps: Steps, settings: HealthSettings) -> HealthWarning | None:
    """In the last steps, no group had two different rewards."""
    live = _last(steps, LIVE, settings.patience)
    if live is None or any(live) or (_only_reward(steps) is not None and len(steps) >= settings.patience):
        return None
    best = max((step[HIGHEST] for step in steps if HIGHEST in step), default=math.inf)
    solved = steps[-1].get(LOWEST) == best
    cause = (
        "all of them are solved: take harder rows, or stop here"
        if solved
        else "take easier rows, more episodes for a prompt (rollout.n), or data.curriculum.by=success, which looks for "
        "rows that are solved sometimes"
    )
    fact = f"for {settings.patience} steps all episodes of each group had the same reward"
    return HealthWarning("flat_groups", f"{fact}, so those steps had no gradient; {cause}")


def entropy_collapse(steps: Steps, settings: HealthSettings) -> HealthWarning | None:
    """The policy's entropy has fallen far below its start."""
    entropies = [step[ENTROPY] for step in steps if ENTROPY in step]
    if len(entropies) < 2 * settings.patience:
        return None
    start, now = (statistics.fmean(part) for part in (entropies[: settings.patience], entropies[-settings.patience :]))
    if now >= settings.entropy_share * start:
        return None
    return HealthWarning(
        "entropy_collapse",
        f"the policy's entropy fell from {start:.3g} to {now:.3g}, under trainer.guards.entropy_share="
        f"{settings.entropy_share:g} of its start: its samples are nearly identical, so it no longer explores; unless "
        "the task is solved, try a lower learning rate, actor.clip_ratio_high=0.28, actor.entropy_coeff=0.001 or "
        "actor.policy_loss.loss_mode=kl_cov",
    )


def tool_collapse(steps: Steps, settings: HealthSettings) -> HealthWarning | None:
    """The policy used to call its tools and has nearly stopped."""
    calls = [step[CALLS] for step in steps if CALLS in step]
    size = settings.patience
    if len(calls) < 2 * size:
        return None
    means = [statistics.fmean(calls[i : i + size]) for i in range(len(calls) - size + 1)]
    best, now = max(means), means[-1]
    if best < USES_TOOLS or now >= settings.tool_share * best:
        return None
    return HealthWarning(
        "tool_collapse",
        f"the policy has nearly stopped calling tools: {best:.2f} calls an episode at its best, {now:.2f} now, under "
        f"trainer.guards.tool_share={settings.tool_share:g} of that; check tool/success_rate and the "
        "tools' answers, and try reward_shaping.intermediate_rewards.tool_call_success=0.1, a lower learning rate or "
        "actor.use_kl_loss=true",
    )


def clipped_responses(steps: Steps, settings: HealthSettings) -> HealthWarning | None:
    """Most episodes of the last steps were truncated by the response budget."""
    clipped = _last(steps, CLIPPED, settings.patience)
    if clipped is None or statistics.fmean(clipped) <= settings.clipped_share:
        return None
    return HealthWarning(
        "clipped_responses",
        f"{statistics.fmean(clipped):.0%} of the episodes of the last {settings.patience} steps were truncated by "
        f"the response budget, over trainer.guards.clipped_share={settings.clipped_share:g}, and are scored without "
        "their end; raise data.max_response_length, or penalize length "
        "(reward_model.reward_kwargs.overlong_buffer_cfg.enable=true)",
    )


def crowded_memory(steps: Steps, settings: HealthSettings) -> HealthWarning | None:
    """In each of the last steps GPU memory ran full, and torch freed its cache and allocated again."""
    counts = _last(steps, RETRIES, settings.patience + 1)
    if counts is None or any(after <= before for before, after in pairwise(counts)):
        return None
    return HealthWarning(
        "crowded_memory",
        f"in each of the last {settings.patience} steps GPU memory ran full and torch freed its cache to allocate "
        f"again, {counts[-1] - counts[0]:.0f} times in all, which is slow; lower "
        "actor.ppo_max_token_len_per_gpu or rollout.gpu_memory_utilization, and unset PYTORCH_ALLOC_CONF if it is set "
        "without expandable_segments:True",
    )


RULES: tuple[Callable[[Steps, HealthSettings], HealthWarning | None], ...] = (
    constant_reward,
    flat_groups,
    entropy_collapse,
    tool_collapse,
    clipped_responses,
    crowded_memory,
)


def _last(steps: Steps, name: str, count: int) -> list[float] | None:
    """The last `count` values of a metric, which the newest step must have."""
    values = [step[name] for step in steps if name in step]
    return values[-count:] if len(values) >= count and name in steps[-1] else None


def _only_reward(steps: Steps) -> float | None:
    """The reward that all episodes of all steps have in common, if there is one."""
    seen = {step[name] for step in steps for name in (HIGHEST, LOWEST) if name in step}
    return seen.pop() if len(seen) == 1 else None
