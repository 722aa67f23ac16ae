"""Estimates of a run's memory and time, as formulas over the model's configuration, without loading weights.

Memory is that of one device, which may be one of several that share the model, with everything that the offload keys
leave on it. Activations are those of a packed micro-batch; on one H200, with Qwen2.5-1.5B, the
estimate is 7 to 8 % above the peaks in docs/benchmarks.md. Time is the work divided by the hardware's peak rate and by
`UTILISATION`, the share of the peak that the same page reports for training and decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from rally.config import Config
from rally.config.actor import FsdpConfig
from rally.engines.embedded.memory_plan import kv_bytes_per_token
from rally.models.decoder_families import FAMILIES, mlp_size, shape_of
from rally.models.lm_head import MAX_LOGITS
from rally.models.load import load_model_config
from rally.models.lora import LoraSettings, lora_rank
from rally.models.vision import image_parts_of
from rally.models.vision_loading import auto_class, freeze_tower, freeze_unused
from rally.models.vision_memory import vision_shape
from rally.runs.build.models import lora_of
from rally.runs.build.update_settings import reward_kl_coef
from rally.train.offload import OffloadSettings

UTILISATION = 0.35
USED_BUDGET = 0.5
"""The share of data.max_response_length that an episode is assumed to use."""


class ParameterCounts(NamedTuple):
    """Parameters of a model: all, the trained ones, and those active for a token (with experts only some)."""

    parameters: int
    trained: int
    active: int


class MemoryCost(NamedTuple):
    what: str
    bytes: int


class Images(NamedTuple):
    """Bytes that images hold until the backward pass, and bytes while the vision tower runs."""

    kept: int
    passing: int


class StepTime(NamedTuple):
    """Seconds of one training step."""

    rollout: float
    update: float

    @property
    def total(self) -> float:
        return self.rollout + self.update


class Hardware(NamedTuple):
    """A device: memory in bytes, dense half-precision operations per second and memory bandwidth in bytes per
    second."""

    name: str
    memory: int
    flops: float
    bandwidth: float


def size_of(model: PreTrainedModel) -> ParameterCounts:
    """The counts of a module, which may be on the meta device."""
    parameters = sum(p.numel() for p in model.parameters())
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    config = model.config.get_text_config()
    experts, chosen = (getattr(config, name, None) for name in ("num_experts", "num_experts_per_tok"))
    of_experts = sum(p.numel() for name, p in model.named_parameters() if ".experts." in name)
    idle = of_experts * (1 - chosen / experts) if experts and chosen else 0
    # An embedding lookup costs no multiplication; a tied matrix is also the output head.
    looked_up = 0 if config.tie_word_embeddings else sum(p.numel() for p in model.get_input_embeddings().parameters())
    return ParameterCounts(parameters, trained, int(parameters - idle - looked_up))


def size_from(
    model_config: PreTrainedConfig, lora: LoraSettings | None = None, *, trust: bool = False, tower_frozen: bool = False
) -> ParameterCounts:
    """The counts of the model that a configuration describes, with the adapters that would be trained."""
    with torch.device("meta"):
        model = auto_class(model_config).from_config(model_config, trust_remote_code=trust)
    if tower_frozen:
        freeze_tower(model)
    elif vision_shape(model_config) is None:  # a model whose images are not supported is used for text
        freeze_unused(model)
    size = size_of(model)
    return size if lora is None else size._replace(trained=_adapter_numbers(model, lora))


def _adapter_numbers(model: PreTrainedModel, lora: LoraSettings) -> int:
    head, rank = model.get_output_embeddings(), lora_rank(lora)
    every = lora.targets == LoraSettings.targets
    tower = {module for part in image_parts_of(model).values() for module in part.modules()} if every else set()
    linear = [
        module
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and (every or name.endswith(lora.targets))
        if module not in tower
    ]
    return sum(rank * (module.in_features + module.out_features) for module in linear)


def training_costs(
    config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int
) -> list[MemoryCost]:
    """Everything that an update holds in memory at once; `width` is the bytes of a parameter."""
    adapters, ranks = lora_of(config.model, 0) is not None, config.trainer.world_size
    wanted = (config.actor.use_kl_loss and config.actor.kl_loss_coef) or reward_kl_coef(config)
    reference = config.actor_rollout_ref.ref.fsdp_config
    shard = 0 if _gathers(reference, ranks) else size.parameters * width // ranks
    activations, states = (
        activation_bytes(config, model_config, width),
        (12 if width < 4 else 8) * size.trained // ranks,
    )
    visiting = min(OffloadSettings.bucket_bytes, states) if config.actor.fsdp_config.optimizer_offload else 0
    costs = [
        *_trained(size, width, config.actor.fsdp_config, ranks),
        MemoryCost("gathered layers", _gathered_bytes(config, model_config, size, width)),
        MemoryCost("reference policy", shard if wanted and not adapters else 0),
        MemoryCost("critic with its optimizer", _critic_bytes(config, size, width)),
        MemoryCost("activations of the update", activations),
        # The backward pass is over when states visit the device.
        MemoryCost("optimizer states that visit", max(0, visiting - activations)),
    ]
    return [cost for cost in costs if cost.bytes]


def _trained(size: ParameterCounts, width: int, keys: FsdpConfig, ranks: int) -> Iterator[MemoryCost]:
    """What one of the ranks holds of a model that is trained. Replicas are not considered."""
    if _gathers(keys, ranks):  # all of it is in main memory
        return
    own, trained = size.parameters // ranks, size.trained // ranks
    masters = 4 * trained if width < 4 else 0
    yield MemoryCost("weights", own * width)
    yield MemoryCost("gradients, float32", 4 * trained)
    if not keys.optimizer_offload:
        yield MemoryCost("master weights, float32", masters)
        yield MemoryCost("Adam's two moments, float32", 8 * trained)


def _gathers(keys: FsdpConfig, ranks: int) -> bool:
    """Whether FSDP2 gathers the weights from main memory."""
    return keys.offload_policy and ranks > 1


def _gathered_bytes(config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int) -> int:
    """What FSDP2 gathers at a time: the weights that belong to no layer, two layers, and the float32 gradients of
    one."""
    if config.trainer.world_size == 1:
        return 0
    if not config.actor.fsdp_config.reshard_after_forward:
        return size.parameters * width
    text = model_config.get_text_config()
    ends = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
    layer = max(0, size.parameters - ends) // text.num_hidden_layers
    gradients = 4 * layer if size.trained == size.parameters else 0
    return int((ends + 2 * layer) * width + gradients)


MARGIN = 1.1
"""The plan may be this much above the truth, so what it exceeds by less is tried."""
ADVICE = {
    "weights": "raise trainer.n_gpus_per_node",
    "gradients, float32": "set model.lora_rank",
    "master weights, float32": "set actor.fsdp_config.optimizer_offload=true",
    "Adam's two moments, float32": "set actor.fsdp_config.optimizer_offload=true",
    "critic with its optimizer": "set critic.fsdp_config.optimizer_offload=true",
    "reference policy": "raise trainer.n_gpus_per_node",
    "gathered layers": "set actor.fsdp_config.reshard_after_forward=true",
}


def memory_problem(
    config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int, memory: int
) -> str | None:
    """Why an update cannot fit into `memory` bytes of a device, with the largest costs and the keys that would help;
    None if it fits. Sampling is not considered: its engine plans with what is left."""
    costs = sorted(training_costs(config, model_config, size, width), key=lambda cost: -cost.bytes)
    needed = sum(cost.bytes for cost in costs)
    if needed <= MARGIN * memory:
        return None
    largest = [cost for cost in costs if cost.bytes > needed / 10]
    items = ", ".join(f"{shown_bytes(cost.bytes)} {cost.what}" for cost in largest)
    advice = dict.fromkeys(_advice(config, cost.what) for cost in largest)
    return (
        f"an update needs about {shown_bytes(needed)} of device memory and there are {shown_bytes(memory)} ({items}); "
        f"{', or '.join(advice)}"
    )


def _advice(config: Config, what: str) -> str:
    if what in ADVICE:
        return ADVICE[what]
    if not config.model.enable_gradient_checkpointing:
        return "set model.enable_gradient_checkpointing=true"
    if not config.model.enable_activation_offload:
        return "set model.enable_activation_offload=true"
    return "lower actor.ppo_max_token_len_per_gpu"


def _critic_bytes(config: Config, policy: ParameterCounts, width: int) -> int:
    if not config.needs_critic:
        return 0
    size = policy._replace(trained=policy.parameters)
    if config.critic.model.path:
        size = size_from(load_model_config(config.critic.model.path, option="critic.model.path"))
    costs = _trained(size, width, config.critic.fsdp_config, config.trainer.world_size)
    return sum(cost.bytes for cost in costs if cost.what != "weights" or not config.critic.fsdp_config.param_offload)


def activation_bytes(config: Config, model_config: PreTrainedConfig, width: int) -> int:
    """What a micro-batch keeps for its backward pass: the inputs of all layers and the activations of one (with
    gradient checkpointing) or all, and a chunk of logits twice. With activation offload, those of two layers are on the
    device at a time. For a vision model, prompts are assumed to be
    images."""
    text = model_config.get_text_config()
    layers, kv_heads, head = shape_of(text)
    history = config.prompt_length + config.response_length
    episodes = config.mini_batch_size * config.rollout.n
    own = -(-history // config.actor.sequence_parallel_size)  # of a history, on each GPU
    tokens = min(max(config.actor.ppo_max_token_len_per_gpu, own), episodes * own)
    qkv = (text.num_attention_heads + 2 * kv_heads) * head
    if width < 4 and text.model_type in FAMILIES:
        # Fused: the residual twice, its norms, the attention output; of the MLP gate, up projection and product.
        inside = 5 * text.hidden_size + qkv + 3 * mlp_size(text)
    else:
        # Two norms in float32 and their results, queries, keys and values before and after rotation; of the MLP the
        # gate, its activation, the up projection and their product.
        inside = 6 * text.hidden_size + 2 * (qkv + text.num_attention_heads * head) + 4 * mlp_size(text)
    layer = tokens * inside * width
    seen = _images(config, model_config, tokens * config.prompt_length // history, width)
    logits = 2 * 4 * min(MAX_LOGITS["accelerator" if width < 4 else "cpu"], tokens * text.vocab_size)
    inputs, offload = tokens * text.hidden_size * width, config.model.enable_activation_offload
    if not config.model.enable_gradient_checkpointing:
        kept = (2 if offload else layers) * layer + logits
    elif not offload:  # the head's backward pass is over by the time a layer is computed again
        kept = layers * inputs + max(layer, logits)
    else:  # the gradients of both halves of the MLP, which the freed inputs of other layers cover otherwise
        kept = 2 * inputs + max(layer + 2 * tokens * mlp_size(text) * width, logits)
    return int(max(kept + seen.kept, seen.passing))


def _images(config: Config, model_config: PreTrainedConfig, tokens: int, width: int) -> Images:
    """The bytes of `tokens` image tokens. If the vision tower is not trained, only their features are kept."""
    tower = vision_shape(model_config)
    if tower is None:
        return Images(0, 0)
    lora, features = lora_of(config.model, 0), tokens * tower.features * width
    patches = tokens * tower.patches * width
    if config.actor.freeze_vision_tower or (lora is not None and lora.targets == LoraSettings.targets):
        return Images(features, features + patches * tower.forward_size())
    learned = tower.training_size(checkpointing=config.model.enable_gradient_checkpointing)
    return Images(features + patches * learned, 0)


def at_once(config: Config, model_config: PreTrainedConfig, width: int, kv_bytes: int) -> int:
    """How many episodes are sampled at the same time with `kv_bytes` for their KV cache."""
    per_token = kv_bytes_per_token(model_config, width)
    fit = kv_bytes // (per_token * int(config.prompt_length + USED_BUDGET * config.response_length))
    return min(config.rollout.max_num_seqs, config.data.train_batch_size * config.rollout.n, fit)


def step_time(
    config: Config, model_config: PreTrainedConfig, size: ParameterCounts, hardware: Hardware, running: int, width: int
) -> StepTime:
    """The time of a step with `running` episodes sampled at a time. Decoding reads the weights and every history once
    per token. Training takes 6 operations per parameter and token, 8 with gradient checkpointing."""
    episodes = config.data.train_batch_size * config.rollout.n
    prompt, answer = config.prompt_length * USED_BUDGET, config.response_length * USED_BUDGET
    read = size.parameters * width + running * (prompt + answer / 2) * kv_bytes_per_token(model_config, width)
    decode = max(read / hardware.bandwidth, 2 * size.active * running / hardware.flops)
    waves = -(-episodes // max(1, running))
    prefill = 2 * size.active * config.data.train_batch_size * prompt / hardware.flops
    per_number = 8 if config.model.enable_gradient_checkpointing else 6
    tokens = episodes * answer + config.data.train_batch_size * prompt  # the prompt of a group is computed once
    update = per_number * size.active * tokens * config.actor.ppo_epochs / hardware.flops
    return StepTime((waves * answer * decode + prefill) / UTILISATION, update / UTILISATION)


def shown_bytes(count: float) -> str:
    for unit in ("B", "KiB", "MiB"):
        if count < 1024:
            return f"{count:.1f} {unit}"
        count /= 1024
    return f"{count:.1f} GiB"
