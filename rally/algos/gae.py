"""Values: what a critic expects becomes advantages, and what came instead becomes its loss. Pure tensor functions.

A decision is what gets one value, one return and one advantage: a sampled token (`gae`), or a whole assistant turn
(`turn_gae`), whose value is that of the state before its first token. An episode is one chain of decisions, over all
its segments; observed tokens are in no link of it.

Shapes: N episodes, D decisions of all of them in order, M sampled tokens in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rally.algos.advantages import gae, whiten
from rally.algos.credit_assignment import CreditSettings, Scored, token_rewards


class Decisions(NamedTuple):
    """The first sampled token of each decision, how many tokens it has, what they earned; how many an episode made."""

    first_D: Tensor
    tokens_D: Tensor
    rewards_D: Tensor
    lengths_N: Tensor


class GaeResult(NamedTuple):
    """Advantages of sampled tokens, and the returns that the values of decisions are trained towards."""

    advantages_M: Tensor
    returns_D: Tensor


class ValueLoss(NamedTuple):
    """Loss of each value, and which of them the clip holds back."""

    loss_D: Tensor
    clipped_D: Tensor


def decisions(scored: Scored, settings: CreditSettings) -> Decisions:
    """Every decision of the batch. A turn in which nothing was sampled decided nothing."""
    rewards_M = token_rewards(scored, settings)
    if settings.estimator == "gae":
        tokens_D, lengths_N = torch.ones(rewards_M.numel(), dtype=torch.long), scored.tokens_N
    else:
        assert settings.estimator == "turn_gae" and scored.turns is not None
        spoke_K = scored.turns.tokens_K > 0
        tokens_D = scored.turns.tokens_K[spoke_K]
        lengths_N = torch.bincount(scored.turns.episode_K[spoke_K], minlength=scored.rewards_N.numel())
    decision_M = torch.arange(tokens_D.numel()).repeat_interleave(tokens_D)
    rewards_D = torch.zeros(tokens_D.numel(), dtype=torch.float64).index_add(0, decision_M, rewards_M)
    return Decisions(torch.cumsum(tokens_D, 0) - tokens_D, tokens_D, rewards_D, lengths_N)


def judged(made: Decisions, values_D: Tensor, settings: CreditSettings) -> GaeResult:
    """GAE from decision to decision. Each token has the advantage of its decision, brought to mean 0 and variance 1
    over the tokens of the batch."""
    found = gae(made.rewards_D, values_D, made.lengths_N, gamma=settings.gamma, lam=settings.lam)
    return GaeResult(whiten(found.advantages_M.repeat_interleave(made.tokens_D)), found.returns_M)


def value_loss(values_D: Tensor, old_D: Tensor, returns_D: Tensor, clip: float) -> ValueLoss:
    """Half the squared error; a value that has left `clip` around the old one gains nothing by going further."""
    near_D = old_D + (values_D - old_D).clamp(-clip, clip)
    free_D, held_D = (values_D - returns_D) ** 2, (near_D - returns_D) ** 2
    return ValueLoss(0.5 * torch.maximum(free_D, held_D), held_D > free_D)


def explained_variance(values_D: Tensor, returns_D: Tensor, epsilon: float = 1e-5) -> float:
    """1 if the values are the returns but for a constant, 0 if they know nothing, less if they mislead."""
    left = (returns_D - values_D).double().var(correction=0)
    return float(1 - left / (returns_D.double().var(correction=0) + epsilon))
