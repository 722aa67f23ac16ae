"""Converts images to patches with the model's image processor, and caches them.

The chat codec (token counts), the engine and the trainer all use this module, so they cannot disagree. Patches are
cached by content, least recently used first out, up to a bound of memory. Token counts are cached longer, so that
counting does not need the patches again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rally.images.loading import MAX_CACHED, ImageError, decoded
from rally.types import Image

KEPT_BYTES = 1 << 30


class Patched(NamedTuple):
    """The patches of an image: `pixels` [patches, values], its tokens as `rows` x `columns`, and its patches as `grid`
    (1, high, wide)."""

    pixels: npt.NDArray[np.float32]
    grid: tuple[int, int, int]
    rows: int
    columns: int


class GridSize(NamedTuple):
    """The size of an image in tokens."""

    rows: int
    columns: int


class Patches:
    """An image processor like Qwen-VL's, the id of its image placeholder token, and a cache."""

    def __init__(self, processor: Any, token: int, kept_bytes: int = KEPT_BYTES) -> None:
        self.processor, self.token = processor, token
        self._kept: OrderedDict[str, Patched] = OrderedDict()
        self._sizes: dict[str, GridSize] = {}
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
        known = self._sizes.get(image.hash)
        if known is None:
            made = self.of(image)
            known = GridSize(made.rows, made.columns)
        return known

    @property
    def most(self) -> int:
        """The number of patches of the largest image. Larger images are scaled down."""
        return int(self.processor.size["longest_edge"]) // int(self.processor.patch_size) ** 2

    async def prepare(self, images: Sequence[Image]) -> None:
        """Make missing patches in a thread, without blocking the event loop."""
        missing = [image for image in images if self._cached(image) is None]
        if missing:
            await asyncio.to_thread(lambda: [self.of(image) for image in missing])

    def _cached(self, image: Image) -> Patched | None:
        with self._lock:
            if image.hash in self._kept:
                self._kept.move_to_end(image.hash)
            return self._kept.get(image.hash)

    def _keep(self, image: Image, made: Patched) -> None:
        with self._lock:
            if len(self._sizes) >= MAX_CACHED:
                self._sizes.clear()
            self._sizes[image.hash] = GridSize(made.rows, made.columns)
            self._kept[image.hash] = made
            self._bytes += made.pixels.nbytes
            while self._bytes > self._most and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].pixels.nbytes

    def _make(self, image: Image) -> Patched:
        try:
            made = self.processor(images=[decoded(image)], return_tensors="np")
        except (TypeError, ValueError) as problem:  # such as an image two hundred times as wide as high
            if isinstance(problem, ImageError):
                raise
            size = f"{image.width} x {image.height} pixels"
            raise ImageError(f"the image processor rejects an image of {size} ({problem}); use another") from problem
        frames, high, wide = (int(n) for n in made["image_grid_thw"][0])
        assert frames == 1, "an image is one frame"
        merge = int(self.processor.merge_size)
        pixels = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        return Patched(pixels, (frames, high, wide), high // merge, wide // merge)
