"""The specification: what each kernel of this room computes, in plain torch, on any device.

Shapes: T tokens, B rows, C channels in, F features out, H query heads, K key and value heads, D channels of a head,
V vocabulary; pools of keys and values are [slots, K, D].
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    wide_TC = x_TC.float()
    normed_TC = wide_TC * torch.rsqrt(wide_TC.pow(2).mean(-1, keepdim=True) + eps)
    if offset:
        return (normed_TC * (1.0 + weight_C.float())).to(x_TC.dtype)
    return normed_TC.to(x_TC.dtype) * weight_C


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    residual_TC += x_TC
    return rms_norm(residual_TC, weight_C, eps, offset=offset)


def add_and_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False
) -> tuple[Tensor, Tensor]:
    sum_TC = x_TC + residual_TC
    return sum_TC, rms_norm(sum_TC, weight_C, eps, offset=offset)


def rotate_and_store(
    q_THD: Tensor,
    k_TKD: Tensor,
    v_TKD: Tensor,
    cos_TD: Tensor,
    sin_TD: Tensor,
    slots_T: Tensor,
    keys: Tensor,
    values: Tensor,
    q_out_THD: Tensor,
    *,
    q_weight: Tensor | None = None,
    k_weight: Tensor | None = None,
    eps: float = 0.0,
    offset: bool = False,
) -> None:
    if q_weight is not None and k_weight is not None:
        q_THD = rms_norm(q_THD, q_weight, eps, offset=offset)
        k_TKD = rms_norm(k_TKD, k_weight, eps, offset=offset)
    q_out_THD.copy_(rotate(q_THD, cos_TD, sin_TD))
    stored_T = slots_T >= 0
    keys[slots_T[stored_T]] = rotate(k_TKD, cos_TD, sin_TD)[stored_T]
    values[slots_T[stored_T]] = v_TKD[stored_T]


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    first, second = x_THD.chunk(2, dim=-1)
    return x_THD * cos_TD[:, None] + torch.cat((-second, first), dim=-1) * sin_TD[:, None]


def gated(gate_TF: Tensor, up_TF: Tensor, kind: str) -> Tensor:
    return (F.silu(gate_TF) if kind == "silu" else F.gelu(gate_TF, approximate="tanh")) * up_TF


def sample(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor, ids_B: Tensor, logprobs_B: Tensor) -> None:
    greedy_B = temperature_B == 0
    logp_BV = (logits_BV / torch.where(greedy_B, 1.0, temperature_B)[:, None]).log_softmax(-1)
    cdf_BV = logp_BV.exp().cumsum(-1, dtype=torch.float64)
    target_B = uniform_B.double() * cdf_BV[:, -1]
    drawn_B = torch.searchsorted(cdf_BV, target_B[:, None], right=True).squeeze(1)
    ids_B.copy_(torch.where(greedy_B, logits_BV.argmax(-1), drawn_B.clamp(max=logits_BV.shape[1] - 1)))
    logprobs_B.copy_(logp_BV.gather(1, ids_B[:, None]).squeeze(1))


def linear(
    x_TC: Tensor, weight_FC: Tensor, bias_F: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    bias = None if bias_F is None else bias_F.float()
    return F.linear(x_TC.float(), weight_FC.float(), bias).to(out_dtype or x_TC.dtype)
