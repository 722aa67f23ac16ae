"""RMS norm kernels. They round where the eager modules of transformers round, and rows are independent.

Llama and Qwen round the normalised value to the dtype and then multiply by the weight; Gemma multiplies by
(1 + weight) in fp32 and rounds once (`offset=True`). One program reads one row once.
Shapes: T tokens, C channels, P programs of the backward pass.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

_BACKWARD_TILE = 2048  # elements that a program of the backward pass holds at once
_TURNS = 8  # tiles per program, so that it writes one partial sum for the weight instead of eight


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    return _launch(x_TC, None, weight_C, eps, offset)


def add_rms_norm(x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    """Add `x_TC` to `residual_TC` in place, rounded to the dtype, and return the norm of the sum."""
    return _launch(x_TC, residual_TC, weight_C, eps, offset)


def rms_norm_backward(
    x_TC: Tensor, weight_C: Tensor, grad_TC: Tensor, more_TC: Tensor | None, eps: float, *, offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of `rms_norm` for x, with `more_TC` added, and for the weight, both summed in fp32."""
    tokens, channels = x_TC.shape
    assert all(t.is_contiguous() and t.dtype == x_TC.dtype for t in (x_TC, weight_C, grad_TC))
    assert more_TC is None or (more_TC.is_contiguous() and more_TC.dtype == x_TC.dtype)
    dx_TC = torch.empty_like(x_TC)
    block = triton.next_power_of_2(channels)
    rows = max(1, _BACKWARD_TILE // block)
    programs = triton.cdiv(tokens, rows * _TURNS)
    partial_PC = torch.empty((programs, channels), dtype=torch.float32, device=x_TC.device)
    _rms_norm_backward_kernel[(programs,)](
        x_TC,
        weight_C,
        grad_TC,
        x_TC if more_TC is None else more_TC,
        dx_TC,
        partial_PC,
        tokens,
        eps,
        CHANNELS=channels,
        BLOCK=block,
        ROWS=rows,
        TURNS=_TURNS,
        ADD=more_TC is not None,
        OFFSET=offset,
        num_warps=min(16, max(4, block // 256)),
    )
    return dx_TC, partial_PC.sum(0).to(weight_C.dtype)


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


@triton.jit
def _rms_norm_backward_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    more_ptr: tl.tensor,
    dx_ptr: tl.tensor,
    partial_ptr: tl.tensor,
    tokens: int,
    eps: float,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    ROWS: tl.constexpr,
    TURNS: tl.constexpr,
    ADD: tl.constexpr,
    OFFSET: tl.constexpr,
) -> None:
    """With n = x * scale and g = grad * weight: dx = scale * (g - n * mean(g * n)), dweight = the sum of grad * n."""
    program = tl.program_id(0)
    columns = tl.arange(0, BLOCK)[None, :]
    within = columns < CHANNELS
    dtype = x_ptr.dtype.element_ty
    weight = tl.load(weight_ptr + columns, mask=within, other=0.0).to(tl.float32)
    if OFFSET:
        weight = weight + 1.0
    total = tl.zeros((1, BLOCK), dtype=tl.float32)
    for turn in range(TURNS):
        rows = ((program * TURNS + turn) * ROWS + tl.arange(0, ROWS)[:, None]).to(tl.int64)
        inside = within & (rows < tokens)
        place = rows * CHANNELS + columns
        x = tl.load(x_ptr + place, mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
        scale = tl.rsqrt(tl.sum(x * x, axis=1, keep_dims=True) * (1.0 / CHANNELS) + eps)
        normed = x * scale
        seen = normed if OFFSET else normed.to(dtype).to(tl.float32)
        total += tl.sum(grad * seen, axis=0, keep_dims=True)
        weighed = grad * weight
        dx = scale * (weighed - normed * (tl.sum(weighed * normed, axis=1, keep_dims=True) * (1.0 / CHANNELS)))
        if ADD:
            dx += tl.load(more_ptr + place, mask=inside, other=0.0).to(tl.float32)
        tl.store(dx_ptr + place, dx.to(dtype), mask=inside)
    tl.store(partial_ptr + program * CHANNELS + columns, total, mask=within)
