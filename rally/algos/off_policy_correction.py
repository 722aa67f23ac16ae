"""Off-policy correction: importance weights and rejection tests for tokens sampled by a slightly different policy.

Shapes: M sampled tokens of R rows; a row is what "sequence" means here.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from rally.algos.losses import kl_estimate

LEVELS = ("token", "seq_sum", "seq_mean", "seq_max")
REJECTIONS = (
    *(f"{level}_{kind}" for level in LEVELS for kind in ("k1", "k2", "k3") if (level, kind) != ("seq_max", "k1")),
    "seq_min_k1",
)


@dataclass(frozen=True, kw_only=True)
class CorrectionSettings:
    """`level`: importance weights, truncated at `threshold` and, if `normalize`, scaled to mean 1. `rejections`: tests
    with (lowest, highest) that tokens must pass to be trained on. `bypass`: the policy of each mini-batch is compared
    with the sampler, whose log-probabilities stay the old ones; else the policy of the whole step is, once."""

    level: Literal["token", "sequence"] | None = None
    threshold: float = 2.0
    normalize: bool = False
    rejections: tuple[tuple[str, float, float], ...] = ()
    bypass: bool = False

    @property
    def per_step(self) -> bool:
        return not self.bypass and (self.level is not None or bool(self.rejections))

    @property
    def per_mini_batch(self) -> bool:
        return self.bypass and (self.level is not None or bool(self.rejections))


def truncated_weights(
    logp_M: Tensor, rollout_logp_M: Tensor, row_M: Tensor, level: Literal["token", "sequence"], threshold: float
) -> Tensor:
    """min(policy / sampler, threshold), for each token or for its whole row."""
    difference = logp_M - rollout_logp_M
    if level == "sequence":
        difference = _over_rows(difference, row_M, "sum")
    return torch.exp(difference.clamp(-20, 20)).clamp(max=threshold)


def of_mean_one(weights_M: Tensor, row_M: Tensor, level: Literal["token", "sequence"]) -> Tensor:
    """The weights divided by their mean over the tokens of the batch or, for sequence weights, over its rows."""
    if not weights_M.numel():
        return weights_M
    counts_M = torch.ones_like(weights_M)
    if level == "sequence":
        counts_M = 1 / _over_rows(counts_M, row_M, "sum")
    return weights_M / ((weights_M * counts_M).sum() / counts_M.sum())


def kept_tokens(
    logp_M: Tensor, rollout_logp_M: Tensor, row_M: Tensor, test: str, lowest: float, highest: float
) -> Tensor:
    """The tokens whose divergence from the sampler passes the test, such as seq_mean_k3.

    For k1, the bounds apply to the ratio policy / sampler (its product for seq_sum, its geometric mean for seq_mean,
    its lowest value for seq_min).
    For k2 and k3, which are never negative, only `highest` applies, to the estimate itself.
    """
    level, _, kind = test.rpartition("_")
    if kind == "k1":
        divergence_M = logp_M - rollout_logp_M
        low, high = torch.tensor([lowest, highest], dtype=torch.float64).log().tolist()
    else:
        divergence_M = kl_estimate(rollout_logp_M, logp_M, kind)
        low, high = -torch.inf, highest
    if level != "token":
        divergence_M = _over_rows(divergence_M, row_M, level.removeprefix("seq_"))
    return torch.logical_and(divergence_M >= low, divergence_M <= high)


def _over_rows(values_M: Tensor, row_M: Tensor, how: str) -> Tensor:
    rows = int(row_M.max()) + 1 if row_M.numel() else 0
    reduce = {"sum": "sum", "mean": "mean", "max": "amax", "min": "amin"}[how]
    out = torch.zeros(rows, dtype=values_M.dtype, device=values_M.device)
    return out.scatter_reduce(0, row_M, values_M, reduce, include_self=False)[row_M]
