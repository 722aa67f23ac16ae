"""Samples one token per row. The result does not depend on the other rows of the batch.

The random number of a row depends only on (seed, position), and the token is found by inverting the cumulative
distribution. Shapes: B rows, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rally.engines.base import EngineError
from rally.engines.embedded.request_slots import Floats, Ints, Slots
from rally.models.token_masks import TokenMasks

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


class NonFiniteLogits(EngineError):
    """The model's logits are NaN or infinite. `everywhere`: in every row of the step, so no single request is at
    fault."""

    def __init__(self, everywhere: bool) -> None:
        super().__init__(
            "the model's logits are not finite (NaN or infinity); its weights are corrupt or have diverged"
        )
        self.everywhere = everywhere


class SampledBatch(NamedTuple):
    """For each row: the token, its log-probability under softmax(logits / temperature) over the tokens that its grammar
    allows, as the trainer computes it, and its log-probability after top-k, top-p and min-p."""

    ids: Ints
    logprobs: Floats
    sampling_logprobs: Floats


def uniforms(seeds: npt.NDArray[np.uint64], positions: Ints) -> npt.NDArray[np.float64]:
    """One number in [0, 1) per row: a splitmix64 hash of (seed, position), 32 bits of it."""
    x = seeds + (positions.astype(np.uint64) + np.uint64(1)) * _GOLDEN
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x ^= x >> np.uint64(31)
    high: npt.NDArray[np.float64] = (x >> np.uint64(32)).astype(np.float64)
    return high / 2.0**32


class Draw(NamedTuple):
    """Sampling parameters, one entry per row."""

    uniform: npt.NDArray[np.float64]
    temperature: Floats
    top_k: Ints
    top_p: npt.NDArray[np.float64]
    min_p: npt.NDArray[np.float64]
    filters: npt.NDArray[np.bool_]
    masks: tuple[tuple[int, bytes], ...] = ()  # rows with a grammar, and the tokens allowed there

    @classmethod
    def of(cls, slots: Slots, chosen: Ints, targets: Ints) -> Draw:
        """For tokens of the chosen slots that get the places `targets` in their histories."""
        return cls(
            uniforms(slots.seed[chosen], targets - slots.prompt[chosen]),
            slots.temperature[chosen],
            slots.top_k[chosen],
            slots.top_p[chosen],
            slots.min_p[chosen],
            slots.filters[chosen],
            tuple(_masks(slots, chosen)) if slots.constrained[chosen].any() else (),
        )


def _masks(slots: Slots, chosen: Ints) -> Iterator[tuple[int, bytes]]:
    for row in np.flatnonzero(slots.constrained[chosen]).tolist():
        request = slots.requests[int(chosen[row])]
        assert request is not None and request.state is not None
        yield row, request.state.mask()


def sample(logits_BV: Tensor, draw: Draw) -> SampledBatch:
    """Sample each row under its own parameters."""
    device = logits_BV.device
    greedy = draw.temperature == 0
    temperature = torch.from_numpy(np.where(greedy, np.float32(1), draw.temperature)).to(device)
    scaled = logits_BV.float() / temperature[:, None]
    if draw.masks:
        masks = TokenMasks.of([row for row, _ in draw.masks], [mask for _, mask in draw.masks], device)
        logits_BV = scaled = masks.applied(scaled)
    logp = torch.log_softmax(scaled, dim=-1)
    filtered = _filter(logp, draw) if draw.filters.any() else logp
    cdf = filtered.exp().cumsum(-1, dtype=torch.float64)
    finite = cdf[:, -1].isfinite()
    if not finite.all():
        raise NonFiniteLogits(everywhere=not bool(finite.any()))
    u = torch.from_numpy(draw.uniform).to(device)
    ids = torch.searchsorted(cdf, (u * cdf[:, -1])[:, None], right=True).squeeze(1)
    if greedy.any():
        rows = torch.from_numpy(np.flatnonzero(greedy)).to(device)
        ids[rows] = logits_BV[rows].argmax(-1)
    chosen = ids[:, None]
    picked = logp.gather(1, chosen).squeeze(1).cpu().numpy()
    same = filtered is logp
    return SampledBatch(
        ids.cpu().numpy(), picked, picked if same else filtered.gather(1, chosen).squeeze(1).cpu().numpy()
    )


def _filter(logp_BV: Tensor, draw: Draw) -> Tensor:
    """Log-probabilities after top-k, top-p and min-p, renormalised; rows without a filter are unchanged."""
    chosen = np.flatnonzero(draw.filters)
    rows, *filters = (
        torch.from_numpy(x).to(logp_BV.device)
        for x in (chosen, draw.top_k[chosen], draw.top_p[chosen], draw.min_p[chosen])
    )
    return logp_BV.index_copy(0, rows, filtered_logprobs(logp_BV[rows], *filters))


def filtered_logprobs(logp_BV: Tensor, top_k_B: Tensor, top_p_B: Tensor, min_p_B: Tensor) -> Tensor:
    """Log-probabilities after top-k, then top-p, then min-p, renormalised.

    A filter is off where top_k is 0 or less, top_p is 1 or min_p is 0; a row with all three off is returned
    unchanged, bit for bit. All tokens equal to the k-th stay; of equal tokens at the edge of top-p the first ones stay.
    """
    size = logp_BV.shape[1]
    off_B = (top_k_B <= 0) & (top_p_B >= 1) & (min_p_B <= 0)
    sorted_BV, order_BV = logp_BV.sort(dim=-1, descending=True, stable=True)

    last_B = torch.where(top_k_B <= 0, size, top_k_B.clamp(max=size)).long() - 1
    kept_BV = sorted_BV >= sorted_BV.gather(1, last_B[:, None])
    mass_BV = sorted_BV.masked_fill(~kept_BV, -torch.inf).softmax(-1)
    before_BV = mass_BV.cumsum(-1) - mass_BV
    kept_BV &= (before_BV < top_p_B.to(logp_BV.dtype)[:, None]) | (top_p_B >= 1)[:, None]
    kept_BV &= sorted_BV >= sorted_BV[:, :1] + min_p_B.double().log().to(logp_BV.dtype)[:, None]

    kept_BV[:, 0] = True  # the best token stays, whatever rounding makes of the limits

    keep_BV = torch.empty_like(kept_BV).scatter_(1, order_BV, kept_BV)
    filtered_BV = logp_BV.masked_fill(~keep_BV, -torch.inf).log_softmax(-1)
    return torch.where(off_B[:, None], logp_BV, filtered_BV)
