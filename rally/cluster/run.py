"""`rally train` over several GPUs of this machine, or processes on its CPU: the same run, each with its part."""

from __future__ import annotations

from rally.cluster.captain import Captain, CaptainSettings
from rally.config import Config
from rally.config.several import served
from rally.track import RunConsole
from rally.train import run
from rally.train.load import pick_device


def train(config: Config, console: RunConsole | None = None) -> run.Outcome:
    """Train as configured, over trainer.n_gpus_per_node processes of which this is one."""
    console = console or RunConsole()
    if config.trainer.n_gpus_per_node == 1:
        return run.train(config, console)
    asked, config = config.rollout.name, served(config)
    if config.rollout.name != asked:
        console.note(
            f"the policy lies on {config.trainer.n_gpus_per_node} ranks, so rollouts are sampled by servers of Rally's "
            f"own (rollout.name=rally rollout.data_parallel_size={config.rollout.data_parallel_size})"
        )
    settings = CaptainSettings(
        count=config.trainer.n_gpus_per_node,
        device=pick_device(config.trainer.device).type,
        logs=config.run_dir / "ranks",
        order_seconds=float(config.actor_rollout_ref.nccl_timeout),
        reshard=config.actor.fsdp_config.reshard_after_forward,
    )
    with Captain(settings) as captain:
        return run.train(config, console, captain)
