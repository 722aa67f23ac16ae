"""Loads and saves what a vision-language model needs beside its weights: its class and its image processor."""

from __future__ import annotations

import json
import tempfile
from collections import OrderedDict
from collections.abc import Mapping
from functools import lru_cache, partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from transformers import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    AutoImageProcessor,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from rally.hub import on_disk_alone
from rally.images.layouts import FAMILIES, ImageLayout
from rally.images.patches import Patches
from rally.models.vision import image_parts_of, patches_of, set_patches
from rally.types import RallyError

OPTIONS = (
    *("min_pixels", "max_pixels", "size", "resample", "do_rescale", "rescale_factor"),
    *("do_normalize", "image_mean", "image_std", "min_patches", "max_patches", "do_image_splitting"),
)
"""The options of image processors that may be set. The patch size is not among them, because the weights of the tower
depend on it."""


STORED = ("preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json")
"""Files of processors. The first holds the image processor; newer folders have it in the second."""


class VisionError(RallyError):
    """A vision setting that the model does not support."""


def auto_class(config: PreTrainedConfig) -> Any:
    """The transformers class that loads the whole model."""
    whole = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    alone = type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not hasattr(config, "vision_config")
    return AutoModelForImageTextToText if whole and not alone else AutoModelForCausalLM


def patches_for(
    config: PreTrainedConfig,
    path: str,
    options: Mapping[str, Any],
    trust_remote_code: bool = False,
    tokenizer_path: str | None = None,
) -> Patches | None:
    """The image preprocessing of the model at `path`. None for a text model, for one whose images are not supported,
    and for a folder without an image processor, which is used for text. Equal settings give the same object."""
    if not options and not _can_see(path):
        return None
    if config.model_type not in FAMILIES:
        if options:
            raise VisionError("data.mm_processor_kwargs is set, but the model is text-only; leave it out")
        return None
    if unknown := sorted(options.keys() - set(OPTIONS)):
        raise VisionError(
            f"data.mm_processor_kwargs.{unknown[0]} is not a known option; use one of {', '.join(OPTIONS)}"
        )
    key = (path, json.dumps(dict(options), sort_keys=True), config.image_token_id, tokenizer_path, trust_remote_code)
    if key not in _loaded:
        while len(_loaded) >= MOST_LOADED:
            _loaded.popitem(last=False)
        processor = _processor(path, options, trust_remote_code)
        if ignored := sorted(options.keys() - _accepted(processor)):
            raise VisionError(
                f"data.mm_processor_kwargs.{ignored[0]} is not an option of {type(processor).__name__}; leave it out"
            )
        tokenizer = _tokenizer(tokenizer_path or path, trust_remote_code)
        _loaded[key] = Patches(processor, layout_of(config, tokenizer), partial(_ids, tokenizer))
    _loaded.move_to_end(key)
    return _loaded[key]


def _can_see(path: str) -> bool:
    """Whether the model's folder has an image processor, and the package for images is installed."""
    folder = Path(path).expanduser()
    stored = not folder.is_dir() or any((folder / name).is_file() for name in STORED[:2])
    return stored and find_spec("PIL") is not None


MOST_LOADED = 8
_loaded: OrderedDict[tuple[object, ...], Patches] = OrderedDict()


def layout_of(config: Any, tokenizer: PreTrainedTokenizerBase) -> ImageLayout:
    """The layout of images in a model of a supported family."""
    token = config.image_token_id
    known = tokenizer.convert_ids_to_tokens(token) if token < len(tokenizer) else None
    if not known:
        raise VisionError(f"the tokenizer has no token {token}, the image placeholder; use the model's own tokenizer")
    layout = FAMILIES[config.model_type](config, str(known))
    for name in ("start", "end", "line_end", "fake"):
        mark = getattr(layout, name, None)
        if mark is not None and len(_ids(tokenizer, mark)) != 1:
            raise VisionError(
                f"images of {config.model_type} models need the token {mark}, which the tokenizer does not have; use "
                "the model's own tokenizer"
            )
    return layout


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> list[int]:
    ids: list[int] = tokenizer.encode(text, add_special_tokens=False)
    return ids


def _processor(path: str, options: Mapping[str, Any], trust_remote_code: bool) -> Any:
    try:
        # the "pil" backend needs no torchvision and gives the same pixels on every device
        return AutoImageProcessor.from_pretrained(
            path, backend="pil", trust_remote_code=trust_remote_code, **options, **on_disk_alone(path)
        )
    except (OSError, ValueError, TypeError) as problem:
        first = str(problem).strip().splitlines()[0]
        raise VisionError(
            f"the image processor of {path!r} cannot be loaded ({first}); the model's folder must contain "
            "preprocessor_config.json, and data.mm_processor_kwargs only options that the processor accepts"
        ) from problem


def _accepted(processor: Any) -> set[str]:
    """The options that an image processor of transformers knows; it ignores others."""
    declared: Any = getattr(processor, "valid_kwargs", None)
    return {name for kind in getattr(declared, "__mro__", ()) for name in getattr(kind, "__annotations__", {})} | {
        *getattr(declared, "__annotations__", {}),
        *(name for name in OPTIONS if hasattr(processor, name)),
    }


def _tokenizer(path: str, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(
            path, trust_remote_code=trust_remote_code, **on_disk_alone(path)
        )
    except (OSError, ValueError, TypeError) as problem:
        first = str(problem).strip().splitlines()[0]
        raise VisionError(
            f"the tokenizer of {path!r} cannot be loaded ({first}); copy the files of the model's tokenizer there"
        ) from problem
    return tokenizer


def share_patches(model: PreTrainedModel, patches: Patches, key: str) -> None:
    """Give another model, configured by `key`, the image preprocessing of the policy."""
    make = FAMILIES.get(model.config.model_type)
    if make is None or make(model.config, patches.layout.token) != patches.layout:
        raise VisionError(
            f"the model of {key} does not take images as the policy does; use a model of the policy's family"
        )
    set_patches(model, patches)


def freeze_tower(model: PreTrainedModel) -> None:
    """Exclude the vision tower from training (actor.freeze_vision_tower)."""
    if not image_parts_of(model):
        raise VisionError(
            "actor_rollout_ref.actor.freeze_vision_tower=true, but the model has no vision tower; leave it out"
        )
    freeze_unused(model)


def freeze_unused(model: PreTrainedModel) -> None:
    """Exclude what only images reach from training: for a vision model that is used for text, it has no gradient, and
    so it gets no optimizer state."""
    for part in image_parts_of(model).values():
        part.requires_grad_(False)


STORED_ATTRIBUTE = "rally_processor_files"


def keep_processor_files(model: PreTrainedModel, folder: Path) -> None:
    """Remember the processor files of the folder that a vision model was loaded from, for its checkpoints."""
    if image_parts_of(model):
        found = {name: (folder / name).read_bytes() for name in STORED if (folder / name).is_file()}
        setattr(model, STORED_ATTRIBUTE, found)


def processor_files(model: PreTrainedModel) -> Mapping[str, bytes]:
    """The files of the processor, to be saved beside the weights; none for a text model. Image settings of the run
    replace those of the folder that the model was loaded from."""
    stored: dict[str, bytes] = dict(getattr(model, STORED_ATTRIBUTE, {}))
    patches = patches_of(model)
    if patches is None:
        return stored
    files = _saved(patches)
    whole = json.loads(stored.get(WHOLE_PROCESSOR, b"{}"))
    if "image_processor" in whole:
        whole["image_processor"] = json.loads(files[STORED[0]])
        stored[WHOLE_PROCESSOR] = json.dumps(whole, indent=2).encode()
    return {**stored, **files}


WHOLE_PROCESSOR = "processor_config.json"


@lru_cache(maxsize=8)
def _saved(patches: Patches) -> Mapping[str, bytes]:
    with tempfile.TemporaryDirectory() as place:
        patches.processor.save_pretrained(place)
        return {file.name: file.read_bytes() for file in Path(place).iterdir()}
