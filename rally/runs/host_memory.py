"""Estimates what a run on accelerators holds in main memory, from its configuration, before it loads weights.

The system kills a process that takes too much without a word, perhaps at its first or its last checkpoint.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import PreTrainedConfig

from rally.config import Config
from rally.config.actor import ActorConfig, OptimConfig
from rally.config.critic import CriticConfig
from rally.config.model import ModelConfig
from rally.config.rollout import BROADCAST
from rally.runs.activation_estimate import kept_by_layer, packed_tokens, recomputed_layers
from rally.runs.build.models import lora_of
from rally.runs.build.run_inputs import RunError
from rally.runs.build.update_settings import critic_offload_of, critic_recompute_of, policy_offload_of
from rally.runs.cost_estimate import MARGIN, MemoryCost, gathers, has_reference, shards_of, shown_bytes, state_bytes
from rally.runs.planned_models import LoadedModel, ParameterCounts, described_critic, teacher_bytes, teachers_of

STATES, ACTIVATIONS = "what training keeps there", "activations of the update"
COPY = "the copy of a checkpoint"
SENT = "the copy that is broadcast to servers"
LOADED = "models while they are loaded"


def host_costs(config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int) -> list[MemoryCost]:
    """What a run holds in the main memory of its first node: what the offload keys move there, and the copy from which
    a checkpoint is written, at the latest after the last step. Its processes need some GB beside."""
    actor, adapters = config.actor, lora_of(config.model, 0) is not None
    policy, nodes = policy_offload_of(config), config.trainer.nnodes
    states = _states(size, width, config, actor.optim, once=True)
    there = policy.optimizer or gathers(actor.fsdp_config, config.trainer.world_size)
    kept = _kept(config, size, width, actor, params=policy.params, optimizer=policy.optimizer)
    copied = 0 if there and not actor.checkpoint.async_save else states
    copied += width * (size.trained if adapters else size.parameters)  # one rank gathers them
    if config.needs_critic:
        critic, offload = described_critic(config, model_config, size).size, critic_offload_of(config)
        kept += _kept(config, critic, width, config.critic, params=offload.params, optimizer=offload.optimizer)
        copied += _states(critic, width, config, config.critic.optim, once=True) + width * critic.parameters
    reference = config.actor_rollout_ref.ref.fsdp_config
    if has_reference(config) and (reference.param_offload or gathers(reference, config.trainer.world_size)):
        kept += _of_a_node(width * size.parameters, config)
    if config.distillation.param_offload:
        kept += _of_a_node(sum(teacher_bytes(config, width)), config)
    activations = max(_activations(config, model_config, size, width), default=0) * (config.trainer.world_size // nodes)
    costs = [MemoryCost(STATES, kept), MemoryCost(ACTIVATIONS, activations), MemoryCost(COPY, copied)]
    if config.rollout.checkpoint_engine.backend == BROADCAST:
        costs.append(MemoryCost(SENT, width * size.parameters))
    loading = _loading(config, model_config, size, width)
    if loading > sum(cost.bytes for cost in costs):  # which come later, when each rank has only its own part
        return [MemoryCost(LOADED, loading)]
    return [cost for cost in costs if cost.bytes]


def checkpoint_bytes(config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int) -> int:
    """What a checkpoint takes on disk: the weights or adapters, and the states of the optimizer; of a critic too."""
    adapters = lora_of(config.model, 0) is not None
    weights = width * (size.trained if adapters else size.parameters)
    written = weights + state_bytes(size.trained, width, config.actor.optim)
    if config.needs_critic:
        critic = described_critic(config, model_config, size).size
        written += state_bytes(critic.trained, width, config.critic.optim) + width * critic.parameters
    return written


def check_disk(run_dir: Path, needed: int) -> None:
    """RunError if a checkpoint of `needed` bytes, which every run writes after its last step, cannot fit there."""
    checkpoints = run_dir / "checkpoints"
    folder = checkpoints if checkpoints.is_dir() else run_dir
    disk = shutil.disk_usage(folder)
    if disk.total and needed > disk.free:  # some network file systems report no sizes
        left = shown_bytes(disk.free)
        raise RunError(
            f"a checkpoint takes about {shown_bytes(needed)} and {folder} has {left} free; free space, or "
            "set trainer.default_local_dir to a folder on another disk"
        )


def _loading(config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int) -> int:
    """The most that the ranks of a node hold while models are loaded, one after the other: each rank has all of a model
    before it is divided, and the weights of those before may rest there."""
    path, ranks, reference = str(config.model.path), config.trainer.world_size, config.actor_rollout_ref.ref.fsdp_config
    rests = policy_offload_of(config).params or gathers(config.actor.fsdp_config, ranks)
    models = [(LoadedModel(path, model_config, size.parameters, width), rests)]
    if has_reference(config):
        models.append((models[0][0], reference.param_offload or gathers(reference, ranks)))
    if config.needs_critic:
        critic, rests = described_critic(config, model_config, size), critic_offload_of(config).params
        whole = LoadedModel(str(config.critic.model.path or path), critic.model_config, critic.size.parameters, width)
        models.append((whole, rests or gathers(config.critic.fsdp_config, ranks)))
    models += [(teacher, config.distillation.param_offload) for teacher in teachers_of(config, width)]
    most = resting = 0
    for model, rests in models:
        most = max(most, resting + _while_loaded(config, model))
        resting += _of_a_node(model.width * model.parameters, config) if rests else 0
    return most


def _while_loaded(config: Config, model: LoadedModel) -> int:
    """What the ranks of a node hold of a model while they load it. Safetensors are mapped: one rank that takes the
    dtype of the file copies them to its device from there, several copy them first. GGUF is dequantised as float32."""
    ranks, stored = config.trainer.world_size, getattr(model.model_config, "dtype", None)
    half = torch.float16 if config.model.dtype == "float16" else torch.bfloat16
    if model.path.endswith(".gguf"):
        each = 4 + model.width
    else:
        each = 0 if ranks == 1 and stored == (half if model.width == 2 else torch.float32) else model.width
    return each * model.parameters * (ranks // config.trainer.nnodes)


def _of_a_node(size: int, config: Config, *, once: bool = False) -> int:
    """What the ranks of the first node hold of something that is divided. `once`: without second replicas."""
    shards = shards_of(config)
    held = config.trainer.world_size // config.trainer.nnodes
    return size * (min(held, shards) if once else held) // shards


def _states(size: ParameterCounts, width: int, config: Config, optim: OptimConfig, *, once: bool = False) -> int:
    """Masters and moments of the ranks of a node."""
    return _of_a_node(state_bytes(size.trained, width, optim), config, once=once)


def _kept(
    config: Config,
    size: ParameterCounts,
    width: int,
    learner: ActorConfig | CriticConfig,
    *,
    params: bool,
    optimizer: bool,
) -> int:
    """The bytes of a model that is trained."""
    states = _states(size, width, config, learner.optim)
    weights = _of_a_node(width * size.parameters, config)
    if gathers(learner.fsdp_config, config.trainer.world_size):
        return states + weights + _of_a_node(4 * size.trained, config)
    return (states if optimizer else 0) + (weights if params else 0)


def _activations(config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int) -> Iterator[int]:
    """What each model that is trained moves there in a micro-batch. torch rounds the pinned memory of a tensor up to a
    power of two, and keeps it for the next micro-batch."""
    trained: list[tuple[ModelConfig, int | None, PreTrainedConfig, int]]
    trained = [(config.model, config.model.recompute_num_layers, model_config, packed_tokens(config))]
    if config.needs_critic and config.critic.model.enable_activation_offload:
        critic = described_critic(config, model_config, size).model_config
        trained.append((config.critic.model, critic_recompute_of(config), critic, packed_tokens(config, critic=True)))
    for model, count, described, tokens in trained:
        if model.enable_activation_offload:
            text = described.get_text_config()
            layers = text.num_hidden_layers
            again = recomputed_layers(model, count, layers)
            own = _pinned(tokens * text.hidden_size * width)
            whole = sum(_pinned(tokens * numbers * width) for numbers in kept_by_layer(text, width))
            yield again * own + (layers - again) * whole


def _pinned(size: int) -> int:
    return 1 << (size - 1).bit_length()


def host_memory_problem(
    config: Config, model_config: PreTrainedConfig, size: ParameterCounts, width: int, free: int
) -> str | None:
    """Why a run cannot fit into `free` bytes of main memory, and what would help; None if it fits."""
    costs = {cost.what: cost.bytes for cost in host_costs(config, model_config, size, width)}
    needed = sum(costs.values())
    if needed <= MARGIN * free:
        return None
    items = ", ".join(f"{shown_bytes(number)} {what}" for what, number in costs.items())
    actor = config.actor
    waits = STATES in costs and actor.checkpoint.async_save
    advice = [
        "set actor.checkpoint.async_save=false" if waits else "",
        "set model.enable_activation_offload=false" if config.model.enable_activation_offload else "",
        "set actor.fsdp_config.optimizer_offload=false" if actor.fsdp_config.optimizer_offload else "",
        "set distillation.param_offload=false" if config.distillation.param_offload else "",
        "set actor.optim.optimizer=AdamW8bit" if actor.optim.optimizer == "AdamW" else "",
        "set model.lora_rank" if lora_of(config.model, 0) is None else "",
        "use a machine with more main memory",
    ]
    if LOADED in costs:
        fewer = "lower trainer.n_gpus_per_node, because each rank loads a whole model before it is divided"
        converted = "convert the GGUF file to safetensors"
        advice = [fewer if config.trainer.world_size > config.trainer.nnodes else "", advice[-1]]
        advice.insert(0, converted if str(config.model.path).endswith(".gguf") else "")
    return (
        f"the run needs about {shown_bytes(needed)} of main memory and {shown_bytes(free)} are free ({items}); "
        f"{', or '.join(one for one in advice if one)}"
    )
