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

from rally.algos.distillation import FULL
from rally.config import Config
from rally.config.actor import ActorConfig, FsdpConfig, OptimConfig
from rally.config.checks.multi_gpu import sends_images
from rally.config.critic import CriticConfig
from rally.config.model import ModelConfig
from rally.engines.embedded.memory_plan import kv_bytes_per_token
from rally.models.decoder_families import FAMILIES, mlp_size, shape_of
from rally.models.lm_head import MAX_LOGITS
from rally.models.load import load_model_config
from rally.models.lora import LoraSettings, lora_rank
from rally.models.vision import image_parts_of
from rally.models.vision_loading import auto_class, freeze_tower, freeze_unused
from rally.models.vision_memory import vision_shape
from rally.runs.build.models import lora_of
from rally.runs.build.update_settings import (
    critic_limits,
    critic_recompute_of,
    distillation_settings_of,
    reward_kl_coef,
    update_limits,
)
from rally.train import adamw8bit
from rally.train.offload import OffloadSettings

UTILISATION = 0.35
FP8_COPIES = "the rollout's FP8 weights"
MOMENTS = "Adam's two moments"
WEIGHTS, GRADIENTS = "weights", "gradients, float32"
OF_POLICY, OF_CRITIC = ACTIVATIONS = ("activations of the update", "activations of the critic's update")
CRITIC = "critic with its optimizer"
TEACHERS = "teachers of distillation"
USED_BUDGET = 0.5
"""The share of data.max_response_length that an episode is assumed to use."""


class ParameterCounts(NamedTuple):
    """Parameters of a model: all, the trained ones, those active for a token (with experts only some), and those that
    images reach and nothing else."""

    parameters: int
    trained: int
    active: int
    tower: int = 0


class MemoryCost(NamedTuple):
    what: str
    bytes: int


class Images(NamedTuple):
    """Bytes that images hold until the backward pass, and bytes while the vision tower runs."""

    kept: int
    passing: int


class Update(NamedTuple):
    """Bytes that are on the device in the update of one model alone."""

    weights: int
    gradients: int
    activations: int


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
    tower = sum(p.numel() for part in image_parts_of(model).values() for p in part.parameters())
    return ParameterCounts(parameters, trained, int(parameters - idle - looked_up), tower)


def size_from(
    model_config: PreTrainedConfig,
    lora: LoraSettings | None = None,
    *,
    trust: bool = False,
    tower_frozen: bool = False,
    text_only: bool = False,
) -> ParameterCounts:
    """The counts of the model that a configuration describes, with the adapters that would be trained. `text_only`: a
    vision model is used for text."""
    with torch.device("meta"):
        model = auto_class(model_config).from_config(model_config, trust_remote_code=trust)
    if tower_frozen:
        freeze_tower(model)
    elif text_only or vision_shape(model_config) is None:  # a model whose images are not supported is used for text
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
    ranks, shards = config.trainer.world_size, shards_of(config)
    reference = config.actor_rollout_ref.ref.fsdp_config
    shard = 0 if gathers(reference, ranks) else size.parameters * width // shards
    policy = {cost.what: cost.bytes for cost in _trained(size, width, config.actor, config)}
    critic = _critic_costs(config, model_config, size, width)
    arriving = critic.pop(WEIGHTS, 0) if config.critic.fsdp_config.param_offload else 0
    # One is updated after the other. Their gradients and activations are never there at once.
    own = Update(0, policy.pop(GRADIENTS, 0), activation_bytes(config, model_config, width))
    other = Update(arriving, critic.pop(GRADIENTS, 0), critic_activation_bytes(config, model_config, size, width))
    larger, what = (own, OF_POLICY) if sum(own) >= sum(other) else (other, OF_CRITIC)
    states = state_bytes(size.trained // shards, width, config.actor.optim)
    visiting = min(OffloadSettings.bucket_bytes, states) if config.actor.fsdp_config.optimizer_offload else 0
    costs = [
        *(MemoryCost(*cost) for cost in policy.items()),
        MemoryCost(GRADIENTS, larger.gradients),
        MemoryCost("gathered layers", _gathered_bytes(config, model_config, size, width)),
        MemoryCost("engine's copy of the policy", size.parameters * width if config.samples_in_ranks else 0),
        MemoryCost(FP8_COPIES, _fp8_bytes(model_config, size) if config.rollout.quantization else 0),
        MemoryCost("reference policy", shard if has_reference(config) else 0),
        MemoryCost(CRITIC, sum(critic.values()) + larger.weights),
        MemoryCost(TEACHERS, _teachers_bytes(config, width)),
        MemoryCost(what, larger.activations),
        # The backward pass is over when states visit the device.
        MemoryCost("optimizer states that visit", max(0, visiting - larger.activations)),
    ]
    return [cost for cost in costs if cost.bytes]


def shards_of(config: Config) -> int:
    """The number of parts into which models are divided. Where it is less than that of the ranks, they hold replicas of
    these parts (HSDP)."""
    size, ranks = config.actor.fsdp_config.fsdp_size, config.trainer.world_size
    return min(size, ranks) if size > 0 else ranks


def state_bytes(trained: int, width: int, optim: OptimConfig) -> int:
    """The bytes of float32 masters and of moments."""
    return (4 * trained if width < 4 else 0) + _moment_bytes(trained, optim)


def _moment_bytes(trained: int, optim: OptimConfig) -> int:
    return int((8 if optim.optimizer == "AdamW" else adamw8bit.BYTES) * trained)


def _trained(
    size: ParameterCounts, width: int, learner: ActorConfig | CriticConfig, config: Config
) -> Iterator[MemoryCost]:
    """What one of the ranks holds of a model that is trained."""
    keys = learner.fsdp_config
    if gathers(keys, config.trainer.world_size):  # all of it is in main memory
        return
    own, trained = size.parameters // shards_of(config), size.trained // shards_of(config)
    masters = 4 * trained if width < 4 else 0
    yield MemoryCost(WEIGHTS, own * width)
    yield MemoryCost(GRADIENTS, 4 * trained)
    if not keys.optimizer_offload:
        yield MemoryCost("master weights, float32", masters)
        yield MemoryCost(MOMENTS, _moment_bytes(trained, learner.optim))


def has_reference(config: Config) -> bool:
    """Whether the run holds a reference policy beside the policy. With LoRA the policy's base is the reference."""
    wanted = (config.actor.use_kl_loss and config.actor.kl_loss_coef) or reward_kl_coef(config)
    return bool(wanted) and lora_of(config.model, 0) is None


class LoadedModel(NamedTuple):
    """A model that a run loads, and the bytes of each of its parameters."""

    path: str
    model_config: PreTrainedConfig
    parameters: int
    width: int


def teachers_of(config: Config, width: int, *, counted: bool = True) -> list[LoadedModel]:
    """Each teacher that is loaded in process; `width` is that of the policy's parameters. To count parameters takes
    time; without, there are none."""
    if not config.distillation.enabled:
        return []
    trust, found = config.model.trust_remote_code, []
    for name, teacher in config.distillation.teachers.items():
        path, dtype = str(teacher.model_path), teacher.inference.get("dtype") or config.model.dtype
        if teacher.server.url is None:
            option = f"distillation.teacher_models.{name}.model_path"
            stored = load_model_config(path, trust_remote_code=trust, option=option)
            own = width if dtype == "auto" else getattr(torch, dtype).itemsize
            parameters = size_from(stored, trust=trust).parameters if counted else 0
            found.append(LoadedModel(path, stored, parameters, own))
    return found


def teacher_bytes(config: Config, width: int) -> list[int]:
    """The weights of each teacher that is loaded in process; `width` is that of the policy's parameters."""
    return [teacher.width * teacher.parameters for teacher in teachers_of(config, width)]


def _teachers_bytes(config: Config, width: int) -> int:
    """What teachers take of a device. With param_offload one is there at a time."""
    sizes = teacher_bytes(config, width)
    return (max(sizes, default=0) if config.distillation.param_offload else sum(sizes)) // shards_of(config)


def gathers(keys: FsdpConfig, ranks: int) -> bool:
    """Whether FSDP2 gathers the weights from main memory."""
    return keys.offload_policy and ranks > 1


def _gathered_bytes(config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int) -> int:
    """What FSDP2 gathers at a time: the weights that belong to no layer, with the vision tower where images are shown,
    two layers, and the float32 gradients of one."""
    if config.trainer.world_size == 1:
        return 0
    if not config.actor.fsdp_config.reshard_after_forward:
        return size.parameters * width
    text = model_config.get_text_config()
    ends = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
    layer = max(0, size.parameters - ends - size.tower) // text.num_hidden_layers
    gradients = 4 * layer if size.trained == size.parameters else 0
    shown = size.tower if sends_images(config) and vision_shape(model_config) is not None else 0
    return int((ends + shown + 2 * layer) * width + gradients)


def _fp8_bytes(model_config: PreTrainedConfig, size: ParameterCounts) -> int:
    """A byte for each weight that belongs to a layer."""
    text = model_config.get_text_config()
    ends = text.vocab_size * text.hidden_size * (1 if text.tie_word_embeddings else 2)
    return int(max(0, size.parameters - ends))


MARGIN = 1.1
"""The plan may be this much above the truth, so what it exceeds by less is tried."""
OFFLOADED, CODED = "set actor.fsdp_config.optimizer_offload=true", "set actor.optim.optimizer=AdamW8bit"
CRITIC_CODED = "set critic.optim.optimizer=AdamW8bit"
ADVICE = {
    WEIGHTS: ["raise trainer.n_gpus_per_node"],
    GRADIENTS: ["set model.lora_rank"],
    "master weights, float32": [OFFLOADED],
    MOMENTS: [OFFLOADED, CODED],
    CRITIC: ["set critic.fsdp_config.optimizer_offload=true", CRITIC_CODED],
    "engine's copy of the policy": ["set rollout.name=vllm or sglang"],
    FP8_COPIES: ["leave rollout.quantization out"],
    "reference policy": ["raise trainer.n_gpus_per_node"],
    "gathered layers": ["set actor.fsdp_config.reshard_after_forward=true"],
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
    advice = dict.fromkeys(one for cost in largest for one in _advice(config, cost.what))
    return (
        f"an update needs about {shown_bytes(needed)} of device memory and there are {shown_bytes(memory)} ({items}); "
        f"{', or '.join(advice)}"
    )


def _advice(config: Config, what: str) -> list[str]:
    if what == TEACHERS:
        serve = "let a server answer for the teacher (distillation.teacher_models.*.server.url)"
        return [serve if config.distillation.param_offload else "set distillation.param_offload=true"]
    if what == CRITIC and config.critic.fsdp_config.optimizer_offload:
        return ["set critic.model.path to a smaller model"]
    if what in ADVICE:
        coded = {CODED: config.actor.optim.optimizer != "AdamW", CRITIC_CODED: config.critic.optim.optimizer != "AdamW"}
        return [one for one in ADVICE[what] if not coded.get(one)]
    critic = what == OF_CRITIC
    model: ModelConfig = config.critic.model if critic else config.model
    section, limit = ("critic.model", "critic") if critic else ("model", "actor")
    if not model.enable_gradient_checkpointing:
        return [f"set {section}.enable_gradient_checkpointing=true"]
    if model.recompute_num_layers is not None:
        return [f"leave {section}.recompute_num_layers out"]
    if critic and critic_recompute_of(config) is not None:
        return ["leave model.recompute_num_layers out"]
    if not model.enable_activation_offload:
        return [f"set {section}.enable_activation_offload=true"]
    return [f"lower {limit}.ppo_max_token_len_per_gpu"]


class DescribedCritic(NamedTuple):
    """The configuration of a critic's model, and its counts."""

    model_config: PreTrainedConfig
    size: ParameterCounts


def described_critic(config: Config, policy_config: PreTrainedConfig, policy: ParameterCounts) -> DescribedCritic:
    """The critic of a run that has one: critic.model.path, or a copy of the policy. All of it is trained, but for the
    tower of a vision model that is used for text. It has no output head."""
    model, shown = config.critic.model, sends_images(config)
    if model.path:
        trust, overrides = model.trust_remote_code, dict(model.override_config)
        own = load_model_config(model.path, trust_remote_code=trust, overrides=overrides, option="critic.model.path")
        size = size_from(own, trust=trust, text_only=not shown)
    else:
        unused = 0 if shown and vision_shape(policy_config) is not None else policy.tower
        own, size = policy_config, policy._replace(trained=policy.parameters - unused)
    text = own.get_text_config()
    head = 0 if text.tie_word_embeddings else text.vocab_size * text.hidden_size
    return DescribedCritic(own, size._replace(parameters=size.parameters - head, trained=size.trained - head))


def _critic_costs(
    config: Config, model_config: PreTrainedConfig, policy: ParameterCounts, width: int
) -> dict[str, int]:
    if not config.needs_critic:
        return {}
    size = described_critic(config, model_config, policy).size
    return {cost.what: cost.bytes for cost in _trained(size, width, config.critic, config)}


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


def _asked_bytes(config: Config, teacher: LoadedModel, tokens: int, seen: int) -> int:
    """What a teacher holds in its forward pass: the MLP of one layer, or its vision tower, or a chunk of logits."""
    text, width = teacher.model_config.get_text_config(), teacher.width
    images = _images(config, teacher.model_config, seen, width, config.model, trained=False)
    layer = tokens * (3 * mlp_size(text) + 4 * text.hidden_size) * width
    logits = 2 * 4 * min(_most_logits(width), tokens * text.vocab_size) + tokens * text.hidden_size * width
    return int(max(images.passing, images.kept + max(layer, logits)))


def _most_logits(width: int) -> int:
    return MAX_LOGITS["accelerator" if width < 4 else "cpu"]


def _image_tokens(config: Config, tokens: int) -> int:
    """Every rank of a group that divides a micro-batch runs the tower for all its images."""
    together = tokens * config.actor.sequence_parallel_size
    return together * config.prompt_length // (config.prompt_length + config.response_length)


def _only_text_adapters(config: Config) -> bool:
    lora = lora_of(config.model, 0)
    return lora is not None and lora.targets == LoraSettings.targets


def critic_activation_bytes(config: Config, model_config: PreTrainedConfig, policy: ParameterCounts, width: int) -> int:
    """The same for the critic, which is updated at another time, has no logits and trains its vision tower."""
    if not config.needs_critic:
        return 0
    described = described_critic(config, model_config, policy).model_config
    tokens, again = packed_tokens(config, critic=True), critic_recompute_of(config)
    images = _images(config, described, _image_tokens(config, tokens), width, config.critic.model, trained=True)
    text = described.get_text_config()
    return _kept_activations(config.critic.model, again, text, tokens, width, 0) + images.kept


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
