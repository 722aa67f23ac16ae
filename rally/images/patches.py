"""An image becomes the patches that the model's own image processor makes of it, the same ones everywhere.

How many tokens an image takes (the chat codec), what the engine computes and what is trained on all come from here, so
they cannot disagree. Patches are kept by content, the latest of them, up to a bound of memory; how many tokens an image
takes is remembered for longer, so that whoever only counts need not make them again.
"""

from __future__ import annotations

import asyncio
import threading
from collections import OrderedDict
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from rally.images.loading import MOST_REMEMBERED, ImageError, decoded
from rally.types import Image

KEPT_BYTES = 1 << 30


class Patched(NamedTuple):
    """`pixels` [patches, values] of an image whose tokens are `rows` x `columns`; `grid` counts its patches, as
    (1, high, wide)."""

    pixels: npt.NDArray[np.float32]
    grid: tuple[int, int, int]
    rows: int
    columns: int


class GridSize(NamedTuple):
    """Of an image, in tokens."""

    rows: int
    columns: int


class Patches:
    """An image processor in the manner of Qwen-VL, the id of the token that stands for an image, and a memory."""

    def __init__(self, processor: Any, token: int, kept_bytes: int = KEPT_BYTES) -> None:
        self.processor, self.token = processor, token
        self._kept: OrderedDict[str, Patched] = OrderedDict()
        self._sizes: dict[str, GridSize] = {}
        self._bytes, self._most = 0, kept_bytes
        self._lock = threading.Lock()  # the engine's thread asks too
        self._making = threading.Lock()  # a group asks for its image at once, and one of them makes it

    def __deepcopy__(self, memo: object) -> Patches:
        """A copy of a module looks through the same eyes."""
        return self

    def of(self, image: Image) -> Patched:
        found = self._known(image)
        if found is not None:
            return found
        with self._making:
            found = self._known(image)
            if found is None:
                found = self._make(image)
                self._keep(image, found)
            return found

    def size(self, image: Image) -> GridSize:
        known = self._sizes.get(image.hash)
        if known is None:
            made = self.of(image)
            known = GridSize(made.rows, made.columns)
        return known

    @property
    def most(self) -> int:
        """Patches of the largest image; whatever is larger is made smaller."""
        return int(self.processor.size["longest_edge"]) // int(self.processor.patch_size) ** 2

    async def prepare(self, images: Sequence[Image]) -> None:
        """Make what is missing beside the event loop, which others need meanwhile."""
        missing = [image for image in images if self._known(image) is None]
        if missing:
            await asyncio.to_thread(lambda: [self.of(image) for image in missing])

    def _known(self, image: Image) -> Patched | None:
        with self._lock:
            if image.hash in self._kept:
                self._kept.move_to_end(image.hash)
            return self._kept.get(image.hash)

    def _keep(self, image: Image, made: Patched) -> None:
        with self._lock:
            if len(self._sizes) >= MOST_REMEMBERED:
                self._sizes.clear()
            self._sizes[image.hash] = GridSize(made.rows, made.columns)
            self._kept[image.hash] = made
            self._bytes += made.pixels.nbytes
            while self._bytes > self._most and len(self._kept) > 1:
                self._bytes -= self._kept.popitem(last=False)[1].pixels.nbytes

    def _make(self, image: Image) -> Patched:
        try:
            made = self.processor(images=[decoded(image)], return_tensors="np")
        except (TypeError, ValueError) as problem:  # such as a picture two hundred times as wide as high
            if isinstance(problem, ImageError):
                raise
            told = f"the image processor does not take an image of {image.width} x {image.height} pixels ({problem})"
            raise ImageError(f"{told}; use another") from problem
        frames, high, wide = (int(n) for n in made["image_grid_thw"][0])
        assert frames == 1, "an image is one frame"
        merge = int(self.processor.merge_size)
        pixels = np.ascontiguousarray(made["pixel_values"], dtype=np.float32)
        return Patched(pixels, (frames, high, wide), high // merge, wide // merge)
