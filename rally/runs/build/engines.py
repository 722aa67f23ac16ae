"""From a Config to an engine over servers: what they are started with, given and held against."""

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
from rally.engines import build_engine
from rally.engines.base import EngineError, TrainingEngine
from rally.engines.remote import (
    ClientSettings,
    CudaIpcWeights,
    Launch,
    LaunchedServer,
    Oracle,
    Rally,
    RemoteEngine,
    RemoteSettings,
    ServerApi,
    ServerReplica,
    Sglang,
    Vllm,
    WeightFiles,
    WeightTransport,
    roomy,
    sweep,
    tolerance_of,
)
from rally.engines.router.server_state import RouterSettings
from rally.models import attention
from rally.models.lora import has_adapters, merged_weights, plain_twin
from rally.models.parallel import model_state, ranks_of
from rally.runs.build.episodes import engine_settings_of, sampling_of
from rally.runs.build.inputs import RunError, RunInputs
from rally.train.checkpoint.weight_files import WeightWriter
from rally.train.messages import ComputeLogits, GatherWeights
from rally.train.policy import Policy
from rally.types import SamplingParams
from rally.util.threads import available_cores

MAX_FRONTENDS, CORES_PER_FRONTEND = 4, 4
Place = tuple[int, ...]
"""GPUs of one server, by their indices in this process; none on a machine without any."""
DIALECTS: dict[str, Callable[[], ServerApi]] = {"rally": Rally, "vllm": Vllm, "sglang": Sglang}


def remote_engine_of(config: Config, model: PreTrainedModel, sampling: SamplingParams) -> RemoteEngine:
    """The engine over servers of our own, or over running ones, as rollout.mode says."""
    attention.install(model)  # training runs packed forwards over it; the embedded engine would have done this
    rollout = config.rollout
    if rollout.mode == "server":
        dialect = DIALECTS[rollout.server_kind]()
        servers = [ServerReplica(url, dialect, client_settings_of(config, model)) for url in rollout.server_urls]
    else:
        servers = own_servers_of(config, model)
    return RemoteEngine(
        servers,
        transport_of(config, model),
        oracle_of(model),
        RemoteSettings(
            max_model_len=engine_settings_of(config).max_model_len,
            sampling=sampling,
            in_flight=rollout.in_flight,
            max_restarts=rollout.server.max_attempts,
            restart_delay=rollout.server.retry_delay,
            sleeps=rollout.mode != "server" and sleeps(config, model),
            router=router_settings_of(config),
        ),
    )


def router_settings_of(config: Config) -> RouterSettings:
    server, running = config.rollout.server, config.rollout.max_num_seqs
    return RouterSettings(
        max_in_flight=server.max_in_flight or running + -(-running // 4),  # so that a server always has a next one
        max_tries=server.max_tries,
        give_up_after=server.give_up_after,
        health_every=server.health_every,
        seed=engine_settings_of(config).seed,
    )


def transport_of(config: Config, model: PreTrainedModel) -> WeightTransport:
    """How weights get to servers, as rollout.checkpoint_engine.backend says."""
    shown = by_handles(config, model)
    if shown and not on_its_gpu_alone(config, model):
        raise EngineError(
            "rollout.checkpoint_engine.backend=ipc is for a server of one GPU that is the trainer's; leave it out here"
        )
    room = room_of(config, model)
    sweep(room)
    weights = functools.partial(whole_weights, model)
    first = functools.partial(write_whole, model, _bucket(config), _untied(config, model))
    files = WeightFiles(WeightWriter(first, weights), room)
    return CudaIpcWeights(weights, files) if shown else files


def by_handles(config: Config, model: PreTrainedModel) -> bool:
    """Whether a server opens the trainer's memory. Where it can, SGLang does; vLLM would have to be started so that
    whoever reaches its port can run code in it, and that must be asked for."""
    rollout = config.rollout
    able = rollout.server_kind == "sglang" and rollout.mode != "server" and not has_adapters(model)
    backend = rollout.checkpoint_engine.backend
    return backend == "ipc" or (backend == "naive" and able and on_its_gpu_alone(config, model))


def room_of(config: Config, model: PreTrainedModel) -> Path:
    """Where weights are left for servers: those of other machines see no memory of this one."""
    on_disk = config.run_dir / "weights"
    if any(urlsplit(url).hostname not in ("127.0.0.1", "::1", "localhost") for url in config.rollout.server_urls):
        on_disk.mkdir(parents=True, exist_ok=True)
        return on_disk
    return roomy(sum(p.numel() * p.element_size() for p in model.parameters()), on_disk)


def own_servers_of(config: Config, model: PreTrainedModel) -> list[ServerReplica]:
    """One server per rollout.data_parallel_size, each on its own GPUs where there are any."""
    rollout = config.rollout
    places = places_of(config, model)
    plan = launch_of(config, model)
    dialect = DIALECTS[rollout.server_kind]()
    return [
        LaunchedServer(
            dialect,
            lambda folder, port: dialect.command(replace(plan, folder=folder, port=port)),
            config.run_dir / "servers" / f"{rollout.server_kind}-{number}.log",
            port_start=rollout.port_start,
            environment={
                **dialect.environment(plan.by_handles),
                **({"CUDA_VISIBLE_DEVICES": visible(place)} if place else {}),
            },
            settings=client_settings_of(config, model),
        )
        for number, place in enumerate(places)
    ]


def places_of(config: Config, model: PreTrainedModel) -> list[Place]:
    rollout, mine = config.rollout, own_gpus(model)
    return placement(torch.cuda.device_count(), mine, rollout.data_parallel_size, rollout.tensor_model_parallel_size)


def own_gpus(model: PreTrainedModel) -> range:
    """Which GPUs the trainer is on: each rank is on the one of its number."""
    first = model.device.index or 0
    return range(first, first + ranks_of(model).world_size) if model.device.type == "cuda" else range(0)


def shares_gpu(config: Config, model: PreTrainedModel) -> bool:
    """Whether servers of our own are on the trainer's GPU."""
    mine = own_gpus(model)
    return any(gpu in mine for place in places_of(config, model) for gpu in place)


def on_its_gpu_alone(config: Config, model: PreTrainedModel) -> bool:
    """Whether there is one server, on the trainer's GPU and no other."""
    mine = own_gpus(model)
    return len(mine) == 1 and places_of(config, model) == [tuple(mine)]


def sleeps(config: Config, model: PreTrainedModel) -> bool:
    """Whether they give its memory to the update; our own kind keeps it."""
    able = config.rollout.server_kind != "rally"
    return able and engine_settings_of(config).lend_memory and shares_gpu(config, model)


def placement(gpus: int, mine: Collection[int], replicas: int, each: int) -> list[Place]:
    """GPUs of each server: those that are not the trainer's, or, if they are too few, its own too."""
    if gpus == 0:
        if each > 1:
            raise EngineError(f"rollout.tensor_model_parallel_size={each} needs {each} GPUs and there are none")
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


def visible(place: Place) -> str:
    """The GPUs as a child must be told: by the names they have on the machine, not by their places among ours."""
    names = os.environ.get("CUDA_VISIBLE_DEVICES")
    return ",".join(map(str, place) if names is None else (names.split(",")[gpu].strip() for gpu in place))


def launch_of(config: Config, model: PreTrainedModel) -> Launch:
    rollout, settings = config.rollout, engine_settings_of(config)
    return Launch(
        python=rollout.server.python or sys.executable,
        folder="",
        port=0,
        dtype=str(model.dtype).removeprefix("torch."),
        max_model_len=settings.max_model_len,
        max_num_seqs=settings.max_num_seqs,
        max_num_batched_tokens=settings.max_num_batched_tokens,
        memory_share=settings.memory_share,
        tensor_parallel=rollout.tensor_model_parallel_size,
        frontends=frontends(available_cores(), rollout.data_parallel_size),
        on_cpu=model.device.type == "cpu",
        seed=settings.seed,
        eager=settings.eager,
        log_level=rollout.log_level.lower() if rollout.log_level else None,
        raw_logprobs=rollout.temperature == 1,
        in_flight=rollout.in_flight,
        sleeps=sleeps(config, model),
        by_handles=by_handles(config, model),
        extra=rollout.engine_kwargs.vllm or rollout.engine_kwargs.sglang or _own_extra(config),
    )


def frontends(cores: int, servers: int) -> int:
    """Processes that answer HTTP for each server. One of vLLM's is busy for 2 ms with a request, in which the next
    waits, and the GPU with it."""
    return max(1, min(MAX_FRONTENDS, cores // (CORES_PER_FRONTEND * servers)))


def _own_extra(config: Config) -> dict[str, Any]:
    """What a server of Rally's own needs beside the weights."""
    tokenizer = config.model.tokenizer_path or config.model.path
    return {"tokenizer": str(tokenizer)} if config.rollout.server_kind == "rally" else {}


def client_settings_of(config: Config, model: PreTrainedModel) -> ClientSettings:
    server = config.rollout.server
    return ClientSettings(
        timeout=server.timeout,
        max_connections=server.max_connections,
        start_seconds=server.max_start_wait_time,
        vocabulary=model.config.get_text_config().vocab_size,
        max_model_len=engine_settings_of(config).max_model_len,
    )


@torch.no_grad()
def logits_of(model: PreTrainedModel, ids: Sequence[int]) -> Tensor:
    logits_TV: Tensor = model(input_ids=torch.tensor([list(ids)], device=model.device), use_cache=False).logits[0]
    return logits_TV


def oracle_of(model: PreTrainedModel) -> Oracle:
    def forward(ids: Sequence[int]) -> Tensor:
        with ranks_of(model).broadcast(ComputeLogits(ids)):
            return logits_of(model, ids)

    vocabulary = model.config.get_text_config().vocab_size
    return Oracle(forward=forward, vocabulary=vocabulary, tolerance=tolerance_of(model.dtype))


def write_whole(model: PreTrainedModel, bucket: str, untied: bool, folder: Path) -> None:
    """A folder that any server loads: adapters are merged into what they adapt. Untied, the output head is a weight of
    its own, also where the policy's is its embedding."""
    weights = whole_weights(model)
    twin = plain_twin(model)
    if untied:
        twin.config.tie_word_embeddings = False
        twin = plain_twin(twin)
        weights = {name: value.clone() for name, value in weights.items()}
    with _quietly():
        twin.save_pretrained(folder, state_dict=weights, max_shard_size=bucket)


def whole_weights(model: PreTrainedModel) -> dict[str, Tensor]:
    with ranks_of(model).broadcast(GatherWeights()):
        return merged_weights(model) if has_adapters(model) else model_state(model)


@contextmanager
def _quietly() -> Iterator[None]:
    """Every step writes a model, and none of them needs a progress bar of transformers'."""
    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()


def _untied(config: Config, model: PreTrainedModel) -> bool:
    """On a CPU, vLLM keeps a packed copy of the output head, and forgets it in a reload where it is the embedding."""
    return config.rollout.server_kind == "vllm" and model.device.type == "cpu"


def _bucket(config: Config) -> str:
    return f"{config.rollout.checkpoint_engine.update_weights_bucket_megabytes}MB"


def engine_of(config: Config, inputs: RunInputs, policy: Policy) -> TrainingEngine:
    if config.rollout.name != "embedded":
        if inputs.codec.patches is not None:
            raise RunError(
                f"{config.model.path} sees images, and servers are given tokens alone; set "
                "actor_rollout_ref.rollout.name=embedded"
            )
        return remote_engine_of(config, policy.model, sampling_of(config, inputs.codec))
    settings = engine_settings_of(config)
    return build_engine(config.rollout.name, policy.model, settings, decode=inputs.codec.decode)
