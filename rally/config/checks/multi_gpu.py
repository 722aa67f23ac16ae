"""Checks for runs on several GPUs. Each problem is one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rally.config.base import Root, look_up
from rally.config.errors import shown
from rally.config.schema import ROLLOUT, Config
from rally.config.sft import SftConfig
from rally.config.trainer import RunConfig

COUNT = "trainer.n_gpus_per_node"
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
TOTAL_SIZES = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    f"{REF}.log_prob_micro_batch_size",
)
SINGLE_GPU_ONLY = {
    f"{ACTOR}.fsdp_config.optimizer_offload": "an optimizer in main memory",
    "critic.fsdp_config.optimizer_offload": "an optimizer in main memory",
    f"{REF}.fsdp_config.param_offload": "a reference model in main memory",
    "actor_rollout_ref.model.target_parameters": "LoRA on experts",
}
"""Keys that are supported on one GPU only, with a name of the feature."""
SFT_SINGLE_GPU_ONLY = {
    "model.fsdp_config.optimizer_offload": "an optimizer in main memory",
    "model.target_parameters": "LoRA on experts",
}


def multi_gpu(config: Config) -> Iterator[str]:
    count = config.trainer.world_size
    yield from _launcher(config.trainer)
    if config.uses_loop_workers and config.rollout.skip_rollout:
        workers = f"{ROLLOUT}.agent.num_workers={config.rollout.agent.num_workers}"
        yield f"{ROLLOUT}.skip_rollout does not work with {workers}, which play episodes elsewhere; set that to 1."
    if count == 1:
        return
    yield from _single_gpu_keys(config, SINGLE_GPU_ONLY)
    yield from _ambiguous_sizes(config, TOTAL_SIZES, count)
    yield from _fsdp_sizes(config, (ACTOR, REF, "critic"), count)
    yield from _reshard_keys(config)
    if config.samples_in_ranks and config.rollout.enable_rollout_routing_replay:
        problem = f"{ROLLOUT}.enable_rollout_routing_replay=true: the engines of several ranks return no expert choices"
        yield f"{problem}; set {ROLLOUT}.name=vllm or sglang, or {ACTOR}.router_replay.mode=R2 and leave it out."
    if config.rollout.checkpoint_engine.backend == "ipc":
        problem = f"{ROLLOUT}.checkpoint_engine.backend=ipc works on one GPU only"
        yield f"{problem}; leave it out, or set {COUNT}=1."


def sft_multi_gpu(config: SftConfig) -> Iterator[str]:
    count = config.trainer.world_size
    yield from _launcher(config.trainer)
    if count == 1:
        if config.trainer.launcher == "ray":
            yield "trainer.launcher=ray has no effect with one process; leave it out, or raise trainer.nnodes."
        return
    yield from _single_gpu_keys(config, SFT_SINGLE_GPU_ONLY)
    yield from _ambiguous_sizes(config, ("data.micro_batch_size",), count)
    yield from _fsdp_sizes(config, ("model",), count)


def _launcher(trainer: RunConfig) -> Iterator[str]:
    if trainer.launcher == "local" and trainer.nnodes > 1:
        yield f"trainer.launcher=local is for one machine, and trainer.nnodes={trainer.nnodes}; leave launcher out."
    key = "node_heartbeat_timeout"
    if not trainer.on_ray and getattr(trainer, key) != type(trainer).model_fields[key].default:
        yield f"trainer.{key} has no effect without Ray; leave it out, or set trainer.nnodes above 1."


def _reshard_keys(config: Config) -> Iterator[str]:
    key = "fsdp_config.reshard_after_forward"
    for section in (REF, "critic"):
        if look_up(config, f"{ACTOR}.{key}") and not look_up(config, f"{section}.{key}"):
            yield f"{section}.{key}=false has no effect: {ACTOR}.{key} applies to all models; set that."


def _single_gpu_keys(config: Root, keys: Mapping[str, str]) -> Iterator[str]:
    for key, what in keys.items():
        if value := look_up(config, key):
            yield f"{key}={shown(value)} asks for {what}, which works on one GPU only; leave it out, or set {COUNT}=1."


def _ambiguous_sizes(config: Root, keys: Sequence[str], count: int) -> Iterator[str]:
    for key in keys:
        if (value := look_up(config, key)) is not None:
            yield f"{key}={value} is ambiguous with {count} GPUs; leave it out and set {key}_per_gpu."


def _fsdp_sizes(config: Root, sections: Sequence[str], count: int) -> Iterator[str]:
    for section in sections:
        size = look_up(config, f"{section}.fsdp_config.fsdp_size")
        if size not in (-1, count):
            yield f"{section}.fsdp_config.fsdp_size={size} must be -1 or {count}, the number of GPUs; leave it out."


def served(config: Config) -> Config:
    """The configuration with the engine that the run uses: the configured one. Earlier documentation named this
    function, when a run on several GPUs replaced the embedded engine by servers."""
    return config
