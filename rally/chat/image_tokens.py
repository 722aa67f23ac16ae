"""Where a template marks an image, the history gets as many tokens as the model sees in it, and says which they are.

A template prints one placeholder for each image. Each is widened to the image's own count, in order; a template that
prints more or fewer of them than there are images is refused.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from transformers import PreTrainedTokenizerBase

from rally.chat.templates import TemplateError
from rally.images.loading import has_images, image_parts
from rally.images.patches import Patches
from rally.types import Image, ImageSpan, Message


class EncodedMessages(NamedTuple):
    """Ids, and which of them are images, counted from the first of these ids."""

    ids: tuple[int, ...]
    images: tuple[ImageSpan, ...] = ()


class ImageTokens:
    """One tokenizer's placeholder, and how many tokens an image takes; without `patches`, no image is taken at all."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, patches: Patches | None) -> None:
        self.patches = patches
        self.pad = -1 if patches is None else patches.token
        self.token: str | None = None  # the placeholder as text
        if patches is not None:
            known = tokenizer.convert_ids_to_tokens(patches.token) if patches.token < len(tokenizer) else None
            if not known:
                raise TemplateError(
                    f"the tokenizer has no token {patches.token}, which stands for images; use the model's own"
                )
            self.token = str(known)

    def expand(self, ids: tuple[int, ...], messages: Sequence[Message]) -> EncodedMessages:
        """`ids` of a rendering of `messages`, with every image as wide as it is."""
        images = self._images(messages)
        if not images:
            return EncodedMessages(ids)
        places = [i for i, token in enumerate(ids) if token == self.pad]
        self._check(len(places), len(images))
        wide: list[int] = []
        spans, done = [], 0
        for place, image in zip(places, images, strict=True):
            wide += ids[done:place]
            spans.append(self._span(len(wide), image))
            wide += [self.pad] * (spans[-1].end - spans[-1].start)
            done = place + 1
        return EncodedMessages((*wide, *ids[done:]), tuple(spans))

    def locate(self, ids: Sequence[int], images: Sequence[Image], mask: Sequence[int]) -> tuple[ImageSpan, ...]:
        """Where images stand in a whole history, in their order; what was sampled (mask 1) is none of their places."""
        if self.patches is None:
            if images:
                raise TemplateError("the history holds images, but the model is for text alone; use one that sees them")
            return ()
        observed = (i for i, sampled in enumerate(mask) if not sampled)
        places = [i for i in observed if ids[i] == self.pad]
        spans, done = [], 0
        for image in images:
            spans.append(self._span(places[done] if done < len(places) else len(ids), image))
            done += spans[-1].end - spans[-1].start
        if places != [i for span in spans for i in range(span.start, span.end)]:
            told = (
                f"the history has {len(places)} placeholder tokens, its {len(images)} images take {done}, each in a row"
            )
            raise TemplateError(f"{told}; give the images in their order, and encode them with this codec")
        return tuple(spans)

    def expand_text(self, text: str, messages: Sequence[Message]) -> str:
        """The same of a rendering's text."""
        images = self._images(messages)
        if not images or self.token is None:
            return text
        token = self.token
        first, *rest = text.split(token)
        self._check(len(rest), len(images))
        counts = (span.end for span in (self._span(0, image) for image in images))
        return first + "".join(token * count + piece for count, piece in zip(counts, rest, strict=True))

    def _images(self, messages: Sequence[Message]) -> list[Image]:
        if self.patches is None and has_images(messages):
            raise TemplateError("the messages hold images, but the model is for text alone; use one that sees images")
        return image_parts(messages)

    def _check(self, found: int, wanted: int) -> None:
        if found != wanted:
            raise TemplateError(
                f"the chat template shows {found} of {wanted} images; give one that prints each of them "
                "(custom_chat_template)"
            )

    def _span(self, start: int, image: Image) -> ImageSpan:
        assert self.patches is not None
        return ImageSpan(start, *self.patches.size(image), image)
