"""Checks of asynchronous training: keys without effect, and what a schedule or a server cannot do."""

from __future__ import annotations

from collections.abc import Iterator

from rally.config.checks.multi_gpu import with_rollout_servers
from rally.config.schema import ROLLOUT, Config

MODE = "trainer.v1.trainer_mode"
ACTOR = "actor_rollout_ref.actor"


def asynchronous(config: Config) -> Iterator[str]:
    modes = config.trainer.v1
    mode = modes.trainer_mode
    for name in ("colocate_async", "separate_async", "sampler"):
        used = name == mode or (name == "sampler" and config.asynchronous)
        for key in () if used else getattr(modes, name).model_dump(exclude_defaults=True):
            instead = "colocate_async" if name == "sampler" else name
            yield f"trainer.v1.{name}.{key} has no effect with {MODE}={mode}; leave it out, or set {MODE}={instead}."
    if not config.actor_rollout_ref.hybrid_engine and not config.separate:
        problem = "actor_rollout_ref.hybrid_engine=false asks for servers on devices of their own"
        yield f"{problem}; set {MODE}=separate_async, or leave it out."
    if config.asynchronous:
        yield from _schedule(config)
        yield from _publications(config)
        yield from _servers(config)


def _schedule(config: Config) -> Iterator[str]:
    lag, mode = f"trainer.v1.{config.trainer.v1.trainer_mode}.fixed_lag=true", config.trainer.v1.trainer_mode
    if config.rollout.deterministic and not config.fixed_lag:
        yield f"{ROLLOUT}.deterministic=true needs {lag} with {MODE}={mode}."
    if config.fixed_lag and config.batches_ahead != 1:
        ahead = f"the settings ask for {config.batches_ahead:g} batches ahead"
        yield f"{lag} samples one batch ahead, and {ahead}; leave those out."
    if config.fixed_lag and not config.async_training.partial_rollout:
        yield f"async_training.partial_rollout has no effect with {lag}; leave it out."
    if config.rollout.in_flight == "abort" and not config.fixed_lag:
        yield f"{ROLLOUT}.in_flight=abort would cut the episodes that run during an update; use keep or recompute."
    if config.rollout.skip_rollout:
        yield f"{ROLLOUT}.skip_rollout does not record weight versions; leave it out with {MODE}={mode}."


def _publications(config: Config) -> Iterator[str]:
    """Weights are published once per step. In verl they are after a number of mini-batches."""
    size, train, older = config.mini_batch_size, config.data.train_batch_size, config.async_training
    steps = {
        "trainer.v1.separate_async.parameter_sync_step": config.trainer.v1.separate_async.parameter_sync_step,
        "async_training.trigger_parameter_sync_step": older.trigger_parameter_sync_step,
    }
    for key, count in steps.items():
        if count is None:
            continue
        batches = count * (older.require_batches if key.startswith("async_training.") else 1)
        if batches * size != train:
            problem = f"{key}={count} publishes weights after {batches} mini-batches of {size} prompts"
            step = f"a step has data.train_batch_size={train} prompts"
            yield f"{problem}, and Rally does so after each step; {step}, so set that to {batches * size}."


def _servers(config: Config) -> Iterator[str]:
    rollout = with_rollout_servers(config).rollout
    mode = config.trainer.v1.trainer_mode
    if rollout.name == "embedded":
        return
    if rollout.checkpoint_engine.backend == "ipc":
        problem = f"{ROLLOUT}.checkpoint_engine.backend=ipc lets a server read weights that change while it samples"
        yield f"{problem}; leave it out with {MODE}={mode}."
    if config.separate and rollout.nnodes > 1 and not config.trainer.on_ray:
        yield f"{ROLLOUT}.nnodes={rollout.nnodes} needs a Ray cluster; set trainer.launcher=ray."
    parallel, gpus = rollout.tensor_model_parallel_size, rollout.n_gpus_per_node
    if config.separate and gpus is not None and gpus % parallel:
        problem = f"{ROLLOUT}.n_gpus_per_node={gpus} cannot be divided by tensor_model_parallel_size={parallel}"
        yield f"{problem}; change one of them."
