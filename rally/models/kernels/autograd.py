"""Norms, gated activation and rotary embedding as autograd functions over the Triton kernels.

They round where the module rounds. Gradients are summed in fp32 and rounded once. Only inputs are kept for the backward
pass.
Shapes: T tokens, C channels, F features, H heads, D channels of a head.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.autograd import Function

from rally.models.kernels.activation import Activation, gated_backward
from rally.models.kernels.activation import gated as gated_forward
from rally.models.kernels.rms_norm import rms_norm as norm_forward
from rally.models.kernels.rms_norm import rms_norm_backward
from rally.models.kernels.rotary import rotate as rotate_forward


def rms_norm(x_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False) -> Tensor:
    return _Norm.apply(x_TC, weight_C, eps, offset)  # type: ignore[no-any-return]


def add_and_norm(
    x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, *, offset: bool = False
) -> tuple[Tensor, Tensor]:
    """The sum of both, and its norm."""
    return _AddNorm.apply(x_TC, residual_TC, weight_C, eps, offset)  # type: ignore[no-any-return]


def gated(gate_TF: Tensor, up_TF: Tensor, kind: Activation) -> Tensor:
    return _Gated.apply(gate_TF, up_TF, kind)  # type: ignore[no-any-return]


def rotate(x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
    return _Rotate.apply(x_THD, cos_TD, sin_TD)  # type: ignore[no-any-return]


class _Norm(Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, weight_C: Tensor, eps: float, offset: bool) -> Tensor:
        ctx.save_for_backward(x_TC, weight_C)
        ctx.eps, ctx.offset = eps, offset
        return norm_forward(x_TC, weight_C, eps, offset=offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, weight_C = ctx.saved_tensors
        (grad_TC,) = gradients
        dx_TC, dweight_C = rms_norm_backward(
            x_TC.contiguous(), weight_C, grad_TC.contiguous(), None, ctx.eps, offset=ctx.offset
        )
        return dx_TC, dweight_C, None, None


class _AddNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, residual_TC: Tensor, weight_C: Tensor, eps: float, offset: bool
    ) -> tuple[Tensor, Tensor]:
        sum_TC = x_TC + residual_TC
        ctx.save_for_backward(sum_TC, weight_C)
        ctx.eps, ctx.offset = eps, offset
        return sum_TC, norm_forward(sum_TC, weight_C, eps, offset=offset)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        sum_TC, weight_C = ctx.saved_tensors
        more_TC, grad_TC = gradients
        dsum_TC, dweight_C = rms_norm_backward(
            sum_TC, weight_C, grad_TC.contiguous(), more_TC.contiguous(), ctx.eps, offset=ctx.offset
        )
        return dsum_TC, dsum_TC, dweight_C, None, None


class _Gated(Function):
    @staticmethod
    def forward(ctx: Any, gate_TF: Tensor, up_TF: Tensor, kind: Activation) -> Tensor:
        ctx.save_for_backward(gate_TF, up_TF)
        ctx.kind = kind
        return gated_forward(gate_TF, up_TF, kind)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        gate_TF, up_TF = ctx.saved_tensors
        (grad_TF,) = gradients
        return (*gated_backward(gate_TF.contiguous(), up_TF.contiguous(), grad_TF.contiguous(), ctx.kind), None)


class _Rotate(Function):
    @staticmethod
    def forward(ctx: Any, x_THD: Tensor, cos_TD: Tensor, sin_TD: Tensor) -> Tensor:
        ctx.save_for_backward(cos_TD, sin_TD)
        return rotate_forward(x_THD, cos_TD, sin_TD)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        cos_TD, sin_TD = ctx.saved_tensors
        (grad_THD,) = gradients
        return rotate_forward(grad_THD.contiguous(), cos_TD, sin_TD, back=True), None, None
