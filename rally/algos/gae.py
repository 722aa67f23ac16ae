"""GAE with a critic, per token or per turn, and the value loss. Pure tensor functions.

A decision has one value, one return and one advantage. It is a sampled token (`gae`) or a whole assistant turn
(`turn_gae`), whose value is that of the state before its first token. The decisions of an episode form one chain over
all its segments; observed tokens are not part of it.

Shapes: N episodes, D decisions of all of them in order, M sampled tokens in the same order.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from rally.algos.advantages import gae, whiten
from rally.algos.credit_assignment import CreditSettings, Scored, token_rewards


class Decisions(NamedTuple):
    """The first token, number of tokens and reward of each decision, and the number of decisions per episode."""

    first_D: Tensor
    tokens_D: Tensor
    rewards_D: Tensor
    lengths_N: Tensor


class GaeResult(NamedTuple):
    """The advantages of sampled tokens, and the returns that the values of decisions are trained on."""

    advantages_M: Tensor
    returns_D: Tensor


class ValueLoss(NamedTuple):
    """The loss of each value, and which of them are clipped."""

    loss_D: Tensor
    clipped_D: Tensor


def decisions(scored: Scored, settings: CreditSettings) -> Decisions:
    """All decisions of the batch. A turn without sampled tokens is not a decision."""
    rewards_M = token_rewards(scored, settings)
    if settings.estimator == "gae":
        tokens_D, lengths_N = torch.ones(rewards_M.numel(), dtype=torch.long), scored.tokens_N
    else:
        assert settings.estimator == "turn_gae" and scored.turns is not None
        sampled_K = scored.turns.tokens_K > 0
        tokens_D = scored.turns.tokens_K[sampled_K]
        lengths_N = torch.bincount(scored.turns.episode_K[sampled_K], minlength=scored.rewards_N.numel())
    decision_M = torch.arange(tokens_D.numel()).repeat_interleave(tokens_D)
    rewards_D = torch.zeros(tokens_D.numel(), dtype=torch.float64).index_add(0, decision_M, rewards_M)
    return Decisions(torch.cumsum(tokens_D, 0) - tokens_D, tokens_D, rewards_D, lengths_N)


def advantages_and_returns(made: Decisions, values_D: Tensor, settings: CreditSettings) -> GaeResult:
    """GAE over decisions. Each token gets the advantage of its decision, whitened over the tokens of the batch."""
    estimate = gae(made.rewards_D, values_D, made.lengths_N, gamma=settings.gamma, lam=settings.lam)
    return GaeResult(whiten(estimate.advantages_M.repeat_interleave(made.tokens_D)), estimate.returns_M)


judged = advantages_and_returns  # the name in earlier documentation


def value_loss(values_D: Tensor, old_D: Tensor, returns_D: Tensor, clip: float) -> ValueLoss:
    """PPO's value loss: half the squared error, or that of the value clipped to `clip` around the old one if larger."""
    near_D = old_D + (values_D - old_D).clamp(-clip, clip)
    free_D, clipped_D = (values_D - returns_D) ** 2, (near_D - returns_D) ** 2
    return ValueLoss(0.5 * torch.maximum(free_D, clipped_D), clipped_D > free_D)


def explained_variance(values_D: Tensor, returns_D: Tensor, epsilon: float = 1e-5) -> float:
    """1 if the values equal the returns up to a constant, 0 if they predict nothing, negative if they are worse."""
    residual = (returns_D - values_D).double().var(correction=0)
    return float(1 - residual / (returns_D.double().var(correction=0) + epsilon))
