"""Policy losses: pure tensor functions over the tokens the policy sampled, and over no others.

Observed tokens are left out before a tensor reaches this file, so no mask can be forgotten here. A researcher changes
the objective in `clipped_policy_loss`.

Shapes: M sampled tokens of a batch, E its episodes.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

Aggregation = Literal["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]


class PolicyLoss(NamedTuple):
    """Loss of each token, and which tokens the clip held back."""

    loss_M: Tensor
    clipped_M: Tensor
    clipped_lower_M: Tensor


def clipped_policy_loss(
    logp_M: Tensor, old_logp_M: Tensor, advantages_M: Tensor, *, low: float, high: float, dual: float = 3.0
) -> PolicyLoss:
    """PPO's clipped objective with separate low and high clip and the dual clip for negative advantages."""
    ratio = torch.exp((logp_M - old_logp_M).clamp(-20, 20))
    free = -advantages_M * ratio
    clipped = -advantages_M * ratio.clamp(1 - low, 1 + high)
    pessimistic = torch.maximum(free, clipped)
    bounded = torch.minimum(pessimistic, -advantages_M * dual)
    negative = advantages_M < 0
    loss = torch.where(negative, bounded, pessimistic)
    return PolicyLoss(loss, clipped > free, negative & (pessimistic > -advantages_M * dual))


def kl_estimate(logp_M: Tensor, reference_logp_M: Tensor, kind: str = "low_var_kl") -> Tensor:
    """Per-token estimate of KL(policy || reference); `kind` in k1, k2, k3 and the names users know them by."""
    if kind.endswith("+"):  # the value of the estimator with the unbiased gradient of k2
        value, smooth = (kl_estimate(logp_M, reference_logp_M, k) for k in (kind[:-1], "k2"))
        return smooth + (value - smooth).detach()
    difference = logp_M - reference_logp_M
    if kind in ("kl", "k1"):
        return difference
    if kind == "abs":
        return difference.abs()
    if kind in ("mse", "k2"):
        return 0.5 * difference**2
    if kind in ("low_var_kl", "k3"):
        negative = (-difference).clamp(-20, 20)
        return (negative.exp() - negative - 1).clamp(-10, 10)
    raise ValueError(f"unknown KL estimator {kind!r}; use k1, k2, k3, abs, kl, mse or low_var_kl, or one with +")


def token_weights(tokens_E: Tensor, mode: Aggregation, scale: float | None = None) -> Tensor:
    """The weight one token of each episode has in the batch's loss, so that loss = sum(weight * token loss).

    Computed once for a whole mini-batch, from sampled tokens alone: splitting it into micro-batches changes nothing.
    """
    episodes = tokens_E.numel()
    tokens = tokens_E.double()
    if mode == "token-mean":
        weights = torch.full_like(tokens, 1.0) / tokens.sum().clamp(min=1)
    elif mode == "seq-mean-token-sum":
        weights = torch.full_like(tokens, 1.0 / episodes)
    elif mode == "seq-mean-token-mean":
        weights = 1.0 / (episodes * tokens.clamp(min=1))
    elif mode == "seq-mean-token-sum-norm":
        assert scale, "seq-mean-token-sum-norm divides by a constant"
        weights = torch.full_like(tokens, 1.0 / (episodes * scale))
    else:
        raise ValueError(f"unknown loss_agg_mode {mode!r}")
    return weights.float()
