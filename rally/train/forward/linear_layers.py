"""Linear layers of the training forward that share an input, each plain or with a plain LoRA adapter.

The gradients of the shared input are summed inside the matrix products, which costs no pass over memory. Only the
input, if one of the layers learns, and the inner values of adapters are kept for the backward pass. The modules' own
forwards are the specification.

Shapes: T tokens, C features in, F features out, R rank.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

from rally.models.lora import PlainLinear, add_adapted, plain_linear
from rally.platforms import has_kernels


def linear_layers(layers: Sequence[nn.Module], x_TC: Tensor) -> list[Tensor]:
    """The outputs of the layers. Layers that are not plain are computed by their modules, and so are adapters over a
    base that is itself trained."""
    plain = [plain_linear(layer) for layer in layers]
    if not all(_supported(one) for one in plain):
        return [layer(x_TC) for layer in layers]
    scales, tensors = [], []
    for one in plain:
        assert one is not None
        base, adapter = one
        scales.append(1.0 if adapter is None else adapter.scale)
        tensors += [base.weight, base.bias, *((None, None) if adapter is None else adapter[:2])]
    return list(_Linears.apply(x_TC, scales, *tensors))


def _supported(plain: PlainLinear | None) -> bool:
    if plain is None:
        return False
    return plain.adapter is None or not any(parameter.requires_grad for parameter in plain.base.parameters())


class _LinearLayer(NamedTuple):
    weight_FC: Tensor
    bias_F: Tensor | None
    a_RC: Tensor | None
    b_FR: Tensor | None


def _grouped(tensors: Sequence[Any]) -> list[_LinearLayer]:
    return [_LinearLayer(*tensors[i : i + 4]) for i in range(0, len(tensors), 4)]


class _Linears(Function):
    @staticmethod
    def forward(ctx: Any, x_TC: Tensor, scales: Sequence[float], *tensors: Tensor | None) -> tuple[Tensor, ...]:
        outputs, inner = [], []
        for layer, scale in zip(_grouped(tensors), scales, strict=True):
            y_TF, h_TR = F.linear(x_TC, layer.weight_FC, layer.bias_F), None
            if layer.a_RC is not None and layer.b_FR is not None:
                h_TR = F.linear(x_TC, layer.a_RC)
                add_adapted(y_TF, h_TR, layer.b_FR, scale)
            outputs.append(y_TF)
            inner.append(h_TR)
        learns = any(ctx.needs_input_grad[2:])  # a frozen layer needs no input for the gradient of its input
        ctx.save_for_backward(x_TC if learns else None, *tensors, *inner)
        ctx.scales = scales
        return tuple(outputs)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, *saved = ctx.saved_tensors
        count = len(ctx.scales)
        layers, inner = _grouped(saved[: 4 * count]), saved[4 * count :]
        dx_TC: Tensor | None = None
        found: list[Tensor | None] = []
        for number, (layer, h_TR, scale, dy_TF) in enumerate(zip(layers, inner, ctx.scales, gradients, strict=True)):
            needs = ctx.needs_input_grad[2 + 4 * number :]
            if ctx.needs_input_grad[0]:
                dx_TC = dy_TF @ layer.weight_FC if dx_TC is None else dx_TC.addmm_(dy_TF, layer.weight_FC)
            found.append(dy_TF.t() @ x_TC if needs[0] else None)
            found.append(_column_sums(dy_TF) if needs[1] else None)
            if layer.a_RC is None or layer.b_FR is None:
                found += [None, None]
                continue
            g_TR = dy_TF @ layer.b_FR
            if dx_TC is not None:
                dx_TC.addmm_(g_TR, layer.a_RC, alpha=scale)
            found.append(torch.addmm(layer.a_RC, g_TR.t(), x_TC, beta=0, alpha=scale) if needs[2] else None)
            found.append(torch.addmm(layer.b_FR, dy_TF.t(), h_TR, beta=0, alpha=scale) if needs[3] else None)
        return dx_TC, None, *found


def _column_sums(x_TF: Tensor) -> Tensor:
    """The sum over tokens. On a GPU a product with ones is faster than a reduction; both add in float32."""
    if has_kernels(x_TF.device) and x_TF.dtype in (torch.bfloat16, torch.float16):
        return (x_TF.new_ones((8, len(x_TF))) @ x_TF)[0]
    return x_TF.sum(0)
