"""How each family of vision models arranges an image: what its image processor makes of it, and which tokens it has.

A layout calls the model's own image processor and keeps its arrays under the names that `get_image_features` of
transformers takes. The tokens of an image are text: feature tokens, for which the tower computes a vector each, and in
some families ordinary tokens between them (ends of rows, names of tiles).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


class Patched(NamedTuple):
    """What the vision tower gets of one image, by argument name, and its shape in the layout's own terms."""

    inputs: Mapping[str, Array]
    shape: tuple[int, ...]

    @property
    def pixels(self) -> Array:
        return self.inputs["pixel_values"]

    @property
    def bytes(self) -> int:
        return sum(array.nbytes for array in self.inputs.values())


class ImageLayout(Protocol):
    """A family of vision models. `token` is the text of a feature token, which is also what chat templates print once
    for an image. `axes` is 3 if the positions of an image are a grid (M-RoPE), and 1 if its tokens are counted."""

    @property
    def token(self) -> str: ...

    @property
    def axes(self) -> int: ...

    def patched(self, processor: Any, picture: Any) -> Patched:
        """One image, through the model's image processor."""
        ...

    def text(self, shape: tuple[int, ...]) -> str:
        """All tokens of an image of this shape."""
        ...

    def most(self, processor: Any) -> int:
        """The number of patches of the largest image. Larger images are scaled down."""
        ...


@dataclass(frozen=True)
class Grid:
    """Qwen-VL and GLM-V: patches of one grid; squares of `merge` x `merge` patches are one token. The shape is the rows
    and columns of tokens."""

    token: str
    patch: int
    merge: int
    frames: int
    axes: int = 3

    def patched(self, processor: Any, picture: Any) -> Patched:
        made = processor(images=[picture], return_tensors="np")
        grid = np.asarray(made["image_grid_thw"], dtype=np.int64)
        frames, high, wide = (int(n) for n in grid[0])
        assert frames == 1, "an image is one frame"
        return Patched({**_pixels(made), "image_grid_thw": grid}, (high // self.merge, wide // self.merge))

    def text(self, shape: tuple[int, ...]) -> str:
        return self.token * (shape[0] * shape[1])

    def most(self, processor: Any) -> int:
        return int(processor.size["longest_edge"]) // int(processor.patch_size) ** 2


@dataclass(frozen=True)
class Tiles:
    """InternVL: an image is cut into square tiles, and has `tokens` feature tokens for each. The shape is the number of
    tiles."""

    token: str
    start: str
    end: str
    tokens: int
    patches: int  # of a tile
    axes: int = 1

    def patched(self, processor: Any, picture: Any) -> Patched:
        made = processor(images=[picture], crop_to_patches=True, return_tensors="np")
        return Patched(_pixels(made), (len(made["pixel_values"]),))

    def text(self, shape: tuple[int, ...]) -> str:
        return self.start + self.token * (self.tokens * shape[0]) + self.end

    def most(self, processor: Any) -> int:
        tiles = int(processor.max_patches)
        return self.patches * (tiles + 1 if tiles > 1 else 1)


@dataclass(frozen=True)
class Lines:
    """Mistral 3 and Pixtral: rows of feature tokens, each with a token at its end. The shape is the rows and columns of
    feature tokens."""

    token: str
    line_end: str
    end: str
    patch: int
    merge: int
    axes: int = 1

    def patched(self, processor: Any, picture: Any) -> Patched:
        side = self.patch * self.merge
        made = processor(images=[picture], patch_size=side, return_tensors="np")
        sizes = np.asarray(made["image_sizes"], dtype=np.int64)
        high, wide = (int(n) // side for n in sizes[0])
        return Patched({**_pixels(made), "image_sizes": sizes}, (high, wide))

    def text(self, shape: tuple[int, ...]) -> str:
        return self.line_end.join([self.token * shape[1]] * shape[0]) + self.end

    def most(self, processor: Any) -> int:
        return int(int(processor.size["longest_edge"]) // self.patch) ** 2


@dataclass(frozen=True)
class NamedTiles:
    """Idefics 3 and SmolVLM: tiles, each after a token with its row and column, then the whole image; `tokens` feature
    tokens for each. The shape is the rows and columns of tiles, 0 and 0 for the whole image alone."""

    token: str
    fake: str
    whole: str
    tokens: int
    patches: int  # of a tile
    axes: int = 1

    def patched(self, processor: Any, picture: Any) -> Patched:
        made = processor(images=[[picture]], return_row_col_info=True, return_tensors="np")
        mask = np.asarray(made["pixel_attention_mask"], dtype=np.bool_)
        shape = (int(made["rows"][0][0]), int(made["cols"][0][0]))
        return Patched({**_pixels(made), "pixel_attention_mask": mask}, shape)

    def text(self, shape: tuple[int, ...]) -> str:
        features, (rows, columns) = self.token * self.tokens, shape
        lines = (
            "".join(f"{self.fake}<row_{row + 1}_col_{column + 1}>{features}" for column in range(columns)) + "\n"
            for row in range(rows)
        )
        return "".join(lines) + ("\n" if rows else "") + self.fake + self.whole + features + self.fake

    def most(self, processor: Any) -> int:
        tiles = -(-int(processor.size["longest_edge"]) // int(processor.max_image_size["longest_edge"]))
        return self.patches * (tiles**2 + 1)


def _pixels(made: Mapping[str, Any]) -> dict[str, Array]:
    return {"pixel_values": np.ascontiguousarray(made["pixel_values"], dtype=np.float32)}


def _grid(config: Any, token: str) -> Grid:
    vision = config.vision_config
    return Grid(token, int(vision.patch_size), int(vision.spatial_merge_size), int(vision.temporal_patch_size))


def _tiles(config: Any, token: str) -> Tiles:
    high, wide = _two(config.vision_config.image_size)
    patch_high, patch_wide = _two(config.vision_config.patch_size)
    patches = (high // patch_high) * (wide // patch_wide)
    return Tiles(token, "<img>", "</img>", int(patches * config.downsample_ratio**2), patches)


def _two(size: Any) -> tuple[int, int]:
    return (int(size[0]), int(size[1])) if isinstance(size, (list, tuple)) else (int(size), int(size))


def _lines(config: Any, token: str) -> Lines:
    return Lines(
        token, "[IMG_BREAK]", "[IMG_END]", int(config.vision_config.patch_size), int(config.spatial_merge_size)
    )


def _named_tiles(config: Any, token: str) -> NamedTiles:
    patches = (int(config.vision_config.image_size) // int(config.vision_config.patch_size)) ** 2
    count = int(patches / config.scale_factor**2)
    return NamedTiles(token, "<fake_token_around_image>", "<global-img>", count, patches)


FAMILIES: dict[str, Callable[[Any, str], ImageLayout]] = {
    **dict.fromkeys(("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen3_5", "qwen3_5_moe"), _grid),
    **dict.fromkeys(("glm4v", "glm4v_moe", "glm46v"), _grid),
    "internvl": _tiles,
    "mistral3": _lines,
    **dict.fromkeys(("idefics3", "smolvlm"), _named_tiles),
}
"""Families whose images are supported, by `model_type`: the layout from a configuration and the text of its feature
token."""
