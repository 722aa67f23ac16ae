"""Loads the model, the tokenizer and the image processor of a run from its configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel, PreTrainedTokenizerBase

from rally.config import Config, SftConfig
from rally.config.base import expand
from rally.config.checks.multi_gpu import sends_images
from rally.config.model import LoraKeys, ModelConfig
from rally.config.sft import SftModel
from rally.config.trainer import RunConfig
from rally.hub import on_disk_alone
from rally.images.patches import Patches
from rally.importing import ImportFailed, import_path
from rally.models.load import (
    PATH_KEY,
    LoadError,
    load_model,
    load_model_config,
    load_tokenizer,
    pick_device,
    pick_dtype,
    turn_off_dropout,
)
from rally.models.lora import LoraSettings, add_adapters, check_resumable
from rally.models.rope import decide_rope
from rally.models.sharding import ALONE, Message, Ranks
from rally.models.vision import set_patches
from rally.models.vision_loading import VisionError, freeze_tower, freeze_unused, patches_for


def model_of(
    config: Config, path: str | None = None, ranks: Ranks = ALONE, *, offload_policy: bool = False
) -> PreTrainedModel:
    """The policy's module: as configured, or from a checkpoint at `path`, which may hold only adapters."""
    model = trained_model(config.model, str(config.model.path), config.trainer, path, patches_of(config), ranks)
    decide_rope(model, config.max_model_len)
    if config.actor.freeze_vision_tower:
        freeze_tower(model)
    ranks.shard(model, offload=offload_policy)
    return model


def patches_of(config: Config) -> Patches | None:
    """The image processor of the policy; None for a text-only model, and where a vision model is used for text: vLLM,
    SGLang and servers that already run are sent only tokens."""
    model, options = config.model, config.data.mm_processor_kwargs
    if not sends_images(config):
        if options:
            raise VisionError("data.mm_processor_kwargs is set, but these servers are not sent images; leave it out")
        return None
    return patches_at(model, str(model.path), options)


def patches_at(
    model: ModelConfig | SftModel,
    path: str,
    options: Mapping[str, Any] = MappingProxyType({}),
) -> Patches | None:
    """The image processor of the model at `path`; None for a text-only model."""
    if path.endswith(".gguf"):  # slow to read, and transformers supports no vision model in this format
        return None
    stored = load_model_config(path, trust_remote_code=model.trust_remote_code)
    return patches_for(stored, path, options, model.trust_remote_code, model.tokenizer_path)


def trained_model(
    model: ModelConfig | SftModel,
    base: str,
    trainer: RunConfig,
    path: str | None,
    patches: Patches | None,
    ranks: Ranks = ALONE,
) -> PreTrainedModel:
    """The module to train: `base`, with adapters if configured, or a checkpoint at `path`. Without `patches`, a vision
    model is used for text, and its tower is not trained. A module that is to be sharded stays in main memory, so that
    no device has to hold all of it."""
    device = pick_device(trainer.device)
    lora = lora_of(model, trainer.seed)
    if path:
        check_resumable(Path(path), lora)
        if not lora:
            _check_same_model(model, base, path)
    module = load_model(
        base if lora or not path else path,
        device=device if ranks.world_size == 1 else torch.device("cpu"),
        dtype=str(pick_dtype(model.dtype, device)).removeprefix("torch."),
        trust_remote_code=model.trust_remote_code,
        overrides=dict(model.override_config),
        verified=bool(path) and not lora,
    )
    if patches is not None:
        set_patches(module, patches)
    else:
        freeze_unused(module)
    if lora:
        add_adapters(module, lora, base, path)
        turn_off_dropout(module)
    return module


ARCHITECTURE = ("model_type", "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads")


def _check_same_model(model: ModelConfig | SftModel, base: str, path: str) -> None:
    """LoadError if the checkpoint at `path` is not one of the model `base`, whose tokenizer the run uses."""
    if base.endswith(".gguf"):  # slow to read
        return
    ours, theirs = (
        load_model_config(
            one, trust_remote_code=model.trust_remote_code, overrides=dict(model.override_config)
        ).get_text_config()
        for one in (base, path)
    )
    for name in ARCHITECTURE:
        own, other = getattr(ours, name, None), getattr(theirs, name, None)
        if own != other:
            raise LoadError(
                f"the checkpoint {path} is of another model than {PATH_KEY}={base}: {name} is {other} instead of "
                f"{own}; set {PATH_KEY} to the model that the run started with"
            )


def lora_of(model: LoraKeys, seed: int) -> LoraSettings | None:
    """The LoRA settings; None if all weights are trained."""
    if not model.lora_rank and not model.lora_adapter_path:
        return None
    return LoraSettings(
        rank=model.lora_rank,
        alpha=model.lora_alpha,
        targets=model.target_modules,
        excluded=model.exclude_modules,
        parameters=model.target_parameters,
        start=model.lora_adapter_path,
        seed=seed,
    )


_imported: set[str] = set()


def import_external_libs(config: Config | SftConfig) -> None:
    """Import the user's modules, once in a process. They may register losses, estimators, loops and classes of
    models, so this comes before a tokenizer or a model is loaded. LoadError if one cannot be imported."""
    for key, name in config.external_libs:
        if name in _imported:
            continue
        try:
            import_path(expand(name), "external_lib")
        except ImportFailed as failed:
            raise LoadError(f"{key}={name} cannot be imported ({failed}); correct the name or the file") from failed
        _imported.add(name)


def tokenizer_of(config: Config) -> PreTrainedTokenizerBase:
    import_external_libs(config)
    return tokenizer_at(config.model, str(config.model.path))


def tokenizer_at(model: ModelConfig | SftModel, path: str) -> PreTrainedTokenizerBase:
    return load_tokenizer(
        model.tokenizer_path or path,
        trust_remote_code=model.trust_remote_code,
        chat_template=model.custom_chat_template,
        spelled=model.spelled_tokens,
        option="model.tokenizer_path" if model.tokenizer_path else PATH_KEY,
    )


def stop_ids_at(path: str) -> tuple[int, ...]:
    """The end-of-text ids of the model's generation config; none if it has no such file."""
    if path.endswith(".gguf") or (Path(path).is_dir() and not (Path(path) / "generation_config.json").is_file()):
        return ()
    try:
        local = bool(on_disk_alone(path))
        ends = GenerationConfig.from_pretrained(path, local_files_only=local).eos_token_id
    except (OSError, ValueError):  # not there, or not readable; the template and the tokenizer have stop tokens too
        return ()
    return tuple(ends) if isinstance(ends, list) else () if ends is None else (int(ends),)


@dataclass(frozen=True)
class RunPlan(Message):
    """The message from which every rank builds its policy."""

    config: Config | SftConfig
    checkpoint: Path | None
    steps: int
