"""The training forward of the families we know, with one kernel where the module has five: the same numbers, sooner.

Linear layers are the module's own, those with a plain LoRA adapter as the three products of adapters.py. What lies
between them (norms, rotations, gated activations) keeps its inputs alone for the backward pass. Anything else, and
anything without a GPU, goes through the module's own forward, which says what this one must compute.

Shapes: T packed tokens, C hidden size, H query heads, K key/value heads, D head size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from rally.engines.embedded.adapters import linear
from rally.engines.embedded.attention import Scores, packed_hidden
from rally.engines.embedded.families import (
    ACTIVATIONS,
    LayerParts,
    Norm,
    activation_name,
    known,
    offset_norms,
    parts_of,
    rotary_of,
)
from rally.engines.embedded.kernels import has_triton
from rally.engines.embedded.memory import kv_shape
from rally.engines.embedded.vision import Seen, image_features
from rally.train.packed import PackedAttention, fits_one_call
from rally.train.packing import PackedImages, PackedRows
from rally.train.ranks import ranks_of


class Ops(NamedTuple):
    """Signatures and meanings are those of `rally.kernels.gradients`."""

    rms_norm: Callable[..., Tensor]
    add_and_norm: Callable[..., tuple[Tensor, Tensor]]
    gated: Callable[..., Tensor]
    rotate: Callable[..., Tensor]


def hidden_states(model: PreTrainedModel, packed: PackedRows) -> Tensor:
    """Last hidden states [T, C] of the packed tokens."""
    attention = PackedAttention(packed)
    if _gains(model):
        return fused_hidden(model, packed.ids_T, packed.positions_T, attention, compiled_ops())
    positions = packed.positions_T if packed.positions_3T is None else packed.positions_3T
    return packed_hidden(model, packed.ids_T, positions, attention, _seen(model, packed.images))


def _seen(model: PreTrainedModel, images: PackedImages | None) -> Seen | None:
    """The features of all images by one run of the tower; what stands several times gets several gradients."""
    if images is None:
        return None
    return Seen(images.at_V, image_features(model, images.images).rows(images.feature_V))


def compiled_ops() -> Ops:
    from rally.kernels import gradients

    return Ops(gradients.rms_norm, gradients.add_and_norm, gradients.gated, gradients.rotate)


def _gains(model: PreTrainedModel) -> bool:
    size = torch.empty((0, 1, kv_shape(model).size), dtype=model.dtype, device=model.device)
    whole = ranks_of(model).count == 1  # else a layer's weights are there only while the layer itself is called
    return whole and has_triton() and fits_one_call(size) and known(model)


def fused_hidden(
    model: PreTrainedModel, ids_T: Tensor, positions_T: Tensor, attention: PackedAttention, ops: Ops
) -> Tensor:
    base = cast(Any, model.base_model)
    layers = [_FusedLayer(parts_of(module, model), model, ops) for module in base.layers]
    stream_TC = base.embed_tokens(ids_T)
    rotary = rotary_of(base, stream_TC, positions_T, {layer.parts.kind for layer in layers})
    for number, layer in enumerate(layers):
        arguments = (number, stream_TC, *rotary[layer.parts.kind], attention)
        again = base.is_gradient_checkpointing and base.training
        stream_TC = checkpoint(layer, *arguments, use_reentrant=False) if again else layer(*arguments)
    return ops.rms_norm(stream_TC, base.norm.weight, layers[0].eps, offset=layers[0].offset)


class _FusedLayer:
    """One decoder layer as a function of the residual stream."""

    def __init__(self, parts: LayerParts, model: PreTrainedModel, ops: Ops) -> None:
        self.parts, self.ops = parts, ops
        self.eps: float = model.config.get_text_config().rms_norm_eps
        self.offset = offset_norms(model)
        self.activation = ACTIVATIONS[activation_name(model)]
        self.size = kv_shape(model).size

    def __call__(
        self, number: int, stream_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: PackedAttention
    ) -> Tensor:
        parts = self.parts
        x_TC = self._norm(stream_TC, parts.input_norm)
        mixed_TC = self._norm(self._attend(number, x_TC, cos_TD, sin_TD, attention), parts.attention_norm)
        stream_TC, x_TC = self.ops.add_and_norm(
            mixed_TC, stream_TC, parts.middle_norm.weight, self.eps, offset=self.offset
        )
        mlp = parts.mlp
        product = self.ops.gated(linear(mlp.gate_proj, x_TC), linear(mlp.up_proj, x_TC), self.activation)
        return stream_TC + self._norm(linear(mlp.down_proj, product), parts.mlp_norm)

    def _attend(self, number: int, x_TC: Tensor, cos_TD: Tensor, sin_TD: Tensor, attention: PackedAttention) -> Tensor:
        own, parts = self.parts.attention, self.parts
        q_THD, k_TKD, v_TKD = (
            linear(layer, x_TC).unflatten(1, (-1, self.size)) for layer in (own.q_proj, own.k_proj, own.v_proj)
        )
        q_THD = self.ops.rotate(self._head_norm(q_THD, parts.q_norm), cos_TD, sin_TD)
        k_TKD = self.ops.rotate(self._head_norm(k_TKD, parts.k_norm), cos_TD, sin_TD)
        mixed_THD = attention.attend(number, q_THD, k_TKD, v_TKD, Scores(parts.scale, parts.window))
        return linear(own.o_proj, mixed_THD.flatten(1))

    def _norm(self, x_TC: Tensor, norm: Norm | None) -> Tensor:
        return x_TC if norm is None else self.ops.rms_norm(x_TC, norm.weight, self.eps, offset=self.offset)

    def _head_norm(self, x_THD: Tensor, norm: Norm | None) -> Tensor:
        return x_THD if norm is None else self._norm(x_THD.flatten(0, 1), norm).view_as(x_THD)
