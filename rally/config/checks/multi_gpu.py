"""What several GPUs change of a configuration, and what they cannot do yet: one sentence for each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from rally.config.base import Root, look_up
from rally.config.errors import shown
from rally.config.schema import ROLLOUT, Config
from rally.config.sft import SftConfig

COUNT = "trainer.n_gpus_per_node"
ACTOR, REF = "actor_rollout_ref.actor", "actor_rollout_ref.ref"
OF_ALL = (
    f"{ACTOR}.ppo_micro_batch_size",
    f"{ROLLOUT}.log_prob_micro_batch_size",
    f"{REF}.log_prob_micro_batch_size",
)
ONE_ONLY = {
    f"{ACTOR}.fsdp_config.optimizer_offload": "an optimizer that waits in main memory",
    "critic.fsdp_config.optimizer_offload": "an optimizer that waits in main memory",
    f"{REF}.fsdp_config.param_offload": "a reference that waits in main memory",
    "trainer.val_only": "a run that only validates",
}
"""Keys that are for one GPU, and what they stand for."""


def served(config: Config) -> Config:
    """With the engine that a run has: a policy that lies on several GPUs is no module that could sample, so servers of
    Rally's own do, one for each GPU unless the configuration says how many."""
    count, rollout = config.trainer.n_gpus_per_node, config.rollout
    if count == 1 or rollout.name != "embedded":
        return config
    told = config.trainer.device == "cpu" or "data_parallel_size" in rollout.model_fields_set
    servers = rollout.data_parallel_size if told else count
    changed = rollout.model_copy(update={"name": "rally", "data_parallel_size": servers})
    parts = config.actor_rollout_ref.model_copy(update={"rollout": changed})
    return config.model_copy(update={"actor_rollout_ref": parts})


def several(config: Config) -> Iterator[str]:
    count = config.trainer.n_gpus_per_node
    if count == 1:
        return
    yield from _for_one(config, ONE_ONLY)
    yield from _of_all(config, OF_ALL, count)
    yield from _sizes(config, (ACTOR, REF, "critic"), count)
    yield from _kept_whole(config)
    if config.rollout.checkpoint_engine.backend == "ipc":
        told = f"{ROLLOUT}.checkpoint_engine.backend=ipc shows servers the weights of one GPU"
        yield f"{told}; leave it out, or set {COUNT}=1."


def sft_several(config: SftConfig) -> Iterator[str]:
    count = config.trainer.n_gpus_per_node
    if count == 1:
        return
    yield from _for_one(config, {"model.fsdp_config.optimizer_offload": "an optimizer that waits in main memory"})
    yield from _of_all(config, ("data.micro_batch_size",), count)
    yield from _sizes(config, ("model",), count)


def _kept_whole(config: Config) -> Iterator[str]:
    key = "fsdp_config.reshard_after_forward"
    for section in (REF, "critic"):
        if look_up(config, f"{ACTOR}.{key}") and not look_up(config, f"{section}.{key}"):
            yield f"{section}.{key}=false has no effect, since {ACTOR}.{key} is for all models; set that."


def _for_one(config: Root, keys: Mapping[str, str]) -> Iterator[str]:
    for key, what in keys.items():
        if value := look_up(config, key):
            yield f"{key}={shown(value)} asks for {what}, which is for one GPU; leave it out, or set {COUNT}=1."


def _of_all(config: Root, keys: Sequence[str], count: int) -> Iterator[str]:
    for key in keys:
        if look_up(config, key) is not None:
            yield f"{key} could mean one GPU or all {count}; leave it out and set {key}_per_gpu."


def _sizes(config: Root, sections: Sequence[str], count: int) -> Iterator[str]:
    for section in sections:
        size = look_up(config, f"{section}.fsdp_config.fsdp_size")
        if size not in (-1, count):
            yield f"{section}.fsdp_config.fsdp_size={size}: weights lie on all {count} GPUs; leave it out."
