"""Per-token inputs of the loss: log-probabilities, importance weights, token marks and KL rewards.

They are computed over whole batches, so that the division into micro-batches does not change them.

Shapes: M sampled tokens of all rows, in their order, on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rally.algos.losses import SurrogateSettings, kl_estimate, mark_tokens
from rally.algos.off_policy_correction import CorrectionSettings, kept_tokens, of_mean_one, truncated_weights
from rally.models.sharding import ALONE, Ranks
from rally.train.micro_batches import MicroBatchLimits, in_order, micro_batches_for, parts_of, share_of
from rally.train.packing import PackedRows, Row, joined, pack, per_token


class CorrectedRows(NamedTuple):
    rows: list[Row]
    metrics: dict[str, float]


def over_rows(
    rows: Sequence[Row],
    forward: Callable[[PackedRows], Tensor],
    device: torch.device,
    limits: MicroBatchLimits,
    ranks: Ranks = ALONE,
) -> Tensor:
    """`forward` of each sampled token, such as its log-probability, without a gradient. Rank 0 has the rows and gets
    the numbers; the others give no rows and get none."""
    rounds = micro_batches_for(ranks, rows, limits)
    mine = [torch.zeros(0)]
    with torch.no_grad():
        for part in share_of(ranks, rounds):
            numbers_M = forward(pack(part.rows, device)).float().cpu()
            if part.counts:
                mine.append(numbers_M)
    by_row: dict[int, Tensor] = {}
    for one, numbers_M in zip(parts_of(rounds), in_order(ranks, rounds, torch.cat(mine)), strict=True):
        by_row |= zip(map(id, one), numbers_M.float().split([len(row.sampled) for row in one]), strict=True)
    return torch.cat([torch.zeros(0), *(by_row[id(row)] for row in rows)])


def corrected_rows(rows: Sequence[Row], logp_M: Tensor, settings: CorrectionSettings) -> CorrectedRows:
    """Rows whose old log-probabilities are `logp_M`, the trainer's own. The engine's become importance weights.

    With `settings.bypass` the old log-probabilities stay those of the engine.
    """
    if not rows:  # on ranks other than 0
        return CorrectedRows([], {})
    recorded_M, row_M = recorded_logprobs(rows), _row_numbers(rows)
    weights_M, kept_M = torch.ones_like(logp_M), torch.ones_like(logp_M, dtype=torch.bool)
    if settings.level is not None:
        weights_M = truncated_weights(logp_M, recorded_M, row_M, settings.level, settings.threshold)
    for test, lowest, highest in settings.rejections:
        kept_M &= kept_tokens(logp_M, recorded_M, row_M, test, lowest, highest)
    used_M = weights_M
    if settings.normalize and settings.level is not None:
        used_M = of_mean_one(weights_M, row_M, settings.level)
    sizes = [len(row.sampled) for row in rows]
    old, weights = (recorded_M if settings.bypass else logp_M).split(sizes), (used_M * kept_M).split(sizes)
    changed = [
        replace(row, logprobs=p.numpy(), weights=w.numpy()) for row, p, w in zip(rows, old, weights, strict=True)
    ]
    metrics = _metrics(logp_M, recorded_M, weights_M, kept_M, settings)
    fresh_M = fresh_tokens(rows)
    if fresh_M.any():
        k3_M, apart_M = kl_estimate(recorded_M, logp_M, "k3")[fresh_M], (logp_M - recorded_M).abs()[fresh_M]
        metrics["actor/rollout_mismatch_kl"] = float(k3_M.mean(dtype=torch.float64))
        metrics["actor/rollout_mismatch_max"] = float(apart_M.max())
    return CorrectedRows(changed, metrics)


def fresh_tokens(rows: Sequence[Row]) -> Tensor:
    """Which sampled tokens of rows are of the weight version that the update begins with."""
    return torch.from_numpy(~per_token(rows, "stale", False, np.bool_))


def _metrics(
    logp_M: Tensor, recorded_M: Tensor, weights_M: Tensor, kept_M: Tensor, settings: CorrectionSettings
) -> dict[str, float]:
    k3 = float(kl_estimate(recorded_M, logp_M, "k3").mean(dtype=torch.float64))
    metrics = {
        "rollout_corr/kl": float((recorded_M - logp_M).mean(dtype=torch.float64)),
        "rollout_corr/k3_kl": k3,
    }
    if settings.level is not None:
        metrics |= {
            "rollout_corr/rollout_is_mean": float(weights_M.mean(dtype=torch.float64)),
            "rollout_corr/rollout_is_min": float(weights_M.min()),
            "rollout_corr/rollout_is_max": float(weights_M.max()),
            "rollout_corr/rollout_is_ratio_fraction_high": float((weights_M >= settings.threshold).double().mean()),
        }
    if settings.rejections:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = 1.0 - float(kept_M.double().mean())
    return metrics


def marked_rows(rows: Sequence[Row], settings: SurrogateSettings) -> list[Row]:
    """The rows of a mini-batch with tokens marked by the covariance of advantage and old log-probability."""
    advantages_M = torch.from_numpy(per_token(rows, "advantages", 0.0, np.float32))
    if not advantages_M.numel():
        return list(rows)
    parts = mark_tokens(recorded_logprobs(rows), advantages_M, settings).split([len(row.sampled) for row in rows])
    return [replace(row, marked=part.numpy()) for row, part in zip(rows, parts, strict=True)]


def kl_rewards(rows: Sequence[Row], reference_M: Tensor, kind: str, coefficient: float) -> Tensor:
    """The KL penalty of each sampled token, as a reward."""
    return -coefficient * kl_estimate(recorded_logprobs(rows), reference_M, kind)


def recorded_logprobs(rows: Sequence[Row]) -> Tensor:
    """The log-probability of each sampled token, as the engine recorded it."""
    return torch.from_numpy(joined((row.logprobs for row in rows), np.float32))


def _row_numbers(rows: Sequence[Row]) -> Tensor:
    return torch.arange(len(rows)).repeat_interleave(torch.tensor([len(row.sampled) for row in rows], dtype=torch.long))
