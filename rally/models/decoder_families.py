"""Model families: what the engine supports, KV shapes, and the parts of decoder layers that fused forwards use.

Shapes: T packed tokens, C hidden size, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel


class KVShape(NamedTuple):
    """Layers, key/value heads and head size."""

    layers: int
    heads: int
    size: int


def kv_shape(model: PreTrainedModel) -> KVShape:
    return shape_of(model.config)


def shape_of(config: PreTrainedConfig) -> KVShape:
    """The KV shape from a configuration alone; the largest one if layers differ."""
    config = config.get_text_config()
    shapes = _layer_shapes(config)
    return KVShape(config.num_hidden_layers, *max(shapes, key=lambda shape: shape[0] * shape[1]))


def _layer_shapes(config: PreTrainedConfig) -> set[tuple[int, int]]:
    """The different (key/value heads, head size) of the layers."""
    if not hasattr(config, "num_attention_heads"):
        return {(0, 0)}  # no attention
    layers = getattr(config, "per_layer_config", None) or {}
    each = list(layers.values()) if isinstance(layers, dict) else list(layers)
    shapes = set()
    for layer in each or [config]:
        heads = layer.num_attention_heads
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        shapes.add((getattr(layer, "num_key_value_heads", None) or heads, size))
    return shapes


def mlp_size(config: PreTrainedConfig) -> int:
    """The width of a layer's MLP for one token: in a mixture of experts, of the active ones."""
    config = config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None)
    if experts and getattr(config, "moe_intermediate_size", None):
        return int(experts * config.moe_intermediate_size)
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def power_of_two(size: int) -> bool:
    """Whether the kernels support this head size: a power of two, and large enough for a tensor core."""
    return size >= 16 and size & (size - 1) == 0


def unsupported_by_kernels(model: PreTrainedModel) -> str | None:
    """The attention feature of the model that the paged kernels lack; None if they support it."""
    config = model.config.get_text_config()
    if getattr(config, "attn_logit_softcapping", None):
        return "attention soft-capping"
    if any(name.endswith(".sinks") for name, _ in model.named_parameters()):
        return "attention sinks"
    return None


def unsupported_attention(model: PreTrainedModel) -> str | None:
    """The attention feature of the model that the embedded engine lacks; None if it supports it."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder"
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    if getattr(config, "kv_lora_rank", None):
        return "latent attention"
    if len(_layer_shapes(config)) > 1:
        return "keys and values of different sizes per layer"
    if not getattr(model, "_supports_attention_backend", False):
        return "its own attention function"
    return None


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
ACTIVATIONS: dict[str, Literal["silu", "gelu_tanh"]] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class Norm(Protocol):
    weight: nn.Parameter


@dataclass(frozen=True)
class LayerParts:
    """The parts of one decoder layer."""

    attention: Any
    mlp: Any
    input_norm: Norm
    middle_norm: Norm  # of the residual, before the MLP
    attention_norm: Norm | None  # of the attention output, before it is added (Gemma)
    mlp_norm: Norm | None
    q_norm: Norm | None
    k_norm: Norm | None
    scale: float
    window: int | None
    kind: str | None  # selects the rotary embedding, if there are several


def known(model: PreTrainedModel) -> bool:
    """Whether `parts_of` describes the model's layers. It does not for the text model inside a vision-language
    model."""
    config = model.config.get_text_config()
    if config.model_type not in FAMILIES or not hasattr(model.base_model, "layers"):
        return False
    whole_heads = power_of_two(kv_shape(model).size) and getattr(config, "partial_rotary_factor", 1.0) == 1.0
    return activation_name(model) in ACTIVATIONS and whole_heads


def activation_name(model: PreTrainedModel) -> str:
    config = model.config.get_text_config()
    return str(getattr(config, "hidden_activation", None) or config.hidden_act)


def offset_norms(model: PreTrainedModel) -> bool:
    """Whether norms multiply by 1 + weight (Gemma)."""
    return bool(model.config.get_text_config().model_type.startswith("gemma"))


def parts_of(module: Any, model: PreTrainedModel) -> LayerParts:
    """The parts of one decoder layer of a `known` model."""
    attention, config = module.self_attn, model.config.get_text_config()
    gemma = offset_norms(model)
    mistral_window = config.sliding_window if config.model_type == "mistral" else None
    return LayerParts(
        attention=attention,
        mlp=module.mlp,
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


def rotary_of(
    base: Any, like_TC: Tensor, positions_T: Tensor, kinds: Iterable[str | None]
) -> dict[str | None, tuple[Tensor, Tensor]]:
    """Cosines and sines [T, D] for each kind of layer."""
    rotary = {}
    for kind in kinds:
        options = {} if kind is None else {"layer_type": kind}
        cos, sin = base.rotary_emb(like_TC.unsqueeze(0), positions_T.unsqueeze(0), **options)
        rotary[kind] = cos[0], sin[0]
    return rotary
