"""Image inputs of vision-language models: features replace the embeddings of image tokens.

What differs between families is their layout (`rally.images.layouts`): the inputs of the tower, the tokens of an image,
and whether its positions have three axes. The model carries its image preprocessing (`set_patches`), so rollout and
training see the same pixels. Only spans say where images are; a placeholder token outside of them is an ordinary token.

Shapes: T packed tokens, V of them in images, N patches, C hidden size, L tokens of a history, 3 axes (time, row,
column).
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rally.images.layouts import Patched
from rally.images.patches import Patches
from rally.models.residence import device_of
from rally.types import Image, ImageSpan, RallyError

Ints = npt.NDArray[np.int64]
FEATURE_CACHE_BYTES = 512 * 2**20  # so that an image whose tokens are split into chunks is encoded once


class ImageInputError(RallyError):
    """Images that the model does not accept."""


class Features(NamedTuple):
    """Outputs of the vision tower: what replaces the embeddings of image tokens, and what is added after each of the
    first layers (the deepstack features of Qwen3-VL)."""

    first_VC: Tensor
    deep_VC: tuple[Tensor, ...] = ()

    def rows(self, which: slice | Tensor) -> Features:
        return Features(self.first_VC[which], tuple(deep[which] for deep in self.deep_VC))


class SeenImages(NamedTuple):
    """The indices of the image tokens among packed tokens, in order, and their features."""

    at_V: Tensor
    features: Features


def image_parts_of(model: PreTrainedModel) -> dict[str, nn.Module]:
    """The modules that only images (or sounds) reach, by name: whatever stands beside the language model. None in a
    text model."""
    if model.config.get_text_config() is model.config or getattr(model.config, "is_encoder_decoder", False):
        return {}
    whole = model.base_model
    language = model.get_decoder() if whole is model else whole.get_decoder()  # type: ignore[operator]
    if language is whole or not any(child is language for child in whole.children()):
        return {}
    prefix = next(f"{name}." if name else "" for name, module in model.named_modules() if module is whole)
    used = {id(language), id(model.get_output_embeddings()), id(model.get_input_embeddings())}
    return {f"{prefix}{name}": child for name, child in whole.named_children() if id(child) not in used}


def set_patches(model: PreTrainedModel, patches: Patches) -> None:
    """Attach the image preprocessing to a model with a vision tower."""
    assert image_parts_of(model), "the model has no known vision tower"
    model.rally_patches = patches  # type: ignore[assignment]


def patches_of(model: PreTrainedModel) -> Patches | None:
    """The image preprocessing of the model; None for a text model, and for a vision model that is used for text."""
    return cast(Patches | None, getattr(model, "rally_patches", None))


def check_images(model: PreTrainedModel, images: Sequence[ImageSpan], length: int) -> None:
    """Raise ImageInputError if the images do not fit the model or a prompt of `length` tokens."""
    patches = patches_of(model)
    if patches is None:
        raise ImageInputError("the prompt contains an image, but the model is text-only; use a vision-language model")
    end = 0
    for span in images:
        rows, columns = patches.size(span.image)
        if (rows, columns) != (span.rows, span.columns):
            raise ImageInputError(
                f"an image of {rows} x {columns} tokens has a span of {span.rows} x {span.columns}; encode it with the "
                "codec of this model"
            )
        if not end <= span.start <= span.end <= length:
            raise ImageInputError(
                "image spans overlap or lie outside of the prompt; give their positions in the prompt, in order"
            )
        end = span.end


def axes_of(model: PreTrainedModel) -> int:
    """How many axes the positions of packed tokens have: 3 if the model takes images, else 1."""
    return 1 if patches_of(model) is None else 3


def image_features(model: PreTrainedModel, images: Sequence[Image]) -> Features:
    """The vectors of all tokens of images, concatenated: features from the model's own vision tower, and embeddings for
    the ordinary tokens of an image."""
    patches = patches_of(model)
    if patches is None:
        raise ImageInputError("the prompt contains an image, but the model is text-only; use a vision-language model")
    parts: dict[int, Features] = {}
    for numbers in _alike([patches.of(image) for image in images]):
        found = _tower_features(model, [patches.of(images[i]) for i in numbers])
        counts = [patches.tokens(images[i]).count(patches.token) for i in numbers]
        if len(found.first_VC) != sum(counts):
            raise ImageInputError(
                f"the vision tower gives {len(found.first_VC)} features for {sum(counts)} image tokens; the model's "
                "configuration and its image processor do not fit each other"
            )
        ends = itertools.accumulate(counts)
        parts |= {i: found.rows(slice(end - n, end)) for i, n, end in zip(numbers, counts, ends, strict=True)}
    features = joined([parts[i] for i in range(len(images))])
    tokens_V = torch.tensor([token for image in images for token in patches.tokens(image)], device=device_of(model))
    at = (tokens_V == patches.token).nonzero()[:, 0]
    if len(at) == len(tokens_V):
        return features
    assert not features.deep_VC, "in families with deepstack features every image token has one"
    embedded_VC = model.get_input_embeddings()(tokens_V)
    return Features(embedded_VC.index_copy(0, at, features.first_VC.to(embedded_VC.dtype)))


def _alike(patched: Sequence[Patched]) -> list[list[int]]:
    """The numbers of images that can be concatenated, so that the tower runs once for them."""
    groups: dict[object, list[int]] = {}
    for number, one in enumerate(patched):
        groups.setdefault(tuple(array.shape[1:] for array in one.inputs.values()), []).append(number)
    return list(groups.values())


def _tower_features(model: PreTrainedModel, patched: Sequence[Patched]) -> Features:
    inputs = {
        name: torch.from_numpy(np.concatenate([one.inputs[name] for one in patched])).to(device_of(model))
        for name in patched[0].inputs
    }
    inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
    output = cast(Any, model.base_model).get_image_features(**inputs, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or ()
    return Features(_joined(output.pooler_output), tuple(_joined(one) for one in deep))


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """[V, C] for all images. Some classes return one tensor, some one for each image, some one for each tile."""
    whole = features if isinstance(features, Tensor) else torch.cat(tuple(features))
    return whole.flatten(0, -2)


def packed_seen_hidden(
    model: PreTrainedModel, ids_T: Tensor, positions: Tensor, context: object, seen: SeenImages | None, no_mask: Tensor
) -> Tensor:
    """Last hidden states [T, C] of packed tokens, some of which may be image tokens."""
    language: Any = cast(Any, model.base_model).get_decoder()
    embedded_TC = language.get_input_embeddings()(ids_T)
    more: dict[str, Any] = {}
    if seen is not None:
        embedded_TC = embedded_TC.index_copy(0, seen.at_V, seen.features.first_VC.to(embedded_TC.dtype))
    if seen is not None and (deep_VC := seen.features.deep_VC):
        shown_T = torch.zeros(len(ids_T), dtype=torch.bool, device=ids_T.device)
        shown_T[seen.at_V] = True
        more = {"visual_pos_masks": shown_T.unsqueeze(0), "deepstack_visual_embeds": list(deep_VC)}
    output = language(
        inputs_embeds=embedded_TC.unsqueeze(0),
        position_ids=positions.unsqueeze(-2),
        attention_mask=no_mask,
        use_cache=False,
        rally=context,
        **more,
    )
    return cast(Tensor, output.last_hidden_state[0])


def own_positions(model: PreTrainedModel, positions: Tensor) -> Tensor:
    """Positions as the model takes them. Where they are not a grid, an image is one row of tokens, and its columns,
    the last axis, count them like text."""
    patches = patches_of(model)
    if positions.dim() == 1 or patches is None or patches.layout.axes > 1:
        return positions
    return positions[-1]


class Rope(NamedTuple):
    """Positions of a history that ends in text. A later token has the position of its index plus `shift`."""

    positions_3L: Ints
    shift: int

    def between(self, start: int, end: int) -> Ints:
        """Positions of the tokens [start, end), which may lie beyond the history."""
        known = self.positions_3L[:, start:end]
        later = np.arange(max(start, self.positions_3L.shape[1]), end) + self.shift
        return np.concatenate([known, np.broadcast_to(later, (3, len(later)))], axis=1)


def rope_of(length: int, images: Iterable[ImageSpan]) -> Rope:
    """M-RoPE positions. A text token has, on all axes, one more than the largest position before it. The tokens of an
    image share one time and count its rows and columns from there."""
    parts, at, position = [], 0, 0
    for span in images:
        parts.append(np.broadcast_to(position + np.arange(span.start - at), (3, span.start - at)))
        position += span.start - at
        rows, columns = np.divmod(np.arange(span.rows * span.columns), span.columns)
        parts.append(position + np.stack([np.zeros_like(rows), rows, columns]))
        position += max(span.rows, span.columns)
        at = span.end
    parts.append(np.broadcast_to(position + np.arange(length - at), (3, length - at)))
    return Rope(np.concatenate(parts, axis=1), position - at)


class ImageIds:
    """Replaces image tokens by a negative id for each image, so that cached KV is matched by tokens and images."""

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def substitute(self, ids: Sequence[int], images: Iterable[ImageSpan]) -> list[int]:
        """The token ids, with those of each image replaced by its negative id."""
        result = list(ids)
        for span in images:
            image_id = self._ids.setdefault(span.image.hash, -1 - len(self._ids))
            result[span.start : span.end] = [image_id] * (span.end - span.start)
        return result

    def forget(self) -> None:
        """Drop all ids; no request may still use one."""
        self._ids.clear()


class FeatureCache:
    """Caches the features of recent images under the current weights. Each image is encoded by itself, so its features
    do not depend on other images."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._kept: OrderedDict[str, Features] = OrderedDict()
        self._bytes = 0

    def features(self, image: Image) -> Features:
        if image.hash not in self._kept:
            self._kept[image.hash] = image_features(self.model, [image])
            self._bytes += _size(self._kept[image.hash])
        self._kept.move_to_end(image.hash)
        while self._bytes > FEATURE_CACHE_BYTES and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return self._kept[image.hash]

    def forget(self) -> None:
        """Drop everything; called when the weights change."""
        self._kept.clear()
        self._bytes = 0


def _size(features: Features) -> int:
    return sum(x.numel() * x.element_size() for x in (features.first_VC, *features.deep_VC))


def joined(parts: Sequence[Features]) -> Features:
    """The concatenation of features."""
    deep = zip(*(part.deep_VC for part in parts), strict=True)
    return Features(torch.cat([part.first_VC for part in parts]), tuple(torch.cat(list(layer)) for layer in deep))
