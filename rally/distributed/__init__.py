"""Training over several processes of one machine, each with its shard of the weights.

`train` and `sft` are `rally train` and `rally sft` over `trainer.n_gpus_per_node` GPUs, or processes on the CPU. The
calling process is rank 0. They must be called from the main thread.
"""

from __future__ import annotations

from rally.config import Config, SftConfig
from rally.config.actor import FsdpConfig
from rally.config.checks.multi_gpu import with_rollout_servers
from rally.config.trainer import RunConfig
from rally.distributed.controller import Controller, ControllerSettings
from rally.models.load import pick_device
from rally.runs import sft as sft_run
from rally.runs import train as run
from rally.runs.build.run_inputs import RunOutcome
from rally.track import RunConsole

__all__ = ["sft", "train"]

SFT_TIMEOUT_SECONDS = 600.0


def train(config: Config, console: RunConsole | None = None) -> RunOutcome:
    """Train as configured, over trainer.n_gpus_per_node processes of which this is one."""
    console = console or RunConsole()
    if config.trainer.n_gpus_per_node == 1:
        return run.train(config, console)
    configured, config = config.rollout.name, with_rollout_servers(config)
    if config.rollout.name != configured:
        console.note(
            f"the policy is sharded over {config.trainer.n_gpus_per_node} ranks and cannot generate, so Rally starts "
            f"its own servers (rollout.name=rally rollout.data_parallel_size={config.rollout.data_parallel_size})"
        )
    seconds = float(config.actor_rollout_ref.nccl_timeout)
    with Controller(_settings(config.trainer, config.actor.fsdp_config, seconds)) as controller:
        return run.train(config, console, controller)


def sft(config: SftConfig, console: RunConsole | None = None) -> RunOutcome:
    """Fine-tune as configured, over trainer.n_gpus_per_node processes of which this is one."""
    if config.trainer.n_gpus_per_node == 1:
        return sft_run.sft(config, console)
    with Controller(_settings(config.trainer, config.model.fsdp_config, SFT_TIMEOUT_SECONDS)) as controller:
        return sft_run.sft(config, console, controller)


def _settings(trainer: RunConfig, fsdp: FsdpConfig, seconds: float) -> ControllerSettings:
    return ControllerSettings(
        world_size=trainer.n_gpus_per_node,
        device=pick_device(trainer.device).type,
        logs=trainer.run_dir / "ranks",
        timeout_seconds=seconds,
        reshard=fsdp.reshard_after_forward,
    )
