"""Gated activation kernels (SiLU, tanh GELU). They round twice, as transformers does: after activation and product.

Shapes: T tokens, F features.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

Activation = Literal["silu", "gelu_tanh"]

_BLOCK = 1024


def gated(gate_TF: Tensor, up_TF: Tensor, kind: Activation) -> Tensor:
    """activation(gate) * up; the two may be the halves of one tensor."""
    tokens, features = gate_TF.shape
    assert kind in ("silu", "gelu_tanh")
    assert gate_TF.shape == up_TF.shape and gate_TF.dtype == up_TF.dtype
    assert gate_TF.stride(1) == up_TF.stride(1) == 1
    out_TF = torch.empty((tokens, features), dtype=gate_TF.dtype, device=gate_TF.device)
    _gated_kernel[(tokens, triton.cdiv(features, _BLOCK))](
        gate_TF,
        up_TF,
        out_TF,
        gate_TF.stride(0),
        up_TF.stride(0),
        features,
        SILU=kind == "silu",
        BLOCK=_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out_TF


def gated_backward(gate_TF: Tensor, up_TF: Tensor, grad_TF: Tensor, kind: Activation) -> tuple[Tensor, Tensor]:
    """The gradients of `gated` with respect to `gate` and `up`."""
    tokens, features = gate_TF.shape
    assert kind in ("silu", "gelu_tanh")
    assert all(t.is_contiguous() and t.dtype == gate_TF.dtype for t in (gate_TF, up_TF, grad_TF))
    dgate_TF, dup_TF = torch.empty_like(gate_TF), torch.empty_like(up_TF)
    _gated_backward_kernel[(triton.cdiv(tokens * features, _BLOCK),)](
        gate_TF,
        up_TF,
        grad_TF,
        dgate_TF,
        dup_TF,
        tokens * features,
        SILU=kind == "silu",
        BLOCK=_BLOCK,
        num_warps=4,
    )
    return dgate_TF, dup_TF


@triton.jit
def _gated_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    out_ptr: tl.tensor,
    gate_stride: int,
    up_stride: int,
    features: int,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < features
    gate = tl.load(gate_ptr + row * gate_stride + columns, mask=inside, other=0.0)
    up = tl.load(up_ptr + row * up_stride + columns, mask=inside, other=0.0)
    x = gate.to(tl.float32)
    active = _silu(x) if SILU else _gelu_tanh(x)
    out = active.to(gate.dtype).to(tl.float32) * up.to(tl.float32)
    tl.store(out_ptr + row * features + columns, out.to(gate.dtype), mask=inside)


@triton.jit
def _silu(x: tl.tensor) -> tl.tensor:
    return x / (1.0 + tl.exp(-x))


@triton.jit
def _gelu_tanh(x: tl.tensor) -> tl.tensor:
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))  # sqrt(2 / pi)
    # From |inner|, because 1 + tanh cancels in the negative tail and the rounding of tanh itself shows there.
    size = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(inner)) + 1.0)
    return 0.5 * x * (1.0 + tl.where(inner < 0, -size, size))


@triton.jit
def _gated_backward_kernel(
    gate_ptr: tl.tensor,
    up_ptr: tl.tensor,
    grad_ptr: tl.tensor,
    dgate_ptr: tl.tensor,
    dup_ptr: tl.tensor,
    elements: int,
    SILU: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    inside = place < elements
    gate = tl.load(gate_ptr + place, mask=inside, other=0.0)
    up = tl.load(up_ptr + place, mask=inside, other=0.0).to(tl.float32)
    grad = tl.load(grad_ptr + place, mask=inside, other=0.0).to(tl.float32)
    x = gate.to(tl.float32)
    active = _silu(x) if SILU else _gelu_tanh(x)
    slope = _silu_slope(x) if SILU else _gelu_tanh_slope(x)
    tl.store(dup_ptr + place, (grad * active.to(gate.dtype).to(tl.float32)).to(gate.dtype), mask=inside)
    tl.store(dgate_ptr + place, ((grad * up).to(gate.dtype).to(tl.float32) * slope).to(gate.dtype), mask=inside)


@triton.jit
def _silu_slope(x: tl.tensor) -> tl.tensor:
    share = 1.0 / (1.0 + tl.exp(-x))
    return share * (1.0 + x * (1.0 - share))


@triton.jit
def _gelu_tanh_slope(x: tl.tensor) -> tl.tensor:
    inner = 0.7978845608028654 * (x + 0.044715 * (x * x * x))
    size = 1.0 - 2.0 / (tl.exp(2.0 * tl.abs(inner)) + 1.0)
    bent = tl.where(inner < 0, -size, size)
    slope = 0.7978845608028654 * (1.0 + 3.0 * 0.044715 * (x * x))
    return 0.5 * (1.0 + bent) + 0.5 * x * (1.0 - bent * bent) * slope
