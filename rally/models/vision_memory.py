"""What looking at images takes in memory, as a formula over a model's configuration: no weight is loaded for it.

Numbers are of one patch; times patches and the bytes of a number they are memory. Those inside a block are what torch
keeps of it for a backward pass, counted in the towers of the three families; a forward alone needs no more.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from rally.images.patches import Patches
from rally.models.vision import KEPT_BYTES

INSIDE = {"qwen2_vl": (11, 3), "qwen2_5_vl": (15, 4), "qwen3_vl": (11, 2)}
"""Of a block, in widths of the tower and of its MLP: attention and norms, and what becomes of the MLP's halves."""
OF_A_MERGER = 5  # widths of the tower: patches that are normed and joined to a token's, and its two layers


class VisionShape(NamedTuple):
    depth: int
    width: int
    inside: int  # numbers of a patch inside one block
    ends: int  # and before the first and after the last
    patches: int  # of a token
    features: int  # numbers that a token is given

    def looking(self) -> int:
        """Numbers of a patch while it is looked at, and nothing is learned."""
        return self.ends + self.inside

    def learning(self, *, checkpointing: bool) -> int:
        """Numbers of a patch that wait for a backward pass: of every block all, or its input and one block's all."""
        return self.ends + (self.depth * self.width + self.inside if checkpointing else self.depth * self.inside)


def vision_shape(config: PreTrainedConfig) -> VisionShape | None:
    """None for a model for text."""
    if config.model_type not in INSIDE:
        return None
    vision: Any = config.vision_config
    width = getattr(vision, "embed_dim", None) or vision.hidden_size  # Qwen2-VL calls what it gives its hidden size
    mlp = getattr(vision, "intermediate_size", None) or width * vision.mlp_ratio
    of_width, of_mlp = INSIDE[config.model_type]
    deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    pixels = vision.in_channels * vision.temporal_patch_size * vision.patch_size**2
    return VisionShape(
        depth=vision.depth,
        width=width,
        inside=of_width * width + of_mlp * mlp,
        ends=pixels + OF_A_MERGER * width * (1 + deep),
        patches=vision.spatial_merge_size**2,
        features=config.get_text_config().hidden_size * (1 + deep),
    )


def vision_bytes(
    config: PreTrainedConfig, max_model_len: int, max_batched_tokens: int, width: int, patches: Patches | None
) -> int:
    """Of an engine: the largest image while it is looked at, features that are kept, and those of a step. 0 for a model
    for text; `width` is the bytes of a number."""
    tower = vision_shape(config)
    if tower is None:
        return 0
    fits = max_model_len * tower.patches
    most = fits if patches is None else min(fits, patches.most)
    given = (most // tower.patches + max_batched_tokens) * tower.features
    return KEPT_BYTES + (most * tower.looking() + given) * width
