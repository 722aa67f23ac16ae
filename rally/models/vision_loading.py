"""Loads and saves what a vision-language model needs beside its weights: its class and its image processor."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

from transformers import (
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    PreTrainedConfig,
    PreTrainedModel,
)

from rally.hub import on_disk_alone
from rally.images.patches import Patches
from rally.models.vision import FAMILIES, patches_of, set_patches, tower_of
from rally.types import RallyError

OPTIONS = (
    *("min_pixels", "max_pixels", "size", "resample", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std"),
)
"""The options of image processors that may be set; processors ignore unknown ones. The patch size is not among them,
because the weights of the tower depend on it."""


class VisionError(RallyError):
    """A vision setting that the model does not support."""


def auto_class(config: PreTrainedConfig) -> Any:
    """The transformers class that loads the whole model."""
    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def patches_for(
    config: PreTrainedConfig, path: str, options: Mapping[str, Any], trust_remote_code: bool = False
) -> Patches | None:
    """The image preprocessing of the model at `path`; None for a text model. Equal settings give the same object."""
    if config.model_type not in FAMILIES:
        if options:
            raise VisionError("data.mm_processor_kwargs is set, but the model is text-only; leave it out")
        return None
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise VisionError(
            f"data.mm_processor_kwargs.{unknown[0]} is not a known option; use one of {', '.join(OPTIONS)}"
        )
    return _patches(path, json.dumps(dict(options), sort_keys=True), config.image_token_id, trust_remote_code)


@lru_cache(maxsize=8)
def _patches(path: str, options: str, token: int, trust_remote_code: bool) -> Patches:
    try:
        # the "pil" backend needs no torchvision and gives the same pixels on every device
        processor = AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=trust_remote_code, **json.loads(options), **on_disk_alone(path)
        )
    except (OSError, ValueError, TypeError) as problem:
        first = str(problem).strip().splitlines()[0]
        raise VisionError(
            f"the image processor of {path!r} cannot be loaded ({first}); the model's folder must contain "
            "preprocessor_config.json, and data.mm_processor_kwargs only options that the processor accepts"
        ) from problem
    return Patches(processor, token)


def share_patches(model: PreTrainedModel, patches: Patches, key: str) -> None:
    """Give another model, configured by `key`, the image preprocessing of the policy."""
    processor: Any = patches.processor
    vision: Any = getattr(model.config, "vision_config", None)
    sizes = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    if tower_of(model) is None or sizes != (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size):
        raise VisionError(
            f"the model of {key} does not take images as the policy does; use a model of the policy's family"
        )
    set_patches(model, patches)


def freeze_tower(model: PreTrainedModel) -> None:
    """Exclude the vision tower from training (actor.freeze_vision_tower)."""
    tower = tower_of(model)
    if tower is None:
        raise VisionError(
            "actor_rollout_ref.actor.freeze_vision_tower=true, but the model has no vision tower; leave it out"
        )
    tower.requires_grad_(False)


def processor_files(model: PreTrainedModel) -> Mapping[str, bytes]:
    """The files of the image processor, to be saved beside the weights; none for a text model."""
    patches = patches_of(model)
    return {} if patches is None else _saved(patches)


@lru_cache(maxsize=8)
def _saved(patches: Patches) -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        patches.processor.save_pretrained(place)
        return {file.name: file.read_bytes() for file in Path(place).iterdir()}
