"""Sampling: one token per row, from the row's own seed and position, whatever else is in the batch.

A row's random number depends only on (seed, position), and the token is found by inverting the cumulative
distribution, so the same request samples the same tokens alone or among others.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rally.engines.base import EngineError
from rally.types import SamplingParams

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class Sampled(NamedTuple):
    ids: list[int]
    logprobs: list[float]  # under softmax(logits / temperature): what the trainer computes
    sampling_logprobs: list[float]  # after top-k, top-p and min-p as well


def uniforms(seeds: Sequence[int], positions: Sequence[int]) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row: a splitmix64 hash of (seed, position), 32 bits of it."""
    x = np.array(seeds, dtype=np.uint64) + (np.array(positions, dtype=np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    high: npt.NDArray[np.float64] = (x >> np.uint64(32)).astype(np.float64)
    return high / 2.0**32


def sample(
    logits_BV: Tensor, params: Sequence[SamplingParams], seeds: Sequence[int], positions: Sequence[int]
) -> Sampled:
    """Sample each row under its own parameters."""
    device = logits_BV.device
    temperature = torch.tensor([p.temperature or 1.0 for p in params], device=device)
    logp = torch.log_softmax(logits_BV.float() / temperature[:, None], dim=-1)
    filtered = _filter(logp, params) if any(_filters(p) for p in params) else logp
    cdf = filtered.exp().cumsum(-1, dtype=torch.float64)
    if not cdf[:, -1].isfinite().all():
        raise EngineError("the model's logits are not finite (NaN or infinity); its weights are broken or diverged")
    u = torch.from_numpy(uniforms(seeds, positions)).to(device)
    ids = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(1)
    greedy = [i for i, p in enumerate(params) if p.temperature == 0]
    if greedy:
        ids[greedy] = logits_BV[greedy].argmax(-1)
    chosen = ids[:, None]
    picked = logp.gather(1, chosen).squeeze(1).tolist()
    same = filtered is logp
    return Sampled(ids.tolist(), picked, picked if same else filtered.gather(1, chosen).squeeze(1).tolist())


def _filters(p: SamplingParams) -> bool:
    return p.temperature > 0 and (p.top_p < 1 or p.top_k > 0 or p.min_p > 0)


def _filter(logp_BV: Tensor, params: Sequence[SamplingParams]) -> Tensor:
    """Log-probabilities after top-k, top-p and min-p, renormalised; rows without a filter stay as they are."""
    result = logp_BV.clone()
    for i, p in enumerate(params):
        if not _filters(p):
            continue
        row = logp_BV[i]
        keep = torch.ones_like(row, dtype=torch.bool)
        if 0 < p.top_k < row.numel():
            keep &= row >= row.topk(p.top_k).values[-1]
        if p.top_p < 1:
            values, order = row.masked_fill(~keep, -torch.inf).softmax(-1).sort(descending=True)
            beyond = values.cumsum(-1) - values >= p.top_p
            keep[order[beyond]] = False
        if p.min_p > 0:
            keep &= row >= row.max() + float(np.log(p.min_p))
        result[i] = row.masked_fill(~keep, -torch.inf).log_softmax(-1)
    return result
