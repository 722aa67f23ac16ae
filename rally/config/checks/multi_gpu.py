"""Checks for runs on several GPUs. Each problem is one sentence."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rally.config.base import Root, look_up
from rally.config.errors import shown
from rally.config.schema import ROLLOUT, Config
from rally.config.sft import SftConfig
from rally.config.trainer import RunConfig

COUNT, ULYSSES = "trainer.n_gpus_per_node", "ulysses_sequence_parallel_size"
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
TOTAL_SIZES = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    f"{REF}.log_prob_micro_batch_size",
)
SINGLE_GPU_ONLY = {
    "actor_rollout_ref.model.target_parameters": "LoRA on experts",
}
"""Keys that are supported on one GPU only, with a name of the feature."""
BLACK_BOX = ("black_box", "rally.gateway.BlackBoxAgentLoop")
ONE_GATEWAY = ("workers", "port")
"""Options of black_box that need the gateway of one process: agents connect to a port that is known before."""
SFT_SINGLE_GPU_ONLY = {
    "model.target_parameters": "LoRA on experts",
}


def with_rollout_servers(config: Config) -> Config:
    """The configuration with the engine that the run really uses.

    Asynchronous training on several GPUs replaces the embedded engine by servers of Rally's own, which sample during an
    update: one per GPU, unless data_parallel_size is set. separate_async needs servers on one GPU, too. With GPUs for
    servers (rollout.n_gpus_per_node) there are as many servers as these GPUs hold.
    """
    if config.trainer.val_only:  # it samples nothing during an update
        config = for_validation(config)
    count, rollout = config.trainer.world_size, config.rollout
    replaced = config.separate or (count > 1 and config.asynchronous)
    name = "rally" if rollout.name == "embedded" and replaced else rollout.name
    servers = rollout.data_parallel_size
    if "data_parallel_size" not in rollout.model_fields_set:
        if rollout.n_gpus_per_node is not None and (config.separate or reserves_nodes(config)):
            gpus = max(1, rollout.nnodes) * rollout.n_gpus_per_node
            servers = max(1, gpus // rollout.tensor_model_parallel_size)
        elif name != rollout.name and not config.separate and config.trainer.device != "cpu":
            servers = count
    if (name, servers) == (rollout.name, rollout.data_parallel_size):
        return config
    changed = rollout.model_copy(update={"name": name, "data_parallel_size": servers})
    parts = config.actor_rollout_ref.model_copy(update={"rollout": changed})
    return config.model_copy(update={"actor_rollout_ref": parts})


def reserves_nodes(config: Config) -> bool:
    """Whether nodes of a Ray cluster are reserved for servers that the run starts."""
    rollout = config.rollout
    own = rollout.name != "embedded" and rollout.mode != "server"
    return own and rollout.nnodes > 0 and config.trainer.on_ray


def for_validation(config: Config) -> Config:
    """The configuration of a run that only validates: nothing is sampled ahead of an update, so it is synchronous."""
    modes = config.trainer.v1.model_copy(update={"trainer_mode": "sync"})
    trainer = config.trainer.model_copy(update={"v1": modes})
    return config.model_copy(update={"trainer": trainer}) if config.asynchronous else config


def sends_images(config: Config) -> bool:
    """Whether the engine of a run is sent images: one of Rally's own, unless it ran before the run."""
    rollout = with_rollout_servers(config).rollout
    return rollout.name == "embedded" or (rollout.server_kind == "rally" and rollout.mode != "server")


def multi_gpu(config: Config) -> Iterator[str]:
    count, loop_workers = config.trainer.world_size, with_rollout_servers(config).uses_loop_workers
    yield from _launcher(config.trainer, loop_workers)
    if loop_workers and config.rollout.skip_rollout:
        workers = f"{ROLLOUT}.agent.num_workers={config.rollout.agent.num_workers}"
        yield f"{ROLLOUT}.skip_rollout does not work with {workers}, which play episodes elsewhere; set that to 1."
    if loop_workers and config.agent_loop_name in BLACK_BOX:
        options = config.rollout.agent_loop_config.model_extra or {}
        for option in (name for name in ONE_GATEWAY if options.get(name)):
            key = f"{ROLLOUT}.agent_loop_config.{option}={shown(options[option])}"
            workers = f"{ROLLOUT}.agent.num_workers={config.rollout.agent.num_workers}"
            yield f"{key} does not work with {workers}: every loop worker has a gateway of its own; set that to 1."
    if count == 1:
        return
    yield from _single_gpu_keys(config, SINGLE_GPU_ONLY)
    yield from _ambiguous_sizes(config, TOTAL_SIZES, count)
    yield from _fsdp_sizes(config, (ACTOR, REF, "critic"), count)
    yield from _sequence_sizes(config, ((ACTOR, f"{ACTOR}.fsdp_config"), (REF, f"{REF}.fsdp_config")), count)
    yield from _sequence_sizes(config, ((ACTOR,), ("critic", "critic.fsdp_config")), count)
    yield from _reshard_keys(config)
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
    yield from _sequence_sizes(config, (("", "model.fsdp_config"),), count)


def _launcher(trainer: RunConfig, loop_workers: bool = False) -> Iterator[str]:
    if trainer.launcher == "local" and trainer.nnodes > 1:
        yield f"trainer.launcher=local is for one machine, and trainer.nnodes={trainer.nnodes}; leave launcher out."
    key = "node_heartbeat_timeout"
    watched = trainer.on_ray or loop_workers
    if not watched and getattr(trainer, key) != type(trainer).model_fields[key].default:
        yield f"trainer.{key} has no effect without Ray or loop workers; leave it out, or set trainer.nnodes above 1."


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
    """The first section's size applies to all models."""
    key = "fsdp_config.fsdp_size"
    first, *others = ((f"{section}.{key}", look_up(config, f"{section}.{key}")) for section in sections)
    name, size = first
    if size != -1 and (size == 0 or count % size):
        yield f"{name}={size} must divide {count}, the number of GPUs; choose another size, or leave it out for all."
    for other, value in others:
        if value != -1 and value != (count if size == -1 else size):
            yield f"{other}={value} has no effect: {name}={size} applies to all models; set that, or leave it out."


def _sequence_sizes(config: Root, sections: Sequence[Sequence[str]], count: int) -> Iterator[str]:
    """The first section's size, by either of its keys, applies to all models. 1 is not set."""
    written = [
        [(key, size) for place in places if (size := look_up(config, key := f"{place}.{ULYSSES}".lstrip("."))) > 1]
        for places in sections
    ]
    ruling = dict(written[0])
    for key, size in ruling.items():
        if count % size:
            yield f"{key}={size} must divide {count}, the number of GPUs; choose another size, or set it to 1."
    if len(set(ruling.values())) > 1:
        yield f"{' and '.join(f'{key}={size}' for key, size in ruling.items())} must be equal; keep one of them."
    for key, size in (one for some in written[1:] for one in some):
        if size not in ruling.values():
            yield f"{key}={size} has no effect: {ACTOR}.{ULYSSES} applies to all models; set that, or leave it out."


served = with_rollout_servers  # the name that earlier documentation used
