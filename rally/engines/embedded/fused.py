"""The decoder's forward as a short list of kernels over the trainer's own weights, for the families we know.

It computes what the module computes and rounds where it rounds. Projections that share an input run as one product
over packed weights; the module's parameters become views into the packed tensor, so there is one copy of them, and an
optimizer that writes in place writes here.

Shapes: T packed tokens, C hidden size, F width of the MLP, H, K, D as in attention.py.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import PreTrainedModel

from rally.engines.embedded.attention import head_logits
from rally.engines.embedded.kernels import Kernels
from rally.engines.embedded.memory import kv_shape
from rally.engines.embedded.support import power_of_two

FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
ACTIVATIONS = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Norm(Protocol):
    weight: nn.Parameter


class PagedReader(Protocol):
    """Attention over pages that already hold the step's keys and values."""

    def read(self, layer: int, q_THD: Tensor, scale: float, window: int | None) -> Tensor: ...

    def pool(self, layer: int) -> tuple[Tensor, Tensor]: ...


class Packed:
    """Linear layers of one input as one product; their parameters are views into it."""

    def __init__(self, layers: list[nn.Linear]) -> None:
        self.sizes = [layer.out_features for layer in layers]
        self.weight = self._pack([layer.weight for layer in layers])
        self.bias = self._pack([layer.bias for layer in layers]) if layers[0].bias is not None else None

    @staticmethod
    def _pack(parameters: Sequence[Tensor]) -> Tensor:
        if _is_packed(parameters):
            first = parameters[0].data
            return first.as_strided((sum(len(p) for p in parameters), *first.shape[1:]), first.stride())
        whole = torch.cat([p.data for p in parameters])
        for parameter, view in zip(parameters, whole.split([len(p) for p in parameters]), strict=True):
            parameter.data = view
        return whole

    @property
    def parts(self) -> tuple[Tensor, Tensor | None]:
        return self.weight, self.bias


def _is_packed(parameters: Sequence[Tensor]) -> bool:
    """Whether they already lie one behind the other in one piece of memory, as another decoder of the module left
    them."""
    sizes = [p.numel() for p in parameters]
    places = itertools.accumulate([parameters[0].storage_offset(), *sizes[:-1]])
    memory = {p.untyped_storage().data_ptr() for p in parameters}
    return len(memory) == 1 and all(
        p.is_contiguous() and p.storage_offset() == place for p, place in zip(parameters, places, strict=True)
    )


@dataclass(frozen=True)
class _Layer:
    """What one decoder layer is made of."""

    qkv: Packed
    gate_up: Packed
    o: nn.Linear
    down: nn.Linear
    input_norm: Norm
    middle_norm: Norm  # of the residual, before the MLP
    attention_norm: Norm | None  # of what attention gives, before it is added (Gemma)
    mlp_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    scale: float
    window: int | None
    kind: str | None  # the layer's rotary embedding, where there are several


class FusedDecoder:
    """The forward of one module, which must be `fusable`. With `invariant`, what a token gives depends on its history
    alone, to the last bit, and not on what else is computed beside it."""

    def __init__(self, model: PreTrainedModel, kernels: Kernels, *, invariant: bool = False) -> None:
        config = model.config.get_text_config()
        self.kernels = kernels
        self.linear = kernels.invariant_linear if invariant else F.linear
        self.model, self.invariant = model, invariant
        self.base = cast(Any, model.base_model)
        self.heads = config.num_attention_heads
        _, self.kv_heads, self.head_dim = kv_shape(model)
        self.eps: float = config.rms_norm_eps
        self.offset = config.model_type.startswith("gemma")
        self.activation = ACTIVATIONS[_activation(model)]
        self.layers = [_layer(module, model) for module in self.base.layers]

    def __call__(self, ids_T: Tensor, positions_T: Tensor, places_T: Tensor, attention: PagedReader) -> Tensor:
        """Last hidden states [T, C], normed."""
        residual = self.base.embed_tokens(ids_T)
        kinds = {layer.kind for layer in self.layers}
        rotary = {kind: self._rotary(residual, positions_T, kind) for kind in kinds}
        x = self._norm(residual, self.layers[0].input_norm)
        following = [layer.input_norm for layer in self.layers[1:]] + [self.base.norm]
        for number, (layer, next_norm) in enumerate(zip(self.layers, following, strict=True)):
            mixed = self._attention(number, layer, x, rotary[layer.kind], places_T, attention)
            x = self._add_norm(self._norm(mixed, layer.attention_norm), residual, layer.middle_norm)
            x = self._add_norm(self._norm(self._mlp(layer, x), layer.mlp_norm), residual, next_norm)
        return x

    def logits(self, hidden_TC: Tensor) -> Tensor:
        """float32 logits [T, V]."""
        product = partial(self.kernels.invariant_linear, out_dtype=torch.float32) if self.invariant else None
        return head_logits(self.model, hidden_TC, product).float()

    def _rotary(self, x_TC: Tensor, positions_T: Tensor, kind: str | None) -> tuple[Tensor, Tensor]:
        named = {} if kind is None else {"layer_type": kind}
        cos, sin = self.base.rotary_emb(x_TC.unsqueeze(0), positions_T.unsqueeze(0), **named)
        return cos[0], sin[0]

    def _attention(
        self,
        number: int,
        layer: _Layer,
        x_TC: Tensor,
        rotary: tuple[Tensor, Tensor],
        places_T: Tensor,
        attention: PagedReader,
    ) -> Tensor:
        tokens, d = x_TC.shape[0], self.head_dim
        q, k, v = (
            self.linear(x_TC, *layer.qkv.parts)
            .view(tokens, -1, d)
            .split([self.heads, self.kv_heads, self.kv_heads], dim=1)
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
            q_weight=None if layer.q_norm is None else layer.q_norm.weight,
            k_weight=None if layer.k_norm is None else layer.k_norm.weight,
            eps=self.eps,
            offset=self.offset,
        )
        mixed = attention.read(number, turned, layer.scale, layer.window)
        return self.linear(mixed.flatten(1), *_parts(layer.o))

    def _mlp(self, layer: _Layer, x_TC: Tensor) -> Tensor:
        gate, up = self.linear(x_TC, *layer.gate_up.parts).split(layer.gate_up.sizes, dim=1)
        return self.linear(self.kernels.gated(gate, up, self.activation), *_parts(layer.down))

    def _norm(self, x_TC: Tensor, norm: Norm | None) -> Tensor:
        if norm is None:
            return x_TC
        return self.kernels.rms_norm(x_TC, norm.weight, self.eps, offset=self.offset)

    def _add_norm(self, x_TC: Tensor, residual_TC: Tensor, norm: Norm) -> Tensor:
        return self.kernels.add_rms_norm(x_TC, residual_TC, norm.weight, self.eps, offset=self.offset)


def _parts(linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    return linear.weight, linear.bias


def _activation(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def _layer(module: Any, model: PreTrainedModel) -> _Layer:
    attention, mlp, config = module.self_attn, module.mlp, model.config.get_text_config()
    gemma = config.model_type.startswith("gemma")
    mistral_window = config.sliding_window if config.model_type == "mistral" else None
    return _Layer(
        qkv=Packed([attention.q_proj, attention.k_proj, attention.v_proj]),
        gate_up=Packed([mlp.gate_proj, mlp.up_proj]),
        o=attention.o_proj,
        down=mlp.down_proj,
        input_norm=module.input_layernorm,
        middle_norm=module.pre_feedforward_layernorm if gemma else module.post_attention_layernorm,
        attention_norm=module.post_attention_layernorm if gemma else None,
        mlp_norm=module.post_feedforward_layernorm if gemma else None,
        q_norm=getattr(attention, "q_norm", None),
        k_norm=getattr(attention, "k_norm", None),
        scale=attention.scaling,
        window=getattr(attention, "sliding_window", mistral_window),
        kind=config.layer_types[attention.layer_idx] if gemma else None,
    )


def fusable(model: PreTrainedModel) -> bool:
    """Whether we know this family, and nobody has put other modules into it (adapters, quantised layers)."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES or _activation(model) not in ACTIVATIONS:
        return False
    if getattr(model, "_hf_peft_config_loaded", False):  # also where only the head or the embeddings are adapted
        return False
    if not power_of_two(kv_shape(model).size) or getattr(config, "partial_rotary_factor", 1.0) != 1.0:
        return False
    names = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
    linears = [m for name, m in model.named_modules() if name.rsplit(".", 1)[-1] in names]
    same = {(type(m), p.dtype, p.device) for m in linears for p in m.parameters()}
    return len(linears) == len(names) * config.num_hidden_layers and len(same) == 1 and same.pop()[0] is nn.Linear
