"""The trainer's module is shown images: their features take the places of their tokens, at positions with three axes.

What a module needs for that, the patches of an image, is given to it once (`give_sight`), so rollout and training look
at the same pixels. Only spans say where images are; a placeholder token outside of them is a token like any other.

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
KEPT_BYTES = 512 * 2**20  # of features, so that an image that is cut into chunks is looked at once


class ImageInputError(RallyError):
    """Images that the model cannot be given."""


class Features(NamedTuple):
    """What the tower makes of images: what takes the place of their tokens, and what is added to it after each of the
    first layers (Qwen3-VL)."""

    first_VC: Tensor
    deep_VC: tuple[Tensor, ...] = ()

    def rows(self, which: slice | Tensor) -> Features:
        return Features(self.first_VC[which], tuple(deep[which] for deep in self.deep_VC))


class SeenImages(NamedTuple):
    """The packed tokens that are of images, in order, and their features."""

    at_V: Tensor
    features: Features


def tower_of(model: PreTrainedModel) -> nn.Module | None:
    """The part of the module that looks at images; None where it has none that we know."""
    if model.config.model_type not in FAMILIES:
        return None
    return cast(nn.Module, cast(Any, model.base_model).visual)


def give_sight(model: PreTrainedModel, patches: Patches) -> None:
    assert tower_of(model) is not None, "only models with a tower that we know are given patches"
    model.rally_patches = patches  # type: ignore[assignment]


def sight_of(model: PreTrainedModel) -> Patches | None:
    return cast(Patches | None, getattr(model, "rally_patches", None))


def check_images(model: PreTrainedModel, images: Sequence[ImageSpan], length: int) -> None:
    """Say what is wrong with the images of a prompt of `length` tokens before anything is computed."""
    patches = sight_of(model)
    if patches is None:
        raise ImageInputError(
            "the prompt holds an image, but the model is for text alone; use a model that sees images"
        )
    end = 0
    for span in images:
        rows, columns = patches.size(span.image)
        if (rows, columns) != (span.rows, span.columns):
            told = f"an image of {rows} x {columns} tokens was given {span.rows} x {span.columns}"
            raise ImageInputError(f"{told}; encode it with the codec of this model")
        if not end <= span.start <= span.end <= length:
            raise ImageInputError(
                "the images of a prompt stand outside of it or over each other; give their places in it"
            )
        end = span.end


def image_features(model: PreTrainedModel, images: Sequence[Image]) -> Features:
    """The features of images, one after the other, by the module's own tower."""
    patches, base = sight_of(model), cast(Any, model.base_model)
    if patches is None:
        raise ImageInputError("the model is for text alone and was given an image; use a model that sees images")
    patched = [patches.of(image) for image in images]
    pixels = torch.from_numpy(np.concatenate([one.pixels for one in patched])).to(model.device)
    grids = torch.tensor([one.grid for one in patched], device=model.device)
    found = base.get_image_features(pixels, grids, return_dict=True)
    deep = getattr(found, "deepstack_features", None) or ()
    return Features(_joined(found.pooler_output), tuple(_joined(one) for one in deep))


def _joined(features: Tensor | Sequence[Tensor]) -> Tensor:
    """Of all images in one; transformers 5.17 has that already where 5.22 has one for each image."""
    return features if isinstance(features, Tensor) else torch.cat(tuple(features))


def packed_seen_hidden(
    model: PreTrainedModel, ids_T: Tensor, positions_3T: Tensor, context: object, seen: SeenImages, no_mask: Tensor
) -> Tensor:
    """Last hidden states [T, C] of packed tokens, some of which are of images."""
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
    """Positions of a history that ends in text; whatever follows is `shift` further on than its number."""

    positions_3L: Ints
    shift: int

    def between(self, start: int, end: int) -> Ints:
        """Those of the tokens [start, end), which may go on behind the history."""
        known = self.positions_3L[:, start:end]
        later = np.arange(max(start, self.positions_3L.shape[1]), end) + self.shift
        return np.concatenate([known, np.broadcast_to(later, (3, len(later)))], axis=1)


def rope_of(length: int, images: Iterable[ImageSpan]) -> Rope:
    """A text token is one further on, on all axes, than the largest position before it. The tokens of an image share
    one time and count its rows and columns from there."""
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


class Names:
    """In an engine, a token of an image is a negative number that names the image: so a prefix of cached KV is found by
    its tokens and its images, and two images never share one."""

    def __init__(self) -> None:
        self._known: dict[str, int] = {}

    def named(self, ids: Sequence[int], images: Iterable[ImageSpan]) -> list[int]:
        named = list(ids)
        for span in images:
            name = self._known.setdefault(span.image.hash, -1 - len(self._known))
            named[span.start : span.end] = [name] * (span.end - span.start)
        return named

    def forget(self) -> None:
        """Nobody holds a name any more."""
        self._known.clear()


class FeatureCache:
    """The features of the images that requests were shown lately, under the current weights. Each is computed by
    itself, so what an image gives does not depend on what else is being computed."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._kept: OrderedDict[str, Features] = OrderedDict()
        self._bytes = 0

    def features(self, image: Image) -> Features:
        if image.hash not in self._kept:
            self._kept[image.hash] = image_features(self.model, [image])
            self._bytes += _size(self._kept[image.hash])
        self._kept.move_to_end(image.hash)
        while self._bytes > KEPT_BYTES and len(self._kept) > 1:
            self._bytes -= _size(self._kept.popitem(last=False)[1])
        return self._kept[image.hash]

    def forget(self) -> None:
        """The weights have changed."""
        self._kept.clear()
        self._bytes = 0


def _size(features: Features) -> int:
    return sum(x.numel() * x.element_size() for x in (features.first_VC, *features.deep_VC))


def joined(parts: Sequence[Features]) -> Features:
    deep = zip(*(part.deep_VC for part in parts), strict=True)
    return Features(torch.cat([part.first_VC for part in parts]), tuple(torch.cat(list(layer)) for layer in deep))
