"""Builds the reward model of a run from a Config: a classifier in process, or the server of a judge."""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from transformers import AutoModelForSequenceClassification, PreTrainedModel, PreTrainedTokenizerBase

from rally.config import Config
from rally.config.reward import JudgeRollout
from rally.engines.base import EngineError
from rally.engines.remote.launched_server import probe_package
from rally.engines.remote.server_api import flags
from rally.models.load import load_model, load_tokenizer, pick_device, pick_dtype
from rally.platforms import named_platform
from rally.rewards import JudgeAddress, RewardError
from rally.rewards.judge_server import JudgeServer
from rally.rewards.reward_model import ClassifierScorer, ClassifierSettings

OPTION = "reward_model.model.path"


def classifier_scorer_of(config: Config) -> ClassifierScorer:
    keys = config.reward_model
    settings = ClassifierSettings(
        batch_size=keys.micro_batch_size_per_gpu or 8,
        max_length=keys.max_length,
        offload=keys.model.fsdp_config.param_offload,
    )
    return ClassifierScorer(partial(_classifier, config), settings)


def _classifier(config: Config) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    weights, device = config.reward_model.model, pick_device(config.trainer.device)
    model = load_model(
        str(weights.path),
        device=device,
        dtype=str(pick_dtype(weights.dtype, device)).removeprefix("torch."),
        trust_remote_code=weights.trust_remote_code,
        kind=AutoModelForSequenceClassification,
        option=OPTION,
    )
    return model, load_tokenizer(str(weights.path), trust_remote_code=weights.trust_remote_code, option=OPTION)


def judge_server_of(config: Config) -> JudgeServer | None:
    """The server of a generative reward model, if the reward function asks one."""
    keys = config.reward_model
    if not config.uses_judge:
        return None
    if keys.server.url is not None:
        return JudgeServer(url=keys.server.url)
    return JudgeServer(
        command=partial(judge_command, str(keys.model.path), keys.server.python or sys.executable, keys.rollout),
        log=config.run_dir / "servers" / "reward_model.log",
        environment=_environment(config),
        start_seconds=keys.server.max_start_wait_time,
    )


def judge_address_of(config: Config, server: JudgeServer) -> JudgeAddress:
    weights = config.reward_model.model
    return JudgeAddress(address=server.address, tokenizer=weights.path, trust_remote_code=weights.trust_remote_code)


def _environment(config: Config) -> dict[str, str]:
    """The judge's GPUs: those that the trainer leaves free, if there are any."""
    from rally.runs.build.engines import placement, visible  # which imports the rollout, and that this module

    platform, keys = named_platform(config.trainer.device), config.reward_model.rollout
    gpus = platform.device_count()
    if gpus == 0 or config.trainer.device == "cpu":
        return {platform.visible_devices: ""}
    [place] = placement(gpus, range(config.trainer.n_gpus_per_node), 1, keys.tensor_model_parallel_size)
    return {platform.visible_devices: visible(place, platform)}


def _require_package(python: str, name: str) -> None:
    try:
        probe_package(python, name)
    except EngineError:
        raise RewardError(
            f"reward_model.rollout.name={name} needs {name}, which {python} lacks; set reward_model.server.python to "
            "an interpreter that has it, or reward_model.rollout.name=rally to use Rally's own server"
        ) from None


def judge_command(model: str, python: str, keys: JudgeRollout, port: int) -> list[str]:
    """The command line of the server, which calls the model by its path, as requests of verl's functions do."""
    length = keys.max_model_len or keys.prompt_length + keys.response_length
    if keys.name == "rally":
        options: dict[str, Any] = {
            "port": port,
            "name": model,
            "dtype": keys.dtype,
            "max_model_len": length,
            "max_num_seqs": keys.max_num_seqs,
            "max_num_batched_tokens": keys.max_num_batched_tokens,
            "memory": min(keys.gpu_memory_utilization, 0.99),
            "seed": keys.seed,
        }
        return [python, "-m", "rally.cli", "serve", "engine", model, *flags(options, negated=True)]
    _require_package(python, keys.name)
    if keys.name == "vllm":
        options = {
            "host": "127.0.0.1",
            "port": port,
            "served_model_name": model,
            "dtype": keys.dtype,
            "max_model_len": length,
            "max_num_seqs": keys.max_num_seqs,
            "max_num_batched_tokens": max(keys.max_num_batched_tokens, length),
            "gpu_memory_utilization": keys.gpu_memory_utilization,
            "tensor_parallel_size": keys.tensor_model_parallel_size,
            "seed": keys.seed,
            "enforce_eager": keys.enforce_eager or None,
        }
        return [python, "-m", "vllm.entrypoints.cli.main", "serve", model, *flags(options, negated=True)]
    options = {
        "model_path": model,
        "host": "127.0.0.1",
        "port": port,
        "served_model_name": model,
        "dtype": keys.dtype,
        "context_length": length,
        "max_running_requests": keys.max_num_seqs,
        "chunked_prefill_size": keys.max_num_batched_tokens,
        "mem_fraction_static": keys.gpu_memory_utilization,
        "tp_size": keys.tensor_model_parallel_size,
        "random_seed": keys.seed,
        "disable_cuda_graph": keys.enforce_eager or None,
    }
    return [python, "-m", "sglang.launch_server", *flags(options, negated=False)]
