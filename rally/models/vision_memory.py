"""Estimates the memory of image inputs from a model's configuration, without loading weights.

Sizes are elements per patch: multiply by the number of patches and the element size. The sizes of a block are what
torch keeps of it for the backward pass, counted in the towers of three families; a forward needs no more. The towers of
the other families are assumed to be like the largest of those.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from transformers import PreTrainedConfig

from rally.images.layouts import FAMILIES
from rally.images.patches import Patches
from rally.models.vision import FEATURE_CACHE_BYTES

BLOCK_SIZES = {"qwen2_vl": (11, 3), "qwen2_5_vl": (15, 4), "qwen3_vl": (11, 2)}
"""Elements of a block, in multiples of the tower's width (attention and norms) and of its MLP's width."""
OTHER_BLOCKS = (15, 4)
MERGER_WIDTHS = 5  # in widths of the tower: normed and joined patches, and the two layers of the merger


class VisionShape(NamedTuple):
    """Dimensions of a vision tower, and elements per patch that its parts need."""

    depth: int
    width: int
    block: int  # elements per patch inside one block
    ends: int  # elements per patch before the first block and after the last
    patches: int  # per token
    features: int  # elements of the features of a token

    def forward_size(self) -> int:
        """Elements per patch of a forward without gradients."""
        return self.ends + self.block

    def training_size(self, *, checkpointing: bool) -> int:
        """Elements per patch kept for the backward pass: all of every block, or with checkpointing the input of each
        and all of one."""
        return self.ends + (self.depth * self.width + self.block if checkpointing else self.depth * self.block)


def vision_shape(config: PreTrainedConfig) -> VisionShape | None:
    """The vision tower's shape; None for a text model, and for one whose images are not supported."""
    if config.model_type not in FAMILIES:
        return None
    vision: Any = config.vision_config
    width = getattr(vision, "embed_dim", None) or vision.hidden_size  # in Qwen2-VL, hidden_size is the output width
    mlp = getattr(vision, "intermediate_size", None) or width * vision.mlp_ratio
    of_width, of_mlp = BLOCK_SIZES.get(config.model_type, OTHER_BLOCKS)
    deep = len(getattr(vision, "deepstack_visual_indexes", None) or ())
    side = max(vision.patch_size) if isinstance(vision.patch_size, (list, tuple)) else vision.patch_size
    channels = getattr(vision, "in_channels", None) or vision.num_channels
    pixels = channels * getattr(vision, "temporal_patch_size", 1) * side**2
    return VisionShape(
        depth=getattr(vision, "depth", None) or vision.num_hidden_layers,
        width=width,
        block=int(of_width * width + of_mlp * mlp),
        ends=pixels + MERGER_WIDTHS * width * (1 + deep),
        patches=_patches_per_token(config),
        features=config.get_text_config().hidden_size * (1 + deep),
    )


def _patches_per_token(config: Any) -> int:
    merge = getattr(config.vision_config, "spatial_merge_size", None) or getattr(config, "spatial_merge_size", None)
    if merge is None:  # of InternVL, or of Idefics 3 and SmolVLM
        ratio = getattr(config, "downsample_ratio", None)
        merge = 1 / ratio if ratio else config.scale_factor
    return int(merge**2)


def vision_bytes(
    config: PreTrainedConfig, max_model_len: int, max_batched_tokens: int, width: int, patches: Patches | None
) -> int:
    """What an engine needs: the forward of the largest image, the feature cache, and the features of a step. 0 for a
    text model; `width` is the size of an element in bytes."""
    tower = vision_shape(config)
    if tower is None:
        return 0
    fits = max_model_len * tower.patches
    largest = fits if patches is None else min(fits, patches.most)
    features = (largest // tower.patches + max_batched_tokens) * tower.features
    return FEATURE_CACHE_BYTES + (largest * tower.forward_size() + features) * width
