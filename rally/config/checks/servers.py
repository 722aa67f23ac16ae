"""Checks of the rollout servers' keys: reports keys without effect and requests that a server cannot fulfil."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from rally.config.base import look_up
from rally.config.checks.multi_gpu import reserves_nodes, with_rollout_servers
from rally.config.rollout import BROADCAST
from rally.config.schema import ROLLOUT, Config
from rally.redact import HIDDEN

FOR_SERVERS = (
    *("server", "engine_kwargs", "port_start", "log_level", "checkpoint_engine"),
    *("tensor_model_parallel_size", "data_parallel_size"),
)
FOR_OWN_SERVERS = (
    *("server.python", "server.max_attempts", "server.retry_delay", "port_start", "log_level", "engine_kwargs"),
    *("tensor_model_parallel_size", "data_parallel_size", "free_cache_engine", "enable_sleep_mode"),
)
NOT_FOR_RANKS = (
    *("server.url", "server.urls", "server.python", "server.max_attempts", "server.retry_delay", "engine_kwargs"),
    *("port_start", "log_level", "data_parallel_size", "nnodes", "n_gpus_per_node"),
    *("checkpoint_engine.backend", "checkpoint_engine.full_every"),
)
"""Keys of servers that the engines of several ranks do not use. They do use timeouts and the router's keys."""
PLACES = ("nnodes", "n_gpus_per_node")  # where the servers are that a run starts
NOT_FOR_RALLYS_OWN = ("tensor_model_parallel_size", "enforce_eager", "log_level")
TOKEN_VARIABLE = "RALLY_ENGINE_TOKEN"  # the bearer token of a `rally serve engine`
_BEFORE_AT = re.compile(r"^(\w+://)?.*@")  # up to the last @: in an invalid address, a password may be anywhere
FOR_EMBEDDED = ("attention_backend", "page_size", "deterministic")
DRAFTS = f"{ROLLOUT}.speculative_config"


def servers(config: Config) -> Iterator[str]:
    written, config = config.rollout.name, with_rollout_servers(config)
    yield from _speculation(config)
    yield from _quantization(config)
    if config.rollout.name == "embedded":
        if config.rollout.mode in ("standalone", "server"):
            yield f"{ROLLOUT}.mode={config.rollout.mode} needs a server; set {ROLLOUT}.name to sglang or vllm."
        embedded = f"with {ROLLOUT}.name=embedded"
        if config.samples_in_ranks:
            yield from _without_effect(config, NOT_FOR_RANKS, f"{embedded}, where every rank has an engine")
            yield from _tensor_parallel(config)
        else:
            yield from _without_effect(config, FOR_SERVERS, embedded)
            yield from _without_effect(config, PLACES if config.trainer.on_ray else (), embedded)
        return
    named = f"with {ROLLOUT}.name={config.rollout.name}"
    if config.rollout.name != written:
        named += f", which samples with trainer.v1.trainer_mode={config.trainer.v1.trainer_mode}"
    yield from _without_effect(config, FOR_EMBEDDED, named)
    if config.rollout.server_kind == "rally":
        yield from _without_effect(config, NOT_FOR_RALLYS_OWN, named)
    yield from _addresses(config)
    yield from _reserved_gpus(config)
    yield from _engine_kwargs(config)
    yield from _sampling(config)
    yield from _weight_transport(config)
    if config.rollout.checkpoint_engine.backend == "ipc" and (config.model.lora_rank or config.model.lora_adapter_path):
        problem = f"{ROLLOUT}.checkpoint_engine.backend=ipc shares the policy's own weights"
        yield f"{problem}, in which LoRA adapters are not merged; leave it out."


def _speculation(config: Config) -> Iterator[str]:
    keys, kind = config.rollout.speculative_config, config.rollout.server_kind
    if keys.method is None:
        for name in keys.model_dump(exclude_defaults=True):
            yield f"{DRAFTS}.{name} has no effect without {DRAFTS}.method; set that to ngram, or leave it out."
        return
    if keys.prompt_lookup_min > keys.prompt_lookup_max:
        problem = f"{DRAFTS}.prompt_lookup_min={keys.prompt_lookup_min} is more than"
        yield f"{problem} prompt_lookup_max={keys.prompt_lookup_max}; lower it."
    if kind in ("vllm", "sglang"):
        problem = f"{DRAFTS} has no effect with {ROLLOUT}.name={config.rollout.name}"
        yield f"{problem}; use that server's own flags in {ROLLOUT}.engine_kwargs.{kind}."
    elif config.rollout.mode == "server":
        yield f"{DRAFTS} has no effect on servers that already run ({ROLLOUT}.mode=server); leave it out."
    if config.rollout.deterministic:
        problem = f"{DRAFTS}.method={keys.method}: a draft is computed in another order than a token alone"
        yield f"{problem}, which changes the last bits; leave it out, or {ROLLOUT}.deterministic."


def _quantization(config: Config) -> Iterator[str]:
    rollout, key = config.rollout, f"{ROLLOUT}.quantization=fp8"
    if rollout.quantization != "fp8":
        return
    kind = rollout.server_kind
    if kind in ("vllm", "sglang"):
        problem = f"{key} is built for {ROLLOUT}.name=embedded: nobody has tried whether {kind} quantises new weights"
        yield f"{problem} that reach it after its start; leave one of the two out."
    elif kind == "rally" or config.samples_in_ranks:
        engines = "servers" if kind == "rally" else "engines of several ranks"
        problem = f"{key} does not work with {engines}, whose samples must agree with the trainer's own weights"
        yield f"{problem}; leave it out, or train on one GPU with {ROLLOUT}.name=embedded."
    if rollout.deterministic:
        problem = f"{key} and {ROLLOUT}.deterministic=true exclude each other: training does not compute in FP8"
        yield f"{problem}, so the two cannot be equal bit by bit; leave one of them out."
    if rollout.enable_rollout_routing_replay:
        problem = f"{key} does not support models with experts"
        yield f"{problem}, which {ROLLOUT}.enable_rollout_routing_replay=true is for; leave one of them out."


def _tensor_parallel(config: Config) -> Iterator[str]:
    if (size := config.rollout.tensor_model_parallel_size) > 1:
        problem = f"{ROLLOUT}.tensor_model_parallel_size={size}: the embedded engine of a rank holds the whole model"
        yield f"{problem}; set {ROLLOUT}.name=vllm or sglang, or leave it out."


def _weight_transport(config: Config) -> Iterator[str]:
    rollout, key = config.rollout, "checkpoint_engine.backend"
    backend = rollout.checkpoint_engine.backend
    if backend == BROADCAST:
        if rollout.server_kind == "sglang":
            problem = f"{ROLLOUT}.{key}={backend}: SGLang cannot join Rally's broadcasts"
            yield f"{problem}; use {ROLLOUT}.name=rally or vllm, or {key}=files."
        if rollout.server_kind == "vllm" and rollout.mode == "server":
            problem = f"{ROLLOUT}.{key}={backend}: only a vLLM that the run starts can join its broadcasts"
            yield f"{problem}; leave {ROLLOUT}.mode out, or use {key}=files."
        yield from _without_effect(config, ("checkpoint_engine.full_every",), f"with {ROLLOUT}.{key}={backend}")
    elif backend not in ("delta", "delta_sharded"):
        if rollout.server_kind == "rally":
            yield from _without_effect(config, (key,), f"with {ROLLOUT}.name=rally")
        elif rollout.mode == "server":
            yield from _without_effect(config, (key,), f"on servers that already run ({ROLLOUT}.mode=server)")
        yield from _without_effect(config, ("checkpoint_engine.full_every",), f"with {ROLLOUT}.{key}={backend}")
    elif rollout.server_kind != "rally":
        problem = f"{ROLLOUT}.{key}={backend}: {rollout.name} loads whole models and cannot apply deltas"
        yield f"{problem}; use {ROLLOUT}.name=rally, or {key}=files."


def _addresses(config: Config) -> Iterator[str]:
    urls = config.rollout.server_urls
    if config.rollout.mode != "server":
        if urls:
            yield f"{ROLLOUT}.server.url has no effect with {ROLLOUT}.mode={config.rollout.mode}; set it to server."
        return
    if not urls:
        yield f"{ROLLOUT}.mode=server needs a server; set {ROLLOUT}.server.url to its address."
    for url in urls:
        if not _is_address(url):
            hidden = _BEFORE_AT.sub(rf"\1{HIDDEN}@", url)
            yield f"{ROLLOUT}.server.url={hidden} is not a valid address; write it as http://10.0.0.1:8000."
    if len({_BEFORE_AT.sub(r"\1", url).rstrip("/") for url in urls}) < len(urls):
        yield f"{ROLLOUT}.server.urls contains a server twice; list each server once."
    yield from _credentials(config)
    running = f"on servers that already run ({ROLLOUT}.mode=server)"
    yield from _without_effect(config, FOR_OWN_SERVERS, running)
    yield from _without_effect(config, PLACES if config.trainer.on_ray else (), running)


def _reserved_gpus(config: Config) -> Iterator[str]:
    """GPUs of a Ray cluster that would be reserved and used by nobody."""
    rollout, each = config.rollout, config.rollout.tensor_model_parallel_size
    if not reserves_nodes(config) or rollout.n_gpus_per_node is None or config.trainer.device == "cpu":
        return
    if rollout.n_gpus_per_node % each:
        if not config.separate:  # which is checked everywhere
            problem = f"{ROLLOUT}.n_gpus_per_node={rollout.n_gpus_per_node} cannot be divided by"
            yield f"{problem} tensor_model_parallel_size={each}; change one of them."
        return
    reserved, used = rollout.nnodes * rollout.n_gpus_per_node, rollout.data_parallel_size * each
    if used < reserved:
        problem = f"{ROLLOUT}.nnodes={rollout.nnodes} and n_gpus_per_node={rollout.n_gpus_per_node} reserve {reserved}"
        servers = f"data_parallel_size={rollout.data_parallel_size} and tensor_model_parallel_size={each}"
        yield f"{problem} GPUs, and the servers ({servers}) use {used}; leave data_parallel_size out, or reserve fewer."


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # an invalid port or IPv6 address
        return False


def _credentials(config: Config) -> Iterator[str]:
    """Problems with a user and password in an address."""
    named = [url for url in config.rollout.server_urls if "@" in url]
    if any(f"//{HIDDEN}@" in url for url in named):
        problem = f"{ROLLOUT}.server.url contains ***, because user and password are not saved with a run"
        yield f"{problem}; write them again, such as http://${{oc.env:NAME}}@10.0.0.1:8000 with NAME=user:password."
    if named and config.rollout.server_kind == "rally" and os.environ.get(TOKEN_VARIABLE):
        problem = f"{ROLLOUT}.server.url has a user and password and {TOKEN_VARIABLE} is set"
        yield f"{problem}, but a request can carry only one of them; remove one."


def _engine_kwargs(config: Config) -> Iterator[str]:
    kwargs, kind = config.rollout.engine_kwargs, config.rollout.server_kind
    for name in ("vllm", "sglang"):
        flags = getattr(kwargs, name)
        if flags and name != kind:
            yield f"{ROLLOUT}.engine_kwargs.{name} has no effect with {ROLLOUT}.name={kind}; leave it out."
        for key in sorted({"model", "model_path", "host", "port", "served_model_name", "api_key"} & flags.keys()):
            yield f"{ROLLOUT}.engine_kwargs.{name}.{key} is set by the run itself; leave it out."


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    filtered = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    if rollout.server_kind == "vllm" and filtered and rollout.temperature not in (0, 1):
        problem = f"{ROLLOUT}.temperature={rollout.temperature} together with top_p, top_k or min_p"
        yield f"{problem}: vLLM then cannot report the policy's log-probs; set temperature=1 or remove the filters."


def _without_effect(config: Config, keys: tuple[str, ...], why: str) -> Iterator[str]:
    for key in keys:
        if look_up(config.rollout, key) != look_up(type(config.rollout)(), key):
            yield f"{ROLLOUT}.{key} has no effect {why}; leave it out."
