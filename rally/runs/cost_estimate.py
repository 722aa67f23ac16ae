"""Estimates of a run's memory and time, as formulas over the model's configuration, without loading weights.

Memory is that of one device, which may be one of several that share the model, with everything that the offload keys
leave on it. Activations are those of a packed micro-batch; on one H200, with Qwen2.5-1.5B, the
estimate is 7 to 8 % above the peaks in docs/benchmarks.md. Time is the work divided by the hardware's peak rate and by
`UTILISATION`, the share of the peak that the same page reports for training and decoding.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from transformers import PreTrainedConfig

from rally.config import Config
from rally.config.actor import ActorConfig, FsdpConfig, OptimConfig
from rally.config.checks.multi_gpu import sends_images
from rally.config.critic import CriticConfig
from rally.config.model import ModelConfig
from rally.engines.embedded.memory_plan import kv_bytes_per_token
from rally.models.vision_memory import vision_shape
from rally.runs.activation_estimate import activation_bytes, critic_activation_bytes
from rally.runs.build.models import lora_of
from rally.runs.build.update_settings import critic_recompute_of, reward_kl_coef
from rally.runs.planned_models import ParameterCounts, described_critic, teacher_bytes
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


class MemoryCost(NamedTuple):
    what: str
    bytes: int


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


def _critic_costs(
    config: Config, model_config: PreTrainedConfig, policy: ParameterCounts, width: int
) -> dict[str, int]:
    if not config.needs_critic:
        return {}
    size = described_critic(config, model_config, policy).size
    return {cost.what: cost.bytes for cost in _trained(size, width, config.critic, config)}


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
