"""Quantisation to float8_e4m3fn, one scale per row, and the product of two such matrices.

One program reads one row once: its largest absolute value, its scale, its 8-bit numbers. The rows are tokens of an
activation or output features of a weight. The product is torch's, with both kinds of scales.
Shapes: T tokens, R rows, C channels in, F features out.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from rally.models.kernels.reference import FP8_MAX, FP8_SMALLEST


def quantize_rows(x_RC: Tensor, out_RC: Tensor, scale_R: Tensor) -> None:
    rows, channels = x_RC.shape
    assert out_RC.shape == x_RC.shape and scale_R.shape == (rows,)
    assert out_RC.dtype == torch.float8_e4m3fn and scale_R.dtype == torch.float32
    assert x_RC.stride(1) == out_RC.stride(1) == scale_R.stride(0) == 1
    if rows == 0:
        return
    block = triton.next_power_of_2(channels)
    _quantize_rows_kernel[(rows,)](
        x_RC,
        out_RC,
        scale_R,
        x_RC.stride(0),
        out_RC.stride(0),
        CHANNELS=channels,
        BLOCK=block,
        LARGEST=FP8_MAX,
        SMALLEST=FP8_SMALLEST,
        num_warps=min(16, max(1, block // 256)),
        enable_fp_fusion=False,
    )


def fp8_linear(
    x_TC: Tensor,
    x_scale_T: Tensor,
    weight_FC: Tensor,
    weight_scale_F: Tensor,
    bias_F: Tensor | None,
    out_dtype: torch.dtype,
) -> Tensor:
    """Needs C and F that are multiples of 16, and bfloat16. Sums may be kept in fewer bits than float32, as other
    engines do: exact sums are slower, and what the quantisation itself costs is far more."""
    assert out_dtype == torch.bfloat16 and (bias_F is None or bias_F.dtype == out_dtype)
    return torch._scaled_mm(
        x_TC,
        weight_FC.t(),
        scale_a=x_scale_T[:, None],
        scale_b=weight_scale_F[None, :],
        bias=bias_F,
        out_dtype=out_dtype,
        use_fast_accum=True,
    )


@triton.jit
def _quantize_rows_kernel(
    x_ptr: tl.tensor,
    out_ptr: tl.tensor,
    scale_ptr: tl.tensor,
    x_stride: int,
    out_stride: int,
    CHANNELS: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    SMALLEST: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < CHANNELS
    x = tl.load(x_ptr + row * x_stride + columns, mask=inside, other=0.0).to(tl.float32)
    most = tl.maximum(tl.max(tl.abs(x), axis=0), SMALLEST)
    tl.store(scale_ptr + row, tl.div_rn(most, LARGEST))
    inverse = tl.div_rn(LARGEST, most)
    tl.store(out_ptr + row * out_stride + columns, (x * inverse).to(out_ptr.dtype.element_ty), mask=inside)
