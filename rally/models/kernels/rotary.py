"""Rotary embedding kernels: rotate queries, and rotate and store keys and values in one launch.

Each head is normed first if the model norms heads (Qwen3, Gemma3). Rotation and roundings are those of transformers:
the first half of a head pairs with its second half, x * cos and rotate_half(x) * sin are each rounded, and so is their
sum.
Shapes: T tokens, H query heads, K key and value heads, D channels of a head; pools are [slots, K, D].
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rally.models.kernels.rms_norm import weighted

_ELEMENTS = 512  # of one program: eight values of each half for every lane of one warp


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
    """Write rotated q to `q_out_THD`, and rotated k and v to their slots; slot -1 is padding and stores nothing."""
    tokens, q_heads, size = q_THD.shape
    kv_heads = k_TKD.shape[1]
    assert size >= 2 and size & (size - 1) == 0
    assert k_TKD.shape == v_TKD.shape == (tokens, kv_heads, size) and q_out_THD.shape == q_THD.shape
    assert cos_TD.shape == sin_TD.shape == (tokens, size) and slots_T.shape == (tokens,) and slots_T.is_contiguous()
    assert keys.shape[1:] == values.shape[1:] == (kv_heads, size)
    assert (q_weight is None) == (k_weight is None)
    tensors = (q_THD, k_TKD, v_TKD, cos_TD, sin_TD, keys, values, q_out_THD)
    weights = (q_weight, k_weight)
    assert all(t.dtype == q_THD.dtype and t.stride(-1) == 1 for t in (*tensors, *weights) if t is not None)
    strides = [step for t in tensors for step in t.stride()[:-1]]
    heads = max(1, _ELEMENTS // size)
    shape = {"Q_HEADS": q_heads, "KV_HEADS": kv_heads, "SIZE": size, "HEADS": heads}
    # Without enable_fp_fusion=False, a product that must be rounded becomes part of a fused multiply-add.
    compiling = {"num_warps": max(1, size // _ELEMENTS), "enable_fp_fusion": False}
    flavour = {"NORM": q_weight is not None, "OFFSET": offset, **compiling}
    grid = (tokens, triton.cdiv(q_heads, heads) + triton.cdiv(kv_heads, heads))
    _rotate_and_store_kernel[grid](*tensors, slots_T, *weights, *strides, eps, **shape, **flavour)


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor, *, back: bool = False) -> Tensor:
    """Rotate every head; `back` rotates back, for the gradient. Both halves of cos and sin are equal."""
    tokens, heads, size = x_THD.shape
    assert size >= 2 and size & (size - 1) == 0
    assert cos_TD.shape == sin_TD.shape == (tokens, size) and cos_TD.is_contiguous() and sin_TD.is_contiguous()
    assert x_THD.stride(2) == 1 and x_THD.dtype == cos_TD.dtype == sin_TD.dtype
    y_THD = torch.empty((tokens, heads, size), dtype=x_THD.dtype, device=x_THD.device)
    _rotate_kernel[(tokens,)](
        x_THD,
        cos_TD,
        sin_TD,
        y_THD,
        x_THD.stride(0),
        x_THD.stride(1),
        HEADS=heads,
        BLOCK=triton.next_power_of_2(heads),
        SIZE=size,
        BACK=back,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return y_THD


@triton.jit
def _rotate_kernel(
    x_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    y_ptr: tl.tensor,
    token_stride: int,
    head_stride: int,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
    SIZE: tl.constexpr,
    BACK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    half: tl.constexpr = SIZE // 2
    heads = tl.arange(0, BLOCK)[:, None]
    columns = tl.arange(0, half)[None, :]
    inside = heads < HEADS
    source = x_ptr + token * token_stride + heads * head_stride + columns
    target = y_ptr + (token * HEADS + heads) * SIZE + columns
    x1 = tl.load(source, mask=inside, other=0.0)
    x2 = tl.load(source + half, mask=inside, other=0.0)
    cos = tl.load(cos_ptr + token * SIZE + columns)
    sin = tl.load(sin_ptr + token * SIZE + columns)
    if BACK:
        sin = -sin
    tl.store(target, (_product(x1, cos) - _product(x2, sin)).to(x1.dtype), mask=inside)
    tl.store(target + half, (_product(x2, cos) + _product(x1, sin)).to(x1.dtype), mask=inside)


@triton.jit
def _rotate_and_store_kernel(
    q_ptr: tl.tensor,
    k_ptr: tl.tensor,
    v_ptr: tl.tensor,
    cos_ptr: tl.tensor,
    sin_ptr: tl.tensor,
    keys_ptr: tl.tensor,
    values_ptr: tl.tensor,
    q_out_ptr: tl.tensor,
    slots_ptr: tl.tensor,
    q_weight_ptr: tl.tensor,
    k_weight_ptr: tl.tensor,
    q_token_stride: int,
    q_head_stride: int,
    k_token_stride: int,
    k_head_stride: int,
    v_token_stride: int,
    v_head_stride: int,
    cos_stride: int,
    sin_stride: int,
    keys_slot_stride: int,
    keys_head_stride: int,
    values_slot_stride: int,
    values_head_stride: int,
    q_out_token_stride: int,
    q_out_head_stride: int,
    eps: float,
    Q_HEADS: tl.constexpr,
    KV_HEADS: tl.constexpr,
    SIZE: tl.constexpr,
    HEADS: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    q_blocks: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    cos_row = cos_ptr + token * cos_stride
    sin_row = sin_ptr + token * sin_stride
    if block < q_blocks:
        heads = block * HEADS + tl.arange(0, HEADS)
        source = q_ptr + token * q_token_stride + heads * q_head_stride
        target = q_out_ptr + token * q_out_token_stride + heads * q_out_head_stride
        _rotate(source, target, heads < Q_HEADS, cos_row, sin_row, q_weight_ptr, eps, SIZE, NORM, OFFSET)
    else:
        slot = tl.load(slots_ptr + token).to(tl.int64)
        heads = (block - q_blocks) * HEADS + tl.arange(0, HEADS)
        stored = heads < tl.where(slot >= 0, KV_HEADS, 0)
        source = k_ptr + token * k_token_stride + heads * k_head_stride
        target = keys_ptr + slot * keys_slot_stride + heads * keys_head_stride
        _rotate(source, target, stored, cos_row, sin_row, k_weight_ptr, eps, SIZE, NORM, OFFSET)
        columns = tl.arange(0, SIZE)[None, :]
        v = tl.load((v_ptr + token * v_token_stride + heads * v_head_stride)[:, None] + columns, mask=stored[:, None])
        place = values_ptr + slot * values_slot_stride + heads * values_head_stride
        tl.store(place[:, None] + columns, v, mask=stored[:, None])


@triton.jit
def _rotate(
    source: tl.tensor,
    target: tl.tensor,
    inside: tl.tensor,
    cos_row: tl.tensor,
    sin_row: tl.tensor,
    weight_ptr: tl.tensor,
    eps: float,
    SIZE: tl.constexpr,
    NORM: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """Norm and rotate a block of heads, each given by the address of its first channel."""
    half: tl.constexpr = SIZE // 2
    first = tl.arange(0, half)[None, :]
    second = first + half
    mask = inside[:, None]
    x1 = tl.load(source[:, None] + first, mask=mask, other=0.0)
    x2 = tl.load(source[:, None] + second, mask=mask, other=0.0)
    if NORM:
        wide1 = x1.to(tl.float32)
        wide2 = x2.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide1 * wide1 + wide2 * wide2, axis=1) * (1.0 / SIZE) + eps)[:, None]
        x1 = weighted(wide1 * scale, tl.load(weight_ptr + first), OFFSET)
        x2 = weighted(wide2 * scale, tl.load(weight_ptr + second), OFFSET)
    cos1 = tl.load(cos_row + first)
    cos2 = tl.load(cos_row + second)
    sin1 = tl.load(sin_row + first)
    sin2 = tl.load(sin_row + second)
    y1 = _product(x1, cos1) - _product(x2, sin1)
    y2 = _product(x2, cos2) + _product(x1, sin2)
    tl.store(target[:, None] + first, y1.to(x1.dtype), mask=mask)
    tl.store(target[:, None] + second, y2.to(x1.dtype), mask=mask)


@triton.jit
def _product(x: tl.tensor, y: tl.tensor) -> tl.tensor:
    """x * y rounded to their dtype, as an fp32 value."""
    return (x.to(tl.float32) * y.to(tl.float32)).to(x.dtype).to(tl.float32)
