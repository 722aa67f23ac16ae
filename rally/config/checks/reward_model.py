"""Checks of a reward model: a classifier, or a judge that is served to the reward function."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

from rally.config.schema import Config

SECTION = "reward_model"


def reward_model(config: Config) -> Iterator[str]:
    keys = config.reward_model
    if not keys.enable:
        if keys.server.url is not None:
            yield f"{SECTION}.server.url has no effect without {SECTION}.enable=true; set that, or leave it out."
        return
    if keys.model.path is None and not (config.uses_judge and keys.server.url):
        yield f"{SECTION}.enable=true needs a model; set {SECTION}.model.path."
    if config.uses_classifier:
        if keys.server.url is not None:
            problem = f"{SECTION}.server.url is for a reward function that asks the server"
            yield f"{problem}; set custom_reward_function.path, or leave it out."
        if config.reward_manager_name == "batch":
            yield "reward_manager=batch has no effect with a classifier; leave it out."
        return
    yield from _server(config)


def _server(config: Config) -> Iterator[str]:
    keys = config.reward_model
    if keys.server.url is not None:
        address = urlsplit(keys.server.url)
        if address.scheme != "http" or not address.hostname or address.path not in ("", "/") or address.username:
            problem = f"{SECTION}.server.url={keys.server.url} must have the form http://HOST:PORT"
            yield f"{problem}, because reward functions of verl ask http://ADDRESS/v1/...; correct it."
    elif keys.rollout.name == "rally" and keys.rollout.tensor_model_parallel_size > 1:
        problem = f"{SECTION}.rollout.tensor_model_parallel_size={keys.rollout.tensor_model_parallel_size}"
        yield f"{problem} needs {SECTION}.rollout.name=vllm or sglang; set one of them, or leave it out."
