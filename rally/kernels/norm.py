"""RMS norm of a row rounds where Hugging Face's eager module rounds, and does not depend on the other rows.

Llama and Qwen round the normalised value to the dtype and then multiply by the weight; Gemma multiplies by
(1 + weight) in fp32 and rounds once (`offset=True`). One program reads one row once.
Shapes: T tokens, C channels.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    return _launch(x_TC, None, weight_C, eps, offset)


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    """Add `x_TC` to `residual_TC` in place, rounded to the dtype, and return the norm of the sum."""
    return _launch(x_TC, residual_TC, weight_C, eps, offset)


def _launch(x_TC: Tensor, residual_TC: Tensor | None, weight_C: Tensor, eps: float, offset: bool) -> Tensor:
    tokens, channels = x_TC.shape
    stream_TC = x_TC if residual_TC is None else residual_TC
    assert x_TC.shape == stream_TC.shape and weight_C.shape == (channels,)
    assert x_TC.dtype == stream_TC.dtype == weight_C.dtype
    assert x_TC.stride(1) == stream_TC.stride(1) == weight_C.stride(0) == 1
    y_TC = torch.empty((tokens, channels), dtype=x_TC.dtype, device=x_TC.device)
    block = triton.next_power_of_2(channels)
    _rms_norm_kernel[(tokens,)](
        x_TC,
        stream_TC,
        weight_C,
        y_TC,
        x_TC.stride(0),
        stream_TC.stride(0),
        eps,
        CHANNELS=channels,
        BLOCK=block,
        ADD=residual_TC is not None,
        OFFSET=offset,
        num_warps=min(16, max(1, block // 256)),
        enable_fp_fusion=False,
    )
    return y_TC


@triton.jit
def _rms_norm_kernel(
    x_ptr: tl.tensor,
    stream_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    y_ptr: tl.tensor,
    x_stride: int,
    stream_stride: int,
    eps: float,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ADD: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < CHANNELS
    weight = tl.load(weight_ptr + columns, mask=inside, other=0.0)
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0)
    if ADD:
        stream_row = stream_ptr + row * stream_stride + columns
        residual = tl.load(stream_row, mask=inside, other=0.0)
        x = (residual.to(tl.float32) + x.to(tl.float32)).to(x.dtype)
        tl.store(stream_row, x, mask=inside)
    x = x.to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, axis=0) * (1.0 / CHANNELS) + eps)
    tl.store(y_ptr + row * CHANNELS + columns, weighted(x * scale, weight, OFFSET), mask=inside)


@triton.jit
def weighted(normed: tl.tensor, weight: tl.tensor, OFFSET: tl.constexpr) -> tl.tensor:
    """The fp32 `normed` times the weight, in the weight's dtype, with the roundings of either family."""
    wide = weight.to(tl.float32)
    if OFFSET:
        return (normed * (1.0 + wide)).to(weight.dtype)
    else:
        return (normed.to(weight.dtype).to(tl.float32) * wide).to(weight.dtype)
