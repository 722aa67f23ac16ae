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
    shapes = {(heads, size) for heads, size, _ in layer_shapes(config)} or {(0, 0)}
    return KVShape(config.num_hidden_layers, *max(shapes, key=lambda shape: shape[0] * shape[1]))


NO_CACHE = ("linear_attention", "conv", "mlp", "moe", "mamba", "recurrent")  # kinds of layers without keys and values


def layer_shapes(config: PreTrainedConfig) -> list[tuple[int, int, int]]:
    """Key/value heads, key size and value size of each layer that caches them, from a configuration alone. Latent
    attention has one head, and its values are part of the keys. What the engine really stores is found by running the
    model (`kv_layers`)."""
    config = config.get_text_config()
    if not hasattr(config, "num_attention_heads"):
        return []
    count = config.num_hidden_layers
    kinds = list(getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None) or [])
    kinds = kinds if len(kinds) == count else [""] * count
    each = getattr(config, "per_layer_config", None) or {}
    shapes = []
    for number, kind in enumerate(kinds):
        if kind in NO_CACHE:
            continue
        layer = each.get(number, config) if isinstance(each, dict) else each[number] if number < len(each) else config
        heads = layer.num_attention_heads
        if rank := getattr(layer, "kv_lora_rank", None):
            shapes.append((1, rank + layer.qk_rope_head_dim, 0))
            continue
        size = getattr(layer, "head_dim", None) or layer.hidden_size // heads
        value = getattr(layer, "v_head_dim", None) or size
        shapes.append((getattr(layer, "num_key_value_heads", None) or heads, size, value))
    return shapes


def mlp_size(config: PreTrainedConfig) -> int:
    """The width of a layer's MLP for one token: in a mixture of experts, of the active ones."""
    config = config.get_text_config()
    experts = getattr(config, "num_experts_per_tok", None)
    if experts and getattr(config, "moe_intermediate_size", None):
        return int(experts * config.moe_intermediate_size)
    return int(getattr(config, "intermediate_size", None) or 4 * config.hidden_size)


def power_of_two(size: int) -> bool:
    """Whether fused layers support this head size: a power of two, and large enough for a tensor core."""
    return size >= 16 and size & (size - 1) == 0


def unsupported_attention(model: PreTrainedModel, max_length: int) -> str | None:
    """The attention feature of the model that the embedded engine lacks for histories of up to `max_length` tokens;
    None if it supports it. What it can run is compared with the model's own forward before it is used."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ()) & set(UNSUPPORTED_KINDS)
    chosen = getattr(config, "index_topk", None)
    if getattr(config, "is_encoder_decoder", False):
        return "an encoder"
    if kinds:
        return f"layers of type {', '.join(sorted(kinds))}"
    if chosen and max_length > chosen:
        return f"sparse attention over {chosen} chosen tokens, fewer than the {max_length} that a history may have,"
    return None


UNSUPPORTED_KINDS = ("compressed_sparse_attention", "heavily_compressed_attention")


FAMILIES = ("llama", "qwen2", "qwen3", "mistral", "gemma3_text")
EXPERT_FAMILIES = ("qwen3_moe",)
"""Families whose attention is fused, and whose experts go through their module."""
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
    if config.model_type not in (*FAMILIES, *EXPERT_FAMILIES) or not hasattr(model.base_model, "layers"):
        return False
    whole_heads = power_of_two(kv_shape(model).size) and getattr(config, "partial_rotary_factor", 1.0) == 1.0
    return activation_name(model) in ACTIVATIONS and whole_heads


def dense(mlp: Any) -> bool:
    """Whether an MLP is one gated product, not a mixture of experts."""
    return all(isinstance(getattr(mlp, name, None), nn.Module) for name in ("gate_proj", "up_proj", "down_proj"))


def through_module(mlp: Any, x_TC: Tensor) -> Tensor:
    """The output of an MLP that is not fused."""
    output = mlp(x_TC.unsqueeze(0))
    return (output[0] if isinstance(output, tuple) else output).squeeze(0)  # type: ignore[no-any-return]


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
