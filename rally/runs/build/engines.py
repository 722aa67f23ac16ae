"""Builds the rollout engine from a Config: embedded, or over servers that are launched or already running.

For servers this includes GPU placement, launch options, the transport of weights and the canary's oracle.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging

from rally.config import Config
from rally.config.checks.multi_gpu import with_rollout_servers
from rally.config.rollout import BROADCAST
from rally.engines import EmbeddedEngine
from rally.engines.base import EngineError, TrainingEngine
from rally.engines.embedded.engine import MirroredEngine
from rally.engines.remote import (
    BroadcastWeights,
    ClientSettings,
    CudaIpcWeights,
    DeltaFiles,
    JoinFolder,
    Launch,
    LaunchedServer,
    Oracle,
    Rally,
    RemoteEngine,
    RemoteSettings,
    ServerApi,
    ServerReplica,
    Sglang,
    StagedWeights,
    Vllm,
    WeightFiles,
    WeightTransport,
    choose_weights_folder,
    join_folder,
    remove_stale_folders,
    tolerance_of,
)
from rally.engines.remote.launched_server import probe_package
from rally.engines.remote.weight_broadcast import LOOPBACKS
from rally.engines.router.server_state import RouterSettings
from rally.models import attention
from rally.models.lora import has_adapters, merged_weights, plain_twin
from rally.models.residence import device_of, on_device
from rally.models.routing import routers_of
from rally.models.sharding import model_state, ranks_of
from rally.models.token_masks import Grammars
from rally.models.vision import patches_of
from rally.nodes import LOCAL, THIS_MACHINE, Node, RunNodes
from rally.platforms import CUDA, Platform, has_kernels, named_platform, on_accelerator, platform_of, shared_backend
from rally.runs.build.rollout import engine_settings_of, lends_memory, sampling_of
from rally.runs.build.run_inputs import RunInputs
from rally.train.checkpoint.server_weight_files import WeightWriter
from rally.train.policy import Policy
from rally.train.rank_messages import ComputeLogits, GatherWeights
from rally.types import SamplingParams
from rally.util.background_threads import available_cores
from rally.util.private_files import private_folder
from rally.util.rendezvous import LOOPBACK, interface_of

MAX_FRONTENDS, CORES_PER_FRONTEND = 4, 4
Decode = Callable[[Sequence[int]], str]
Place = tuple[int, ...]
"""The GPUs of one server, by their indices in this process; empty on a machine without GPUs."""
SERVER_APIS: dict[str, Callable[[], ServerApi]] = {"rally": Rally, "vllm": Vllm, "sglang": Sglang}


def remote_engine_of(
    config: Config,
    model: PreTrainedModel,
    sampling: SamplingParams,
    decode: Decode | None = None,
    nodes: RunNodes = THIS_MACHINE,
) -> RemoteEngine:
    """The engine over launched servers or over running ones (rollout.mode). `decode` finds stop strings."""
    attention.install(model)  # for the packed forward of training; the embedded engine installs it itself
    rollout = config.rollout
    if config.separate and rollout.mode != "server" and shares_gpu(config, model, nodes):
        raise EngineError(
            "trainer_mode=separate_async needs GPUs for the servers that the trainer does not use, and there are too "
            "few; lower trainer.n_gpus_per_node or rollout.data_parallel_size, reserve nodes for the servers "
            "(rollout.nnodes with trainer.launcher=ray), or set trainer_mode=colocate_async"
        )
    if rollout.mode == "server":
        api = SERVER_APIS[rollout.server_kind]()
        settings = client_settings_of(config, model, decode)
        servers = [ServerReplica(url, api, settings) for url in rollout.server_urls]
    else:
        servers = own_servers_of(config, model, decode, nodes)
    return RemoteEngine(
        servers,
        transport_of(config, model, nodes),
        oracle_of(model),
        RemoteSettings(
            max_model_len=config.max_model_len,
            sampling=sampling,
            in_flight=rollout.in_flight,
            max_restarts=rollout.server.max_attempts,
            restart_delay=rollout.server.retry_delay,
            join_seconds=rollout.server.join_timeout,
            sleeps=rollout.mode != "server" and sleeps(config, model, nodes),
            router=router_settings_of(config),
        ),
        joining_of(config, model, decode),
    )


def joining_of(config: Config, model: PreTrainedModel, decode: Decode | None = None) -> JoinFolder | None:
    """Where servers of the run's kind announce themselves to it. Beside the engines of ranks it is Rally's own. None
    where images are shown: a server that joins may have another image processor."""
    if patches_of(model) is not None:
        return None
    api = SERVER_APIS.get(config.rollout.server_kind, Rally)()
    settings = client_settings_of(config, model, decode)
    return JoinFolder(join_folder(config.run_dir), lambda one: ServerReplica(one.url, api, settings, one.token))


def router_settings_of(config: Config) -> RouterSettings:
    server, running = config.rollout.server, config.rollout.max_num_seqs
    # So that requests always wait. While requests go on during an update, the canary must not wait for one to end.
    most = max(1, running - 1) if config.asynchronous else running + -(-running // 4)
    return RouterSettings(
        max_in_flight=server.max_in_flight or most,
        max_tries=server.max_tries,
        give_up_after=server.give_up_after,
        health_every=server.health_every,
        seed=config.rollout_seed,
    )


def transport_of(config: Config, model: PreTrainedModel, nodes: RunNodes = THIS_MACHINE) -> WeightTransport:
    """How weights reach the servers (rollout.checkpoint_engine.backend)."""
    ipc = uses_cuda_ipc(config, model, nodes)
    if ipc and not (has_kernels(model.device) and shares_one_gpu(config, model, nodes)):
        raise EngineError(
            "rollout.checkpoint_engine.backend=ipc needs one server on one CUDA GPU, the trainer's; leave it out here"
        )
    folder = weights_folder_of(config, model, nodes)
    remove_stale_folders(folder)
    weights = functools.partial(full_weights, model)
    first = functools.partial(write_full_model, model, _bucket(config), _untied(config, model))
    if config.rollout.checkpoint_engine.backend == BROADCAST:
        return _broadcast_of(config, model, nodes, first, folder)
    writer = WeightWriter(first, weights)
    if config.rollout.checkpoint_engine.backend in ("delta", "delta_sharded"):
        local = choose_weights_folder(_size(model), config.run_dir / "weights")
        remove_stale_folders(local)
        return DeltaFiles(writer, local, folder, full_every=config.rollout.checkpoint_engine.full_every)
    files = WeightFiles(writer, folder)
    return CudaIpcWeights(weights, files) if ipc else files


def _broadcast_of(
    config: Config, model: PreTrainedModel, nodes: RunNodes, first: Callable[[Path], None], folder: Path
) -> BroadcastWeights:
    if config.rollout.mode != "server" and shares_gpu(config, model, nodes):
        raise EngineError(
            "rollout.checkpoint_engine.backend=nccl needs servers on GPUs of their own, and these would share the "
            "trainer's; leave it out, or use trainer.v1.trainer_mode=separate_async"
        )
    if ranks_of(model).world_size > 1 and nodes.all == [LOCAL]:
        _check_interface(config, platform_of(device_of(model)))
    staged = StagedWeights(device_of(model), untied=_untied(config, model))
    writer = WeightWriter(first, staged.weights)
    rallys_own = config.rollout.server_kind == "rally"
    return BroadcastWeights(
        functools.partial(full_weights, model),
        staged,
        WeightFiles(writer, folder),
        writes_later=lambda: writer.knows_layout,
        names_of_files=not rallys_own,
        workers=1 if rallys_own else config.rollout.tensor_model_parallel_size,
    )


def _check_interface(config: Config, platform: Platform | None) -> None:
    """EngineError if this process cannot reach its servers by the backend of GPUs, which uses the same interfaces for
    all groups of a process: ranks of one machine have let it use loopback only."""
    if platform is None:
        return
    away = [url for url in config.rollout.server_urls if urlsplit(url).hostname not in LOOPBACKS]
    if away and os.environ.get(platform.socket_interface) == interface_of(LOOPBACK):
        raise EngineError(
            f"rollout.checkpoint_engine.backend=nccl cannot reach the server {urlsplit(away[0]).hostname}: the "
            f"{config.trainer.world_size} ranks of this machine use its loopback interface only; set the variable "
            f"{platform.socket_interface} to the network interface from which the servers are reached, or leave the "
            "key out"
        )


def uses_cuda_ipc(config: Config, model: PreTrainedModel, nodes: RunNodes = THIS_MACHINE) -> bool:
    """Whether a server reads the weights from the trainer's GPU memory. SGLang does so where possible. vLLM does so
    only if asked to: it would have to be started in a way that lets any client of its port run code in it."""
    rollout = config.rollout
    able = rollout.server_kind == "sglang" and rollout.mode != "server" and not has_adapters(model)
    able = able and has_kernels(model.device)
    able = able and not config.asynchronous  # the trainer's weights change while servers sample
    backend = rollout.checkpoint_engine.backend
    return backend == "ipc" or (backend == "naive" and able and shares_one_gpu(config, model, nodes))


def weights_folder_of(config: Config, model: PreTrainedModel, nodes: RunNodes = THIS_MACHINE) -> Path:
    """The folder through which servers get weights: on disk if a server is on another machine, else in shared
    memory."""
    if (named := config.rollout.checkpoint_engine.folder) is not None:
        return private_folder(Path(named))
    on_disk = config.run_dir.absolute() / "weights"
    if nodes.all != [LOCAL] or any(urlsplit(url).hostname not in LOOPBACKS for url in config.rollout.server_urls):
        on_disk.mkdir(parents=True, exist_ok=True)
        return on_disk
    return choose_weights_folder(_size(model), on_disk)


def _size(model: PreTrainedModel) -> int:
    return sum(p.numel() * p.element_size() for p in model.parameters())


def own_servers_of(
    config: Config, model: PreTrainedModel, decode: Decode | None = None, nodes: RunNodes = THIS_MACHINE
) -> list[ServerReplica]:
    """rollout.data_parallel_size servers, each on its own GPUs if there are any. With a Ray cluster they are spread
    over the rollout nodes or, if there are none, over the trainer's nodes."""
    rollout, platform = config.rollout, platform_of(model.device) or CUDA
    plan = launch_of(config, model, nodes)
    api = SERVER_APIS[rollout.server_kind]()

    def server(number: int, node: Node, gpus: str) -> LaunchedServer:
        return LaunchedServer(
            api,
            lambda folder, port: api.command(replace(plan, folder=folder, port=port, host=node.address)),
            config.run_dir.absolute() / "servers" / f"{rollout.server_kind}-{number}.log",
            port_start=rollout.port_start,
            environment={**api.environment(plan.by_handles), **({platform.visible_devices: gpus} if gpus else {})},
            settings=client_settings_of(config, model, decode),
            node=node,
        )

    if nodes.all == [LOCAL]:
        return [
            server(number, LOCAL, visible(place, platform)) for number, place in enumerate(places_of(config, model))
        ]
    count, each = rollout.data_parallel_size, rollout.tensor_model_parallel_size
    spread = node_placement(nodes.rollout or nodes.trainer, count, each, on_cpu=device_of(model).type == "cpu")
    return [server(number, node, gpus) for number, (node, gpus) in enumerate(spread)]


def node_placement(nodes: Sequence[Node], replicas: int, each: int, *, on_cpu: bool) -> list[tuple[Node, str]]:
    """The node and the GPUs of each server: server i is on node i modulo their number."""
    chosen = []
    for number in range(replicas):
        node, first = nodes[number % len(nodes)], number // len(nodes) * each
        gpus = node.gpus[first : first + each]
        if not on_cpu and len(gpus) < each:
            raise EngineError(
                f"{replicas} servers of tensor_model_parallel_size={each} need more GPUs than the {len(node.gpus)} "
                f"reserved on node {node.name}; lower rollout.data_parallel_size, or raise rollout.n_gpus_per_node"
            )
        chosen.append((node, ",".join(gpus)))
    return chosen


def places_of(config: Config, model: PreTrainedModel) -> list[Place]:
    rollout, mine = config.rollout, own_gpus(model)
    gpus = named_platform(config.trainer.device).device_count()
    return placement(gpus, mine, rollout.data_parallel_size, rollout.tensor_model_parallel_size)


def own_gpus(model: PreTrainedModel) -> range:
    """The GPUs of the trainer: each rank is on the GPU of its number, or several share one."""
    if (platform := platform_of(device_of(model))) is None:
        return range(0)
    first, ranks = device_of(model).index or 0, ranks_of(model).world_size
    return range(first, first + (ranks if shared_backend() is None else min(ranks, platform.device_count())))


def shares_gpu(config: Config, model: PreTrainedModel, nodes: RunNodes = THIS_MACHINE) -> bool:
    """Whether launched servers are on a GPU of the trainer."""
    if nodes.all != [LOCAL]:
        return on_accelerator(device_of(model)) and not nodes.rollout
    mine = own_gpus(model)
    return any(gpu in mine for place in places_of(config, model) for gpu in place)


def shares_one_gpu(config: Config, model: PreTrainedModel, nodes: RunNodes = THIS_MACHINE) -> bool:
    """Whether there is one server, on the only GPU of a trainer of one rank, of this machine."""
    if nodes.all != [LOCAL]:
        return False
    mine = own_gpus(model)
    return len(mine) == ranks_of(model).world_size == 1 and places_of(config, model) == [tuple(mine)]


def sleeps(config: Config, model: PreTrainedModel, nodes: RunNodes = THIS_MACHINE) -> bool:
    """Whether servers free their GPU memory during the update. Rally's own server cannot."""
    able = config.rollout.server_kind != "rally" and not config.asynchronous  # they sample during the update
    return able and lends_memory(config) and shares_gpu(config, model, nodes)


def placement(gpus: int, mine: Collection[int], replicas: int, each: int) -> list[Place]:
    """The GPUs of each server: those that the trainer does not use or, if these are too few, any."""
    if gpus == 0:
        if each > 1:
            raise EngineError(
                f"rollout.tensor_model_parallel_size={each} needs {each} GPUs and there are none; set it to 1"
            )
        return [()] * replicas
    needed = replicas * each
    if needed > gpus:
        raise EngineError(
            f"rollout.data_parallel_size={replicas} servers of tensor_model_parallel_size={each} need {needed} GPUs "
            f"and this machine has {gpus}; lower one of them"
        )
    others = [gpu for gpu in range(gpus) if gpu not in mine]
    free = others if len(others) >= needed else range(gpus)
    return [tuple(free[i * each : (i + 1) * each]) for i in range(replicas)]


def visible(place: Place, platform: Platform = CUDA) -> str:
    """The visible devices of a child process: the machine's names of the GPUs, not their indices in this process."""
    names = platform.visible(max(place, default=-1) + 1)
    return ",".join(names[gpu] for gpu in place)


def launch_of(config: Config, model: PreTrainedModel, nodes: RunNodes = THIS_MACHINE) -> Launch:
    rollout = config.rollout
    return Launch(
        python=rollout.server.python or sys.executable,
        folder="",
        port=0,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=config.max_model_len,
        max_num_seqs=rollout.max_num_seqs,
        max_num_batched_tokens=rollout.max_num_batched_tokens,
        memory_share=rollout.gpu_memory_utilization,
        tensor_parallel=rollout.tensor_model_parallel_size,
        frontends=frontends(available_cores(), rollout.data_parallel_size),
        on_cpu=device_of(model).type == "cpu",
        seed=config.rollout_seed,
        eager=rollout.enforce_eager,
        log_level=rollout.log_level.lower() if rollout.log_level else None,
        raw_logprobs=rollout.temperature == 1,
        in_flight=rollout.in_flight,
        sleeps=sleeps(config, model, nodes),
        by_handles=uses_cuda_ipc(config, model, nodes),
        by_broadcast=rollout.checkpoint_engine.backend == BROADCAST,
        images="" if patches_of(model) is None else str(config.model.path),
        routes=rollout.enable_rollout_routing_replay,
        extra=rollout.engine_kwargs.vllm or rollout.engine_kwargs.sglang or _own_extra(config),
    )


def frontends(cores: int, servers: int) -> int:
    """HTTP processes per server. One of vLLM's takes 2 ms per request, during which other requests and the GPU wait."""
    return max(1, min(MAX_FRONTENDS, cores // (CORES_PER_FRONTEND * servers)))


def _own_extra(config: Config) -> dict[str, Any]:
    """Further options of Rally's own server."""
    if config.rollout.server_kind != "rally":
        return {}
    options, drafts = dict(config.data.mm_processor_kwargs), config.rollout.speculative_config
    return {
        "tokenizer": str(config.model.tokenizer_path or config.model.path),
        "speculative_config": None if drafts.method is None else drafts.model_dump(),
        "mm_processor_kwargs": options or None,
    }


def client_settings_of(config: Config, model: PreTrainedModel, decode: Decode | None = None) -> ClientSettings:
    server = config.rollout.server
    return ClientSettings(
        timeout=server.timeout,
        max_connections=server.max_connections,
        start_seconds=server.max_start_wait_time,
        vocabulary=model.config.get_text_config().vocab_size,
        max_model_len=config.max_model_len,
        route_experts=_route_experts(config, model),
        decode=decode,
    )


def _route_experts(config: Config, model: PreTrainedModel) -> int | None:
    """The experts of a token, if rollouts must return the choices of the routers."""
    if not config.rollout.enable_rollout_routing_replay:
        return None
    if not (routers := routers_of(model)):
        raise EngineError(
            f"{type(model).__name__} has no routers whose choices can be replayed; leave "
            "rollout.enable_rollout_routing_replay and actor.router_replay.mode out"
        )
    return routers[0].chosen


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    logits_TV: Tensor = model(input_ids=torch.tensor([list(ids)], device=device_of(model)), use_cache=False).logits[0]
    return logits_TV


def oracle_of(model: PreTrainedModel) -> Oracle:
    def forward(ids: Sequence[int]) -> Tensor:
        with ranks_of(model).broadcast(ComputeLogits(ids)), on_device(model):
            return logits_of(model, ids)

    vocabulary = model.config.get_text_config().vocab_size
    return Oracle(forward=forward, vocabulary=vocabulary, tolerance=tolerance_of(model.dtype))


def write_full_model(model: PreTrainedModel, bucket: str, untied: bool, folder: Path) -> None:
    """Write a model folder that any server loads, with adapters merged. `untied`: write the output head as a separate
    weight even if the policy ties it to its embedding."""
    weights = full_weights(model)
    twin = plain_twin(model)
    if untied:
        twin.config.tie_word_embeddings = False
        twin = plain_twin(twin)
        weights = {name: value.clone() for name, value in weights.items()}
    with _quietly():
        twin.save_pretrained(folder, state_dict=weights, max_shard_size=bucket)


def full_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    with ranks_of(model).broadcast(GatherWeights()), on_device(model):
        return merged_weights(model) if has_adapters(model) else model_state(model)


@contextmanager
def _quietly() -> Iterator[None]:
    """Hides the progress bars of transformers: every step writes a model."""
    enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if enabled:
            logging.enable_progress_bar()


def _untied(config: Config, model: PreTrainedModel) -> bool:
    """Works around vLLM on a CPU: it does not refresh its packed copy of a tied output head when weights are
    reloaded."""
    return config.rollout.server_kind == "vllm" and device_of(model).type == "cpu"


def _bucket(config: Config) -> str:
    return f"{config.rollout.checkpoint_engine.update_weights_bucket_megabytes}MB"


def check_servers_installed(config: Config) -> None:
    """EngineError, before weights are loaded, if this machine is to start servers and lacks their package."""
    rollout = with_rollout_servers(config).rollout
    launched = rollout.name != "embedded" and rollout.mode != "server" and config.trainer.nnodes == 1
    if launched and rollout.server_kind in ("vllm", "sglang"):
        probe_package(rollout.server.python or sys.executable, rollout.server_kind)


def engine_of(config: Config, inputs: RunInputs, policy: Policy, nodes: RunNodes = THIS_MACHINE) -> TrainingEngine:
    if config.rollout.name != "embedded":
        return remote_engine_of(config, policy.model, sampling_of(config, inputs.codec), inputs.codec.decode, nodes)
    settings = engine_settings_of(config, inputs)
    grammars = Grammars(inputs.tokenizer, policy.model.config.get_text_config().vocab_size, inputs.codec.stop_ids)
    if samples_during_update(config, policy.model):
        attention.install(policy.model)  # the engine installs it in its copy
        return MirroredEngine(policy.model, settings, decode=inputs.codec.decode, grammars=grammars)
    return EmbeddedEngine(policy.model, settings, decode=inputs.codec.decode, grammars=grammars)


def samples_during_update(config: Config, model: PreTrainedModel) -> bool:
    """Whether a batch is sampled while the policy trains on the one before: by servers, or by an embedded engine on the
    CPU. On a GPU the two would share its memory and its kernels' streams; there a fixed lag samples first and updates
    then."""
    return config.fixed_lag and (config.rollout.name != "embedded" or device_of(model).type == "cpu")
