"""What a model needs to see images comes in with it and is saved with it: its class, and its image processor."""

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
from rally.models.vision import FAMILIES, give_sight, sight_of, tower_of
from rally.types import RallyError

OPTIONS = (
    *("min_pixels", "max_pixels", "size", "resample", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std"),
)
"""Of image processors, which pass over a name they do not know. How patches are cut belongs to the tower's weights."""


class VisionError(RallyError):
    """A model that cannot see, or cannot be kept from learning to, as asked."""


def auto_class(config: PreTrainedConfig) -> Any:
    """The class of transformers that loads a model of this kind whole."""
    return AutoModelForImageTextToText if config.model_type in FAMILIES else AutoModelForCausalLM


def patches_for(
    config: PreTrainedConfig, path: str, options: Mapping[str, Any], trust_remote_code: bool = False
) -> Patches | None:
    """How the model at `path` cuts images; None for a model for text. The same settings give the same object."""
    if config.model_type not in FAMILIES:
        if options:
            raise VisionError("data.mm_processor_kwargs has no effect, the model is for text alone; leave it out")
        return None
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise VisionError(
            f"data.mm_processor_kwargs.{unknown[0]} is nothing that can be set; known are {', '.join(OPTIONS)}"
        )
    return _patches(path, json.dumps(dict(options), sort_keys=True), config.image_token_id, trust_remote_code)


@lru_cache(maxsize=8)
def _patches(path: str, options: str, token: int, trust_remote_code: bool) -> Patches:
    try:
        # of the two processors that transformers has, this one needs no torchvision and is the same on every device
        processor = AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=trust_remote_code, **json.loads(options), **on_disk_alone(path)
        )
    except (OSError, ValueError, TypeError) as problem:
        first = str(problem).strip().splitlines()[0]
        raise VisionError(
            f"the image processor of {path!r} cannot be loaded ({first}); the model's folder must hold its "
            "preprocessor_config.json, and data.mm_processor_kwargs what that takes"
        ) from problem
    return Patches(processor, token)


def share_sight(model: PreTrainedModel, patches: Patches, key: str) -> None:
    """Let a model, which `key` names, look at the images of the policy, cut as the policy cuts them."""
    processor: Any = patches.processor
    vision: Any = getattr(model.config, "vision_config", None)
    cut = (processor.patch_size, processor.merge_size, processor.temporal_patch_size)
    if tower_of(model) is None or cut != (vision.patch_size, vision.spatial_merge_size, vision.temporal_patch_size):
        raise VisionError(f"{key} cannot look at images as the policy does; name a model of the policy's family")
    give_sight(model, patches)


def freeze_tower(model: PreTrainedModel) -> None:
    """What looks at images stays as it is (actor.freeze_vision_tower)."""
    tower = tower_of(model)
    if tower is None:
        raise VisionError(
            "actor_rollout_ref.actor.freeze_vision_tower=true, but the model has no vision tower; leave it out"
        )
    tower.requires_grad_(False)


def processor_files(model: PreTrainedModel) -> Mapping[str, bytes]:
    """The files of the image processor, for beside the weights; none of a model for text."""
    patches = sight_of(model)
    return {} if patches is None else _saved(patches)


@lru_cache(maxsize=8)
def _saved(patches: Patches) -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        patches.processor.save_pretrained(place)
        return {file.name: file.read_bytes() for file in Path(place).iterdir()}
