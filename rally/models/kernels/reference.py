"""The kernels in plain torch: norms, rotary embedding, activation, sampling, linear layers, FP8 and paged attention.

They are the specification that the Triton kernels are tested against, with the same names and signatures, on any
device. Attention computes one request after the other in fp32, and reads nothing that a kernel may not read: no page
beyond a row's length, no slot outside the window.

Shapes: B requests, T packed tokens, H query heads, K key/value heads, G = H / K, D head size, R rows of a page table,
P its width, N tiles, t tokens of one request, L keys that it sees.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from rally.models.kernels.attention_tiles import BLOCK_M, extend_tokens

FP8_MAX = 448.0  # the largest number of float8_e4m3fn
FP8_SMALLEST = 1e-12  # the least that a row is scaled by, so that a row of zeros stays one


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


def quantize_rows(x_RC: Tensor, out_RC: Tensor, scale_R: Tensor) -> None:
    """Each row as 8-bit floats and the float32 scale that they must be multiplied by. What is not finite becomes
    NaN."""
    most_R = x_RC.abs().amax(-1).float().clamp(min=FP8_SMALLEST)
    scale_R.copy_(most_R / FP8_MAX)
    out_RC.copy_(x_RC.float() * (FP8_MAX / most_R)[:, None])


def fp8_linear(
    x_TC: Tensor,
    x_scale_T: Tensor,
    weight_FC: Tensor,
    weight_scale_F: Tensor,
    bias_F: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """The product of two matrices from `quantize_rows`, summed in float32, plus the bias."""
    y_TF = F.linear(x_TC.float(), weight_FC.float()) * x_scale_T[:, None] * weight_scale_F
    return (y_TF if bias_F is None else y_TF + bias_F.float()).to(out_dtype)


def scan_step(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g: Tensor,
    beta_TH: Tensor | None,
    states_SHKV: Tensor,
    rows_T: Tensor,
    out_THV: Tensor,
) -> None:
    """One token of linear attention for each row of the states, which are updated in place."""
    decay = g.float().exp()
    state = states_SHKV.index_select(0, rows_T) * (decay[..., None, None] if g.ndim == 2 else decay[..., None])
    k, v = k_THK.float(), v_THV.float()
    if beta_TH is not None:
        v = (v - torch.einsum("thkv,thk->thv", state, k)) * beta_TH.float()[..., None]
    state = state + k[..., None] * v[..., None, :]
    states_SHKV.index_copy_(0, rows_T, state)
    out_THV.copy_(torch.einsum("thkv,thk->thv", state, q_THK.float()))


def grouped_linear(
    x: Tensor, weight_EFC: Tensor, rows_S: Tensor, ends_E: Tensor, blocks_B2: Tensor, out_SF: Tensor, block_m: int
) -> None:
    """`out[s] = weight[expert of s] @ x[rows[s]]`, block by block of pairs of one expert."""
    for expert, first in blocks_B2.tolist():
        if expert >= 0:
            last = min(first + block_m, int(ends_E[expert]))
            out_SF[first:last] = (x[rows_S[first:last]].float() @ weight_EFC[expert].float().t()).to(out_SF.dtype)


def paged_decode(
    q_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_BP: Tensor,
    lengths_B: Tensor,
    out_BHD: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None,
    max_length: int,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    workspace: Tensor | None = None,
) -> None:
    """One query token per request, at position length - 1; a row of length 0 is padding and becomes zeros."""
    for row, length in enumerate(lengths_B.tolist()):
        assert length <= max_length, "max_length bounds the lengths"
        if length == 0:
            out_BHD[row] = 0
            continue
        first = _first_visible(length - 1, window)
        slots_L = _slots(table_BP[row], first, length, page_size)
        k_LKD, v_LKD = keys[slots_L], values[slots_L]
        scores = (scale, window, softcap, sinks_H)
        out_BHD[row] = _attend(q_BHD[row : row + 1], k_LKD, v_LKD, length - 1, first, *scores)[0]


def paged_extend(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_RP: Tensor,
    tiles_N4: Tensor,
    out_THD: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    block_m: int = BLOCK_M,
) -> None:
    """Consecutive tokens of a request, tile by tile: (row of the table, first token in q, tokens, position)."""
    group = q_THD.shape[1] // keys.shape[1]
    for row, token, tokens, position in tiles_N4.tolist():
        assert tokens <= extend_tokens(group, block_m), "a tile is as large as one program can hold"
        if tokens == 0:
            continue
        first = _first_visible(position, window)
        slots_L = _slots(table_RP[row], first, position + tokens, page_size)
        part = slice(token, token + tokens)
        scores = (scale, window, softcap, sinks_H)
        out_THD[part] = _attend(q_THD[part], keys[slots_L], values[slots_L], position, first, *scores)


def _first_visible(position: int, window: int | None) -> int:
    return 0 if window is None else max(0, position - window + 1)


def _slots(pages_P: Tensor, first: int, end: int, page_size: int) -> Tensor:
    """The slots [L] in the pool of the positions from `first` to `end`."""
    positions_L = torch.arange(first, end, device=pages_P.device)
    return pages_P.long()[positions_L // page_size] * page_size + positions_L % page_size


def _attend(
    q_tHD: Tensor,
    k_LKD: Tensor,
    v_LKD: Tensor,
    position: int,
    first: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Queries from `position` on, keys from `first` on: [t, H, D] in fp32, D of the values."""
    t, h, d = q_tHD.shape
    q_tKGD = q_tHD.float().view(t, k_LKD.shape[1], -1, d)
    scores_KGtL = torch.einsum("tkgd,lkd->kgtl", q_tKGD, k_LKD.float()) * scale
    if softcap is not None:
        scores_KGtL = torch.tanh(scores_KGtL / softcap) * softcap
    queries_t1 = torch.arange(position, position + t, device=q_tHD.device)[:, None]
    keys_L = torch.arange(first, first + k_LKD.shape[0], device=q_tHD.device)
    hidden_tL = keys_L > queries_t1
    if window is not None:
        hidden_tL |= keys_L <= queries_t1 - window
    scores_KGtL = scores_KGtL.masked_fill(hidden_tL, float("-inf"))
    if sinks_H is not None:
        kv, group = scores_KGtL.shape[:2]
        scores_KGtL = torch.cat((scores_KGtL, sinks_H.float().view(kv, group, 1, 1).expand(kv, group, t, 1)), dim=-1)
    weights_KGtL = scores_KGtL.softmax(-1)[..., : len(keys_L)]
    return torch.einsum("kgtl,lkd->tkgd", weights_KGtL, v_LKD.float()).reshape(t, h, -1)
