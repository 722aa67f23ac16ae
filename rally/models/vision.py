"""Image inputs of Qwen-VL models: features replace the embeddings of image tokens, at positions with three axes.

The model carries its image preprocessing (`set_patches`), so rollout and training see the same pixels. Only spans say
where images are; a placeholder token outside of them is an ordinary token.

Shapes: T packed tokens, V of them in images, N patches, C hidden size, L tokens of a history, 3 axes (time, row,
column).
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from rally.images.patches import Patches
from rally.types import Image, ImageSpan, RallyError

Ints = npt.NDArray[np.int64]
FAMILIES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")
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


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """The vision tower of the model; None without one, or of an unknown family."""
    if model.config.model_type not in FAMILIES:
        return None
    return cast(nn.Module, cast(Any, model.base_model).visual)


def set_patches(model: PreTrainedModel, patches: Patches) -> None:
    """Attach the image preprocessing to a model with a vision tower."""
    assert tower_of(model) is not None, "the model has no known vision tower"
    model.rally_patches = patches  # type: ignore[assignment]


def patches_of(model: PreTrainedModel) -> Patches | None:
    """The image preprocessing of the model; None for a text model."""
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


def image_features(model: PreTrainedModel, images: Sequence[Image]) -> Features:
    """The features of images, concatenated, from the model's own vision tower."""
    patches, base = patches_of(model), cast(Any, model.base_model)
    if patches is None:
        raise ImageInputError("the prompt contains an image, but the model is text-only; use a vision-language model")
    patched = [patches.of(image) for image in images]
    pixels = torch.from_numpy(np.concatenate([one.pixels for one in patched])).to(model.device)
    grids = torch.tensor([one.grid for one in patched], device=model.device)
    output = base.get_image_features(pixels, grids, return_dict=True)
    deep = getattr(output, "deepstack_features", None) or ()
    return Features(_joined(output.pooler_output), tuple(_joined(one) for one in deep))


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """One tensor for all images: transformers 5.17 returns that, 5.22 returns one for each image."""
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))


def packed_seen_hidden(
    model: PreTrainedModel, ids_T: Tensor, positions_3T: Tensor, context: object, seen: SeenImages, no_mask: Tensor
) -> Tensor:
    """Last hidden states [T, C] of packed tokens, some of which are image tokens."""
    language, (first_VC, deep_VC) = cast(Any, model.base_model).language_model, seen.features
    embedded_TC = language.embed_tokens(ids_T)
    embedded_TC = embedded_TC.index_copy(0, seen.at_V, first_VC.to(embedded_TC.dtype))
    more: dict[str, Any] = {}
    if deep_VC:
        shown_T = torch.zeros(len(ids_T), dtype=torch.bool, device=ids_T.device)
        shown_T[seen.at_V] = True
        more = {"visual_pos_masks": shown_T.unsqueeze(0), "deepstack_visual_embeds": list(deep_VC)}
    output = language(
        inputs_embeds=embedded_TC.unsqueeze(0),
        position_ids=positions_3T.unsqueeze(1),
        attention_mask=no_mask,
        use_cache=False,
        rally=context,
        **more,
    )
    return cast(Tensor, output.last_hidden_state[0])


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
