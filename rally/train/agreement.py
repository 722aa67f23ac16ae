"""How well rollout and trainer agree about the probability of each sampled token, in the numbers users know.

Shapes: M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def probability_agreement(trained: Sequence[Tensor], recorded: Sequence[Tensor]) -> dict[str, float]:
    """The difference of the two probabilities, and their correlation, which is left out where either does not vary."""
    p_M, q_M = (torch.cat(list(parts)).double().exp() for parts in (trained, recorded))
    apart_M = (p_M - q_M).abs()
    told = {
        "training/rollout_probs_diff_mean": float(apart_M.mean()),
        "training/rollout_probs_diff_max": float(apart_M.max()),
        "training/rollout_probs_diff_std": float(apart_M.std(correction=0)),
    }
    correlation = float(torch.corrcoef(torch.stack([p_M, q_M]))[0, 1]) if len(p_M) > 1 else float("nan")
    return told | ({"training/rollout_actor_probs_pearson_corr": correlation} if correlation == correlation else {})
