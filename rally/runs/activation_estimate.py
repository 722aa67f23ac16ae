"""Estimates what the micro-batches of an update keep for their backward pass, images and distillation included."""

from __future__ import annotations

from typing import NamedTuple

from transformers import PreTrainedConfig

from rally.algos.distillation import FULL
from rally.config import Config
from rally.config.checks.multi_gpu import sends_images
from rally.config.model import ModelConfig
from rally.models.decoder_families import FAMILIES, mlp_size, shape_of
from rally.models.lm_head import MAX_LOGITS
from rally.models.lora import LoraSettings
from rally.models.vision_memory import vision_shape
from rally.runs.build.models import lora_of
from rally.runs.build.update_settings import (
    critic_limits,
    critic_recompute_of,
    distillation_settings_of,
    update_limits,
)
from rally.runs.planned_models import LoadedModel, ParameterCounts, described_critic, teachers_of


class Images(NamedTuple):
    """Bytes that images hold until the backward pass, and bytes while the vision tower runs."""

    kept: int
    passing: int


def activation_bytes(config: Config, model_config: PreTrainedConfig, width: int) -> int:
    """What a micro-batch of the policy keeps for its backward pass, or a teacher holds while it is asked before. For
    models that are shown images, prompts are assumed to be images."""
    tokens, seen = packed_tokens(config), _image_tokens(config, packed_tokens(config))
    trained = not (config.actor.freeze_vision_tower or _only_text_adapters(config))
    images = _images(config, model_config, seen, width, config.model, trained=trained)
    text, again = model_config.get_text_config(), config.model.recompute_num_layers
    distilled = distillation_settings_of(config)
    chunk = 4 * min(_most_logits(width), tokens * text.vocab_size)
    logits = (2 + (distilled.chunks if distilled else 0)) * chunk
    teachers = teachers_of(config, width, counted=False)
    if distilled and distilled.mode in FULL:  # they are asked for logits chunk by chunk, beside the policy's
        held = [tokens * one.model_config.get_text_config().hidden_size * one.width for one in teachers]
        logits += max(held, default=0)
    own = max(_kept_activations(config.model, again, text, tokens, width, logits) + images.kept, images.passing)
    return max([own, *(_asked_bytes(config, teacher, tokens, seen) for teacher in teachers)])


def critic_activation_bytes(config: Config, model_config: PreTrainedConfig, policy: ParameterCounts, width: int) -> int:
    """The same for the critic, which is updated at another time, has no logits and trains its vision tower."""
    if not config.needs_critic:
        return 0
    described = described_critic(config, model_config, policy).model_config
    tokens, again = packed_tokens(config, critic=True), critic_recompute_of(config)
    images = _images(config, described, _image_tokens(config, tokens), width, config.critic.model, trained=True)
    text = described.get_text_config()
    return _kept_activations(config.critic.model, again, text, tokens, width, 0) + images.kept


def _asked_bytes(config: Config, teacher: LoadedModel, tokens: int, seen: int) -> int:
    """What a teacher holds in its forward pass: the MLP of one layer, or its vision tower, or a chunk of logits."""
    text, width = teacher.model_config.get_text_config(), teacher.width
    images = _images(config, teacher.model_config, seen, width, config.model, trained=False)
    layer = tokens * (3 * mlp_size(text) + 4 * text.hidden_size) * width
    logits = 2 * 4 * min(_most_logits(width), tokens * text.vocab_size) + tokens * text.hidden_size * width
    return int(max(images.passing, images.kept + max(layer, logits)))


def _kept_activations(
    model: ModelConfig, count: int | None, text: PreTrainedConfig, tokens: int, width: int, logits: int
) -> int:
    """The inputs of the layers that are computed again, the activations of one of them and of all others, and a chunk
    of logits twice. Without recompute_num_layers, as few layers are computed again as the memory beyond this allows.
    With activation offload, the activations of two layers are on the device at a time."""
    layers = text.num_hidden_layers
    layer = tokens * sum(kept_by_layer(text, width)) * width
    inputs, offload = tokens * text.hidden_size * width, model.enable_activation_offload
    again = recomputed_layers(model, count, layers)
    if again == 0:
        return int((2 if offload else layers) * layer + logits)
    if not offload:  # the head's backward pass, and that of the last layers, is over when a layer is computed again
        return int(again * inputs + max(layer, (layers - again) * layer + logits))
    # the gradients of both halves of the MLP, which the freed inputs of other layers cover otherwise
    return int(2 * inputs + max(layer + 2 * tokens * mlp_size(text) * width, logits))


def packed_tokens(config: Config, *, critic: bool = False) -> int:
    """The tokens of the largest micro-batch of the policy or the critic, on each GPU."""
    limits = critic_limits(config) if critic else update_limits(config)
    groups = (config.critic.ppo_mini_batch_size if critic else None) or config.mini_batch_size
    own = -(-(config.prompt_length + config.response_length) // config.actor.sequence_parallel_size)  # of a history
    episodes = min(limits.max_rows or groups * config.rollout.n, groups * config.rollout.n)
    return int(min(max(limits.max_tokens, own), episodes * own))


def kept_by_layer(text: PreTrainedConfig, width: int) -> list[int]:
    """The numbers that a layer keeps of each token for its backward pass: the sizes of its tensors."""
    _, kv_heads, head = shape_of(text)
    hidden, inner, heads = text.hidden_size, mlp_size(text), text.num_attention_heads * head
    qkv = [heads, kv_heads * head, kv_heads * head]
    if width < 4 and text.model_type in FAMILIES:
        # Fused: the residual twice, its norms, the attention output; of the MLP gate, up projection and product.
        return [*[hidden] * 5, *qkv, *[inner] * 3]
    # Two norms in float32 and their results, queries, keys and values before and after rotation; of the MLP the gate,
    # its activation, the up projection and their product.
    return [*[hidden] * 6, *qkv, *qkv, *[heads] * 2, *[inner] * 4]


def recomputed_layers(model: ModelConfig, count: int | None, layers: int) -> int:
    """How many layers are computed again where memory is short, if `count` were asked for."""
    if not model.enable_gradient_checkpointing:
        return 0
    return layers if count is None else min(count, layers)


def _images(
    config: Config, model_config: PreTrainedConfig, tokens: int, width: int, model: ModelConfig, *, trained: bool
) -> Images:
    """The bytes of `tokens` image tokens. If the vision tower is not trained, only their features are kept."""
    tower = vision_shape(model_config)
    if tower is None or not sends_images(config):
        return Images(0, 0)
    features, patches = tokens * tower.features * width, tokens * tower.patches * width
    if not trained:
        return Images(features, features + patches * tower.forward_size())
    learned = tower.training_size(checkpointing=model.enable_gradient_checkpointing)
    return Images(features + patches * learned, 0)


def _image_tokens(config: Config, tokens: int) -> int:
    """Every rank of a group that divides a micro-batch runs the tower for all its images."""
    together = tokens * config.actor.sequence_parallel_size
    return together * config.prompt_length // (config.prompt_length + config.response_length)


def _only_text_adapters(config: Config) -> bool:
    lora = lora_of(config.model, 0)
    return lora is not None and lora.targets == LoraSettings.targets


def _most_logits(width: int) -> int:
    return MAX_LOGITS["accelerator" if width < 4 else "cpu"]
