"""Converts images to patches with the model's image processor, and caches them.

The chat codec (tokens of an image), the engine and the trainer all use this module, so they cannot disagree. Patches
are cached by content, least recently used first out, up to a bound of memory. Shapes are cached longer, so that
counting tokens does not need the patches again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from rally.images.layouts import ImageLayout, Patched
from rally.images.loading import MAX_CACHED, ImageError, decoded
from rally.types import Image

KEPT_BYTES = 1 << 30
KEPT_SHAPES = 1024  # whose tokens are kept


class GridSize(NamedTuple):
    """The size of an image in tokens. Where positions are not a grid it is one row."""

    rows: int
    columns: int


class Patches:
    """An image processor, the layout of its family, and a cache. `encode` tokenizes text without adding tokens."""

    def __init__(
        self,
        processor: Any,
        layout: ImageLayout,
        encode: Callable[[str], Sequence[int]],
        kept_bytes: int = KEPT_BYTES,
    ) -> None:
        self.processor, self.layout, self._encode = processor, layout, encode
        found = list(encode(layout.token))
        if len(found) != 1:
            raise ImageError(
                f"the tokenizer has no token {layout.token!r}, the image placeholder; use the model's own tokenizer"
            )
        self.token: int = found[0]
        """The id of a feature token."""
        self._kept: OrderedDict[str, Patched] = OrderedDict()
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._tokens: dict[tuple[int, ...], tuple[int, ...]] = {}
        self._bytes, self._most = 0, kept_bytes
        self._lock = threading.Lock()  # the engine's thread uses the cache too
        self._making = threading.Lock()  # the episodes of a group need an image at the same time; one of them makes it

    def __deepcopy__(self, memo: object) -> Patches:
        """Copies of a module share one object."""
        return self

    def of(self, image: Image) -> Patched:
        """The patches of an image, from the cache or newly made."""
        patched = self._cached(image)
        if patched is not None:
            return patched
        with self._making:
            patched = self._cached(image)
            if patched is None:
                patched = self._make(image)
                self._keep(image, patched)
            return patched

    def size(self, image: Image) -> GridSize:
        shape = self._shape(image)
        return GridSize(*shape) if self.layout.axes > 1 else GridSize(1, len(self.tokens(image)))

    def tokens(self, image: Image) -> tuple[int, ...]:
        """The ids of all tokens of an image: feature tokens, and ordinary ones in between."""
        shape = self._shape(image)
        if shape not in self._tokens:
            if len(self._tokens) >= KEPT_SHAPES:
                self._tokens.clear()
            self._tokens[shape] = tuple(self._encode(self.layout.text(shape)))
        return self._tokens[shape]

    def text(self, image: Image) -> str:
        """The tokens of an image as text."""
        return self.layout.text(self._shape(image))

    @property
    def most(self) -> int:
        """The number of patches of the largest image. Larger images are scaled down."""
        return self.layout.most(self.processor)

    async def prepare(self, images: Sequence[Image]) -> None:
        """Make missing patches in a thread, without blocking the event loop."""
        missing = [image for image in images if self._cached(image) is None]
        if missing:
            await asyncio.to_thread(lambda: [self.of(image) for image in missing])

    def _shape(self, image: Image) -> tuple[int, ...]:
        known = self._shapes.get(image.hash)
        return self.of(image).shape if known is None else known

    def _cached(self, image: Image) -> Patched | None:
        with self._lock:
            if image.hash in self._kept:
                self._kept.move_to_end(image.hash)
            return self._kept.get(image.hash)

    def _keep(self, image: Image, made: Patched) -> None:
        with self._lock:
            if len(self._shapes) >= MAX_CACHED:
                self._shapes.clear()
            self._shapes[image.hash] = made.shape
            self._kept[image.hash] = made
            self._bytes += made.bytes
            while self._bytes > self._most and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].bytes

    def _make(self, image: Image) -> Patched:
        try:
            return self.layout.patched(self.processor, decoded(image))
        except (TypeError, ValueError) as problem:  # such as an image two hundred times as wide as high
            if isinstance(problem, ImageError):
                raise
            size = f"{image.width} x {image.height} pixels"
            raise ImageError(f"the image processor rejects an image of {size} ({problem}); use another") from problem
