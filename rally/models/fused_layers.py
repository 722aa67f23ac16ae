"""The rollout forward of known decoder families, in few kernels over the trainer's own weights.

Results and roundings equal those of the module; linear layers with adapters round as in the training forward (lora.py).
Projections that share an input run as one product over packed weights, and so do the first matrices of their adapters.
The module's parameters become views into the packed tensors, so there is one copy, which an in-place optimizer updates.

Shapes: T packed tokens, C hidden size, F width of the MLP, H, K, D as in attention.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rally.models.attention import Scores
from rally.models.decoder_families import (
    ACTIVATIONS,
    LayerParts,
    Norm,
    activation_name,
    dense,
    known,
    kv_shape,
    offset_norms,
    parts_of,
    rotary_of,
    through_module,
)
from rally.models.fp8 import Fp8Linears, Product
from rally.models.kernels.dispatch import Kernels
from rally.models.lm_head import head_logits
from rally.models.lora import add_adapted, plain_linear


class PagedReader(Protocol):
    """Attention over pages that already hold the step's keys and values."""

    def read(self, layer: int, q_THD: Tensor, scores: Scores) -> Tensor: ...

    def pool(self, layer: int) -> tuple[Tensor, Tensor]: ...


class Packed:
    """Linear layers with the same input as one product; their parameters become views into the packed weight. Uses the
    adapters that are enabled when it is made. With `fp8` the base layers multiply by their copies."""

    def __init__(self, layers: Sequence[nn.Module], fp8: Fp8Linears | None = None) -> None:
        plain = [one for layer in layers if (one := plain_linear(layer)) is not None]
        assert len(plain) == len(layers), "`fusable` must be checked first"
        bases, self.adapters = [one.base for one in plain], [one.adapter for one in plain]
        self.sizes = [base.out_features for base in bases]
        self.weight = self._pack([base.weight for base in bases])
        self.bias = self._pack([base.bias for base in bases]) if bases[0].bias is not None else None
        self.ranks = [0 if adapter is None else len(adapter.a_RC) for adapter in self.adapters]
        inner = [adapter.a_RC for adapter in self.adapters if adapter is not None]
        self.inner = self._pack(inner) if inner else None
        self.fp8, self.copy = fp8, None if fp8 is None else fp8.packed(bases)

    @staticmethod
    def _pack(parameters: Sequence[Tensor]) -> Tensor:
        if _is_packed(parameters):
            first = parameters[0].data
            return first.as_strided((sum(len(p) for p in parameters), *first.shape[1:]), first.stride())
        whole = torch.cat([p.data for p in parameters])
        for parameter, view in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
        return whole

    def __call__(self, x_TC: Tensor, product: Callable[..., Tensor]) -> Tensor:
        """The concatenated outputs of the layers; `product` computes the base layers."""
        if self.fp8 is not None and self.copy is not None and self.fp8.active:
            y_TF = self.fp8.product(x_TC, self.copy, self.bias)
        else:
            y_TF = product(x_TC, self.weight, self.bias)
        if self.inner is not None:
            parts = zip(y_TF.split(self.sizes, 1), F.linear(x_TC, self.inner).split(self.ranks, 1), strict=True)
            for (part_TF, h_TR), adapter in zip(parts, self.adapters, strict=True):
                if adapter is not None:
                    add_adapted(part_TF, h_TR, adapter.b_FR, adapter.scale)
        return y_TF


def _is_packed(parameters: Sequence[Tensor]) -> bool:
    """Whether they are already adjacent in one storage, because another FusedDecoder packed them."""
    sizes = [p.numel() for p in parameters]
    places = itertools.accumulate([parameters[0].storage_offset(), *sizes[:-1]])
    memory = {p.untyped_storage().data_ptr() for p in parameters}
    return len(memory) == 1 and all(
        p.is_contiguous() and p.storage_offset() == place for p, place in zip(parameters, places, strict=True)
    )


@dataclass(frozen=True)
class _Layer:
    """A layer with its packed projections."""

    parts: LayerParts
    qkv: Packed
    out: Packed
    gate_up: Packed | None  # None: a mixture of experts, which goes through its module
    down: Packed | None


class FusedDecoder:
    """The forward of one `fusable` module. With `invariant` it is batch-invariant: the result of a token depends, to
    the last bit, only on its own history. With `fp8` the projections multiply by these copies."""

    def __init__(
        self, model: PreTrainedModel, kernels: Kernels, *, invariant: bool = False, fp8: Fp8Linears | None = None
    ) -> None:
        config = model.config.get_text_config()
        self.kernels = kernels
        self.linear = kernels.invariant_linear if invariant else F.linear
        self.model, self.invariant = model, invariant
        self.base = cast(Any, model.base_model)
        self.heads = config.num_attention_heads
        _, self.kv_heads, self.head_dim = kv_shape(model)
        self.eps: float = config.rms_norm_eps
        self.offset = offset_norms(model)
        self.activation = ACTIVATIONS[activation_name(model)]
        self.layers = [_layer(module, model, fp8) for module in self.base.layers]

    def __call__(self, ids_T: Tensor, positions_T: Tensor, places_T: Tensor, attention: PagedReader) -> Tensor:
        """Last hidden states [T, C], normed."""
        residual = self.base.embed_tokens(ids_T)
        rotary = rotary_of(self.base, residual, positions_T, {layer.parts.kind for layer in self.layers})
        x = self._norm(residual, self.layers[0].parts.input_norm)
        following = [layer.parts.input_norm for layer in self.layers[1:]] + [self.base.norm]
        for number, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            parts = layer.parts
            mixed = self._attention(number, layer, x, rotary[parts.kind], places_T, attention)
            x = self._add_norm(self._norm(mixed, parts.attention_norm), residual, parts.middle_norm)
            x = self._add_norm(self._norm(self._mlp(layer, x), parts.mlp_norm), residual, next_norm)
        return x

    def products(self) -> dict[str, Product]:
        """The linear layers, for comparisons."""
        return {
            f"layers.{number}.{name}": Product(packed.weight.shape[1], partial(packed, product=self.linear))
            for number, layer in enumerate(self.layers)
            for name in ("qkv", "out", "gate_up", "down")
            if (packed := getattr(layer, name)) is not None
        }

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """float32 logits [T, V]."""
        product = partial(self.kernels.invariant_linear, out_dtype=torch.float32) if self.invariant else None
        return head_logits(self.model, hidden_TC, product).float()

    def _attention(
        self,
        number: int,
        layer: _Layer,
        x_TC: Tensor,
        rotary: tuple[Tensor, Tensor],
        places_T: Tensor,
        attention: PagedReader,
    ) -> Tensor:
        tokens, d, parts = x_TC.shape[0], self.head_dim, layer.parts
        q, k, v = (
            layer.qkv(x_TC, self.linear).view(tokens, -1, d).split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        )
        turned = torch.empty((tokens, self.heads, d), dtype=q.dtype, device=q.device)
        self.kernels.rotate_and_store(
            q,
            k,
            v,
            *rotary,
            places_T,
            *attention.pool(number),
            turned,
            q_weight=None if parts.q_norm is None else parts.q_norm.weight,
            k_weight=None if parts.k_norm is None else parts.k_norm.weight,
            eps=self.eps,
            offset=self.offset,
        )
        mixed = attention.read(number, turned, Scores(parts.scale, parts.window))
        return layer.out(mixed.flatten(1), self.linear)

    def _mlp(self, layer: _Layer, x_TC: Tensor) -> Tensor:
        if layer.gate_up is None or layer.down is None:
            return through_module(layer.parts.mlp, x_TC)
        gate, up = layer.gate_up(x_TC, self.linear).split(layer.gate_up.sizes, dim=1)
        return layer.down(self.kernels.gated(gate, up, self.activation), self.linear)

    def _norm(self, x_TC: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x_TC
        return self.kernels.rms_norm(x_TC, norm.weight, self.eps, offset=self.offset)

    def _add_norm(self, x_TC: Tensor, residual_TC: Tensor, norm: Norm) -> Tensor:
        return self.kernels.add_rms_norm(x_TC, residual_TC, norm.weight, self.eps, offset=self.offset)


def _layer(module: Any, model: PreTrainedModel, fp8: Fp8Linears | None) -> _Layer:
    parts = parts_of(module, model)
    attention, mlp = parts.attention, parts.mlp
    return _Layer(
        parts,
        qkv=Packed([attention.q_proj, attention.k_proj, attention.v_proj], fp8),
        out=Packed([attention.o_proj], fp8),
        gate_up=Packed([mlp.gate_proj, mlp.up_proj], fp8) if dense(mlp) else None,
        down=Packed([mlp.down_proj], fp8) if dense(mlp) else None,
    )


def fusable(model: PreTrainedModel, *, invariant: bool = False) -> bool:
    """Whether FusedDecoder supports the model: a known family whose linear layers are plain, with or without adapters
    (not quantised, say). An `invariant` forward supports no adapters, not even on the LM head."""
    if not known(model) or (invariant and getattr(model, "_hf_peft_config_loaded", False)):
        return False
    layers: list[Any] = list(cast(Any, model.base_model).layers)
    if invariant and not all(dense(layer.mlp) for layer in layers):
        return False
    attention, mlp = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
    modules = [getattr(layer.self_attn, name, None) for layer in layers for name in attention]
    modules += [getattr(layer.mlp, name) for layer in layers if dense(layer.mlp) for name in mlp]
    linears = [None if module is None else plain_linear(module) for module in modules]
    same = {(p.dtype, p.device) for plain in linears if plain is not None for p in plain.base.parameters()}
    return None not in linears and len(same) == 1
