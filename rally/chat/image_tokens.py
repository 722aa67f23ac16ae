"""Expands the image placeholders of a chat template to the tokens that each image takes, and records their spans.

A template prints one placeholder token for each image. Each is replaced by the tokens of its image, in order. A
template that prints more or fewer placeholders than there are images is an error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rally.chat.templates import TemplateError
from rally.images.loading import has_images, image_parts
from rally.images.patches import Patches
from rally.types import Image, ImageSpan, Message

TEXT_ONLY = (
    "but this is a text model, or a vision model that is used for text here: over servers (vLLM, SGLang, or ones that "
    "already run), or without preprocessor_config.json in its folder; use a vision model whose images are supported, "
    "with rollout.name=embedded"
)


class EncodedMessages(NamedTuple):
    """Ids and image spans, relative to the first id."""

    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()


class ImageTokens:
    """The image placeholder of a tokenizer. Without `patches` (a text model), images are an error."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, patches: Patches | None) -> None:
        self.patches = patches
        self.pad = -1 if patches is None else patches.token
        self.token: str | None = None  # the placeholder as text
        if patches is not None:
            known = tokenizer.convert_ids_to_tokens(patches.token) if patches.token < len(tokenizer) else None
            if not known:
                raise TemplateError(
                    f"the tokenizer has no token {patches.token}, the image placeholder; use the model's own tokenizer"
                )
            self.token = str(known)

    def expand(self, ids: tuple[int, ...], messages: Sequence[Message]) -> EncodedMessages:
        """The `ids` of a rendering of `messages`, with the placeholder of each image replaced by its tokens."""
        images = self._images(messages)
        if not images:
            return EncodedMessages(ids)
        places = [i for i, token in enumerate(ids) if token == self.pad]
        self._check(len(places), len(images))
        assert self.patches is not None
        wide: list[int] = []
        spans, done = [], 0
        for place, image in zip(places, images, strict=True):
            wide += ids[done:place]
            spans.append(self._span(len(wide), image))
            wide += self.patches.tokens(image)
            done = place + 1
        return EncodedMessages((*wide, *ids[done:]), tuple(spans))

    def locate(self, ids: Sequence[int], images: Sequence[Image], mask: Sequence[int]) -> tuple[ImageSpan, ...]:
        """The spans of the images in a whole history, in order. Sampled placeholder tokens (mask 1) are not images."""
        if self.patches is None:
            if images:
                raise TemplateError(f"the history contains images, {TEXT_ONLY}")
            return ()
        places = [i for i, sampled in enumerate(mask) if not sampled and ids[i] == self.pad]
        spans: list[ImageSpan] = []
        done = 0  # placeholders that belong to the images so far
        for image in images:
            tokens = self.patches.tokens(image)
            first = places[done] if done < len(places) else len(ids)
            span = self._span(first - tokens.index(self.pad), image)
            if tuple(ids[max(span.start, 0) : span.end]) != tokens or any(mask[span.start : span.end]):
                break
            spans.append(span)
            done += tokens.count(self.pad)
        if len(spans) < len(images) or done != len(places):
            needed = sum(self.patches.tokens(image).count(self.pad) for image in images)
            raise TemplateError(
                f"the history has {len(places)} placeholder tokens, but its {len(images)} images take {needed}, each "
                "contiguous; pass the images in order, and encode them with this codec"
            )
        return tuple(spans)

    def expand_text(self, text: str, messages: Sequence[Message]) -> str:
        """`expand` for the text of a rendering."""
        images = self._images(messages)
        if not images or self.token is None:
            return text
        assert self.patches is not None
        first, *rest = text.split(self.token)
        self._check(len(rest), len(images))
        shown = (self.patches.text(image) for image in images)
        return first + "".join(one + piece for one, piece in zip(shown, rest, strict=True))

    def _images(self, messages: Sequence[Message]) -> list[Image]:
        if not any(isinstance(message.get("content"), list) for message in messages):
            return []  # text alone
        if self.patches is None and has_images(messages):
            raise TemplateError(f"the messages contain images, {TEXT_ONLY}")
        return image_parts(messages)

    def _check(self, placeholders: int, images: int) -> None:
        if placeholders != images:
            raise TemplateError(
                f"the chat template prints {placeholders} placeholders for {images} images; use one that prints one "
                "for each (custom_chat_template)"
            )

    def _span(self, start: int, image: Image) -> ImageSpan:
        assert self.patches is not None
        return ImageSpan(start, *self.patches.size(image), image)
