"""A linear layer with a LoRA adapter is three products and no further pass, in the rollout and in training alike.

    y = x W^T + bias + scale (x A^T) B^T

Both compute x W^T + bias, then x A^T, then add the last product to the first in place, so that they round at the same
places. What PEFT's layers compute with is read in `plain_linear` alone. Layers that are more than this
(dropout while training, DoRA, several adapters, merged ones, a base that is not a linear layer) are called as they are,
and PEFT's own forward says what this one must compute.

Shapes: T tokens, C channels in, F features out, R rank.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd import Function

NAME = "default"  # what PEFT calls the only adapter of a module


class Adapter(NamedTuple):
    a_RC: Tensor
    b_FR: Tensor
    scale: float


class PlainLinear(NamedTuple):
    """A linear layer and its adapter, if it has one that is switched on."""

    base: nn.Linear
    adapter: Adapter | None


def plain_linear(layer: nn.Module) -> PlainLinear | None:
    """What the layer computes with; None where it does more than a linear layer with one plain adapter does."""
    if type(layer) is nn.Linear:
        return PlainLinear(layer, None)
    if not hasattr(layer, "lora_A"):
        return None
    from peft.tuners.lora import Linear  # an extra, which must be there if a layer is PEFT's

    if type(layer) is not Linear or type(layer.base_layer) is not nn.Linear or layer.merged:
        return None
    if layer.disable_adapters:
        return PlainLinear(layer.base_layer, None)
    return PlainLinear(layer.base_layer, _adapter(layer)) if _is_plain(layer) else None


def _is_plain(layer: Any) -> bool:
    """Whether its one active adapter adds scale (x A^T) B^T in the dtype of the base, and nothing else."""
    if layer.active_adapters != [NAME] or NAME not in layer.lora_A:
        return False
    weights = (layer.base_layer.weight, layer.lora_A[NAME].weight, layer.lora_B[NAME].weight)
    drops = layer.training and not isinstance(layer.lora_dropout[NAME], nn.Identity)
    more = drops or layer.fan_in_fan_out or layer.lora_variant or layer.lora_B[NAME].bias is not None
    return not more and len({(weight.dtype, weight.device) for weight in weights}) == 1


def _adapter(layer: Any) -> Adapter:
    return Adapter(layer.lora_A[NAME].weight, layer.lora_B[NAME].weight, layer.scaling[NAME])


def switches(model: nn.Module) -> list[tuple[bool, bool]]:
    """Of each adapted layer, whether its adapters are off, and whether they are merged into its weight."""
    return [(m.disable_adapters, m.merged) for m in model.modules() if hasattr(m, "lora_A")]  # type: ignore[misc]


def linear(layer: nn.Module, x_TC: Tensor) -> Tensor:
    """What the layer gives, with gradients; a base that is trained itself is its module's business."""
    plain = plain_linear(layer)
    if plain is None or any(parameter.requires_grad for parameter in plain.base.parameters()):
        return layer(x_TC)  # type: ignore[no-any-return]
    base, adapter = plain
    if adapter is None:
        return base(x_TC)  # type: ignore[no-any-return]
    return _Adapted.apply(x_TC, base.weight, base.bias, *adapter)  # type: ignore[no-any-return]


def add_adapted(y_TF: Tensor, h_TR: Tensor, b_FR: Tensor, scale: float) -> None:
    """Add what an adapter makes of h = x A^T to what the base made of x, where it lies."""
    y_TF.addmm_(h_TR, b_FR.t(), alpha=scale)


class _Adapted(Function):
    """Nothing is kept for the backward pass but x and h."""

    @staticmethod
    def forward(
        ctx: Any, x_TC: Tensor, weight_FC: Tensor, bias_F: Tensor | None, a_RC: Tensor, b_FR: Tensor, scale: float
    ) -> Tensor:
        y_TF, h_TR = F.linear(x_TC, weight_FC, bias_F), F.linear(x_TC, a_RC)
        add_adapted(y_TF, h_TR, b_FR, scale)
        ctx.save_for_backward(x_TC, h_TR, weight_FC, a_RC, b_FR)
        ctx.scale = scale
        return y_TF

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        x_TC, h_TR, weight_FC, a_RC, b_FR = ctx.saved_tensors
        (dy_TF,) = gradients
        g_TR = dy_TF @ b_FR
        dx_TC = (dy_TF @ weight_FC).addmm_(g_TR, a_RC, alpha=ctx.scale) if ctx.needs_input_grad[0] else None
        da_RC = torch.addmm(a_RC, g_TR.t(), x_TC, beta=0, alpha=ctx.scale)
        db_FR = torch.addmm(b_FR, dy_TF.t(), h_TR, beta=0, alpha=ctx.scale)
        return dx_TC, None, None, da_RC, db_FR, None
