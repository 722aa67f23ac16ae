"""Top-k, top-p and min-p filters for a batch of rows. Rows are independent."""

from __future__ import annotations

import torch
from torch import Tensor


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

    keep_BV = torch.empty_like(kept_BV).scatter_(1, order_BV, kept_BV)
    filtered_BV = logp_BV.masked_fill(~keep_BV, -torch.inf).log_softmax(-1)
    return torch.where(off_B[:, None], logp_BV, filtered_BV)
