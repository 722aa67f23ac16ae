"""Training over several processes, each with its shard of the weights, on this machine or on nodes of a Ray cluster.

`train`, `evaluate` and `sft` are `rally train`, `rally eval` and `rally sft` over `trainer.nnodes * n_gpus_per_node`
GPUs, or processes on the CPU. The calling process is rank 0. They must be called from the main thread.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

from rally.config import Config, SftConfig
from rally.config.actor import FsdpConfig
from rally.config.checks.multi_gpu import for_validation, with_rollout_servers
from rally.config.trainer import RayKwargs, RunConfig
from rally.distributed.controller import Controller, ControllerSettings
from rally.distributed.process_group import layout_of
from rally.models.load import pick_device
from rally.models.sharding import ALONE, Ranks
from rally.nodes import THIS_MACHINE, Node, NodeRequest, RayCluster, RaySettings, RunNodes
from rally.platforms import CUDA, platform_of
from rally.runs import evaluate as evaluation
from rally.runs import sft as sft_run
from rally.runs import train as run
from rally.runs.build.run_inputs import RunOutcome
from rally.track import RunConsole
from rally.types import RallyError

__all__ = ["evaluate", "sft", "train"]

SFT_TIMEOUT_SECONDS = 600.0
NOTICE_SECONDS = 10.0  # after the limit of heartbeats, for a node's loss to be noticed


def train(config: Config, console: RunConsole | None = None) -> RunOutcome:
    """Train as configured, over trainer.nnodes * n_gpus_per_node processes of which this is one."""
    console = console or RunConsole()
    configured, config = config.rollout.name, with_rollout_servers(config)
    if config.rollout.name != configured:
        console.note(_replaced(config))
    with _ranks(config, console) as (ranks, nodes):
        return run.train(config, console, ranks, nodes)


def _replaced(config: Config) -> str:
    """Who samples in place of the embedded engine, and why."""
    mode, gpus = config.trainer.v1.trainer_mode, config.trainer.world_size
    why = "" if config.separate else f" on {gpus} GPUs, where a synchronous run has an engine in every rank"
    if config.rollout.mode == "server":
        return f"{mode} samples on servers{why}: on those of rollout.server.url (rollout.name=rally)"
    count = f"rollout.name=rally rollout.data_parallel_size={config.rollout.data_parallel_size}"
    return f"{mode} samples on servers{why}, so Rally starts its own ({count})"


def evaluate(config: Config, console: RunConsole | None = None) -> RunOutcome:
    """Validate as configured, over trainer.nnodes * n_gpus_per_node processes of which this is one."""
    console, config = console or RunConsole(), with_rollout_servers(for_validation(config))
    with _ranks(config, console) as (ranks, nodes):
        return evaluation.evaluate(config, console, ranks, nodes)


def sft(config: SftConfig, console: RunConsole | None = None) -> RunOutcome:
    """Fine-tune as configured, over trainer.nnodes * n_gpus_per_node processes of which this is one."""
    console = console or RunConsole()
    if config.trainer.world_size == 1:
        return sft_run.sft(config, console)
    with (
        _nodes(config.trainer, RayKwargs(), console) as nodes,
        Controller(_settings(config, config.model.fsdp_config, SFT_TIMEOUT_SECONDS, nodes.trainer)) as controller,
    ):
        return sft_run.sft(config, console, controller)


@contextmanager
def _ranks(config: Config, console: RunConsole) -> Iterator[tuple[Ranks, RunNodes]]:
    """The ranks and the nodes of a run."""
    rollout = config.rollout
    apart = rollout.nnodes if rollout.name != "embedded" else 0  # nodes that only servers use
    with _nodes(config.trainer, config.ray_kwargs, console, apart, rollout.n_gpus_per_node or 0) as nodes:
        if config.trainer.world_size == 1:
            yield ALONE, nodes
            return
        if config.samples_in_ranks:
            _check_packages(config.trainer)
            console.note(f"each of the {config.trainer.world_size} ranks samples from a copy of the policy")
        seconds = float(config.actor_rollout_ref.nccl_timeout)
        with Controller(_settings(config, config.actor.fsdp_config, seconds, nodes.trainer)) as controller:
            yield controller, nodes


def _check_packages(trainer: RunConfig) -> None:
    """RallyError if the engines of the ranks cannot be served or asked, before anything is loaded."""
    if missing := [name for name in ("aiohttp", "starlette", "uvicorn") if find_spec(name) is None]:
        raise RallyError(
            f"engines in {trainer.world_size} ranks need the package {missing[0]}; run: pip install "
            "'rally-rl[servers,services]'"
        )


def _settings(
    config: Config | SftConfig, fsdp: FsdpConfig, seconds: float, nodes: Sequence[Node]
) -> ControllerSettings:
    trainer = config.trainer
    return ControllerSettings(
        world_size=trainer.world_size,
        device=pick_device(trainer.device).type,
        nodes=nodes,
        logs=trainer.run_dir / "ranks",
        timeout_seconds=seconds,
        reshard=fsdp.reshard_after_forward,
        layout=layout_of(config),
        **({"notice_seconds": trainer.node_heartbeat_timeout + NOTICE_SECONDS} if trainer.on_ray else {}),
    )


@contextmanager
def _nodes(
    trainer: RunConfig, keys: RayKwargs, console: RunConsole, rollout_nodes: int = 0, rollout_gpus: int = 0
) -> Iterator[RunNodes]:
    """The nodes of the run: this machine, or those that a Ray cluster reserves."""
    if not trainer.on_ray:
        yield THIS_MACHINE
        return
    os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")  # else asking for GPUs fixes which ones are visible
    platform = platform_of(pick_device(trainer.device))
    gpus = trainer.n_gpus_per_node if platform is not None else 0
    training = [
        NodeRequest(cpus=float(trainer.n_gpus_per_node), gpus=gpus, here=number == 0, platform=platform or CUDA)
        for number in range(trainer.nnodes)
    ]
    sampling = [
        NodeRequest(cpus=1.0, gpus=rollout_gpus if gpus else 0, platform=platform or CUDA) for _ in range(rollout_nodes)
    ]
    settings = RaySettings(
        address=keys.ray_init.address,
        may_start=trainer.nnodes == 1 and not rollout_nodes,
        num_cpus=keys.ray_init.num_cpus,
        wait_seconds=float(trainer.ray_wait_register_center_timeout),
        heartbeat_seconds=trainer.node_heartbeat_timeout,
    )
    folder = trainer.run_dir.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=folder, prefix=".seen-by-all-nodes-") as marker:
        cluster = RayCluster(settings, training + sampling, [Path.cwd(), Path(marker.name)], console.note).open()
    with cluster:
        nodes = RunNodes(cluster.nodes[: trainer.nnodes], cluster.nodes[trainer.nnodes :])
        if platform is not None:  # before it starts in this process
            os.environ[platform.visible_devices] = ",".join(nodes.trainer[0].gpus)
        yield nodes
