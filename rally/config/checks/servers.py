"""What keys must hold together where rollouts are sampled by servers: no key is left without effect or asks for what
a server cannot do."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from urllib.parse import urlsplit

from rally.config.base import look_up
from rally.config.checks.multi_gpu import served
from rally.config.errors import shown
from rally.config.schema import ROLLOUT, Config
from rally.redact import HIDDEN

FOR_SERVERS = (
    *("server", "engine_kwargs", "port_start", "log_level", "checkpoint_engine"),
    *("tensor_model_parallel_size", "data_parallel_size"),
)
FOR_OWN_SERVERS = (
    *("server.python", "server.max_attempts", "server.retry_delay", "port_start", "log_level", "engine_kwargs"),
    *("tensor_model_parallel_size", "data_parallel_size", "free_cache_engine", "enable_sleep_mode"),
    "checkpoint_engine.backend",
)
NOT_FOR_RALLYS_OWN = ("tensor_model_parallel_size", "enforce_eager", "log_level", "checkpoint_engine.backend")
TOKEN_VARIABLE = "RALLY_ENGINE_TOKEN"  # what a server of Rally's own is sent
_BEFORE_AT = re.compile(r"^(\w+://)?.*@")  # up to the last: in what is no address, a password may be anywhere
FOR_EMBEDDED = ("attention_backend", "page_size", "deterministic")


def servers(config: Config) -> Iterator[str]:
    config = served(config)
    if config.rollout.name == "embedded":
        if config.rollout.mode in ("standalone", "server"):
            yield f"{ROLLOUT}.mode={config.rollout.mode} needs a server; set {ROLLOUT}.name to sglang or vllm."
        yield from _without_effect(config, FOR_SERVERS, f"with {ROLLOUT}.name=embedded")
        return
    yield from _without_effect(config, FOR_EMBEDDED, f"with {ROLLOUT}.name={config.rollout.name}")
    if config.rollout.server_kind == "rally":
        yield from _without_effect(config, NOT_FOR_RALLYS_OWN, f"with {ROLLOUT}.name=rally")
    yield from _addresses(config)
    yield from _engine_kwargs(config)
    yield from _sampling(config)
    if config.rollout.checkpoint_engine.backend == "ipc" and (config.model.lora_rank or config.model.lora_adapter_path):
        told = f"{ROLLOUT}.checkpoint_engine.backend=ipc shows servers the policy's own memory"
        yield f"{told}, where adapters (LoRA) are not merged; leave it out."


def _addresses(config: Config) -> Iterator[str]:
    given = config.rollout.server_urls
    if config.rollout.mode != "server":
        if given:
            yield f"{ROLLOUT}.server.url has no effect with {ROLLOUT}.mode={config.rollout.mode}; set it to server."
        return
    if not given:
        yield f"{ROLLOUT}.mode=server needs a server; set {ROLLOUT}.server.url to where it runs."
    for url in given:
        if not _is_address(url):
            told = _BEFORE_AT.sub(rf"\1{HIDDEN}@", url)
            yield f"{ROLLOUT}.server.url={told} is no address; write it as http://10.0.0.1:8000."
    if len({_BEFORE_AT.sub(r"\1", url).rstrip("/") for url in given}) < len(given):
        yield f"{ROLLOUT}.server.urls names a server twice; name each once."
    yield from _credentials(config)
    yield from _without_effect(config, FOR_OWN_SERVERS, f"on servers that run already ({ROLLOUT}.mode=server)")


def _is_address(url: str) -> bool:
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number, half an IPv6 address
        return False


def _credentials(config: Config) -> Iterator[str]:
    """An address with a user and password, and what would take their place."""
    named = [url for url in config.rollout.server_urls if "@" in url]
    if any(f"//{HIDDEN}@" in url for url in named):
        told = f"{ROLLOUT}.server.url: a user and password are not saved with a run"
        yield f"{told}; write them again, best as http://${{oc.env:NAME}}@10.0.0.1:8000 with NAME=user:password."
    if named and config.rollout.server_kind == "rally" and os.environ.get(TOKEN_VARIABLE):
        told = f"{ROLLOUT}.server.url has a user and password and {TOKEN_VARIABLE} is set"
        yield f"{told}, but a request can carry only one of them; take one out."


def _engine_kwargs(config: Config) -> Iterator[str]:
    kwargs, kind = config.rollout.engine_kwargs, config.rollout.server_kind
    for name in ("vllm", "sglang"):
        given = getattr(kwargs, name)
        if given and name != kind:
            yield f"{ROLLOUT}.engine_kwargs.{name} has no effect with {ROLLOUT}.name={kind}; leave it out."
        for key in sorted({"model", "model_path", "host", "port", "served_model_name"} & given.keys()):
            yield f"{ROLLOUT}.engine_kwargs.{name}.{key} is set by the run itself; leave it out."


def _sampling(config: Config) -> Iterator[str]:
    rollout = config.rollout
    if rollout.stop_strings:
        told = f"{ROLLOUT}.stop_strings={shown(rollout.stop_strings)}"
        yield f"{told} cannot be had from a server that knows token ids alone; leave it out, or use name=embedded."
    filtered = rollout.top_p < 1 or rollout.top_k > 0 or rollout.min_p > 0
    if rollout.server_kind == "vllm" and filtered and rollout.temperature not in (0, 1):
        told = f"{ROLLOUT}.temperature={rollout.temperature} together with top_p, top_k or min_p"
        yield f"{told}: vLLM cannot report the policy's log-probs then; set temperature=1, or leave the filters out."


def _without_effect(config: Config, keys: tuple[str, ...], why: str) -> Iterator[str]:
    for key in keys:
        if look_up(config.rollout, key) != look_up(type(config.rollout)(), key):
            yield f"{ROLLOUT}.{key} has no effect {why}; leave it out."
