"""Sizes and policies of an embedded engine."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptionNames:
    """What a user calls what he can change; the defaults are the keys of a training run."""

    max_model_len: str = "rollout.max_model_len"
    lengths: str = "data.max_prompt_length, data.max_response_length or rollout.max_model_len"
    """What makes histories shorter."""
    memory: str = "rollout.gpu_memory_utilization"
    plain: str = "rollout.attention_backend=gather"
    """What makes attention run in plain torch."""


InFlight = Literal["abort", "keep", "recompute"]
Backend = Literal["auto", "paged", "gather"]
"""How attention reads pages: our kernels, or plain torch over copies and views; auto is paged on a GPU."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """What a user may choose; the defaults are those of the configuration."""

    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    page_size: int = 16
    memory_share: float = 0.5  # of the memory free at start, for KV and what a step needs
    in_flight: InFlight = "keep"
    seed: int = 0
    backend: Backend = "auto"
    eager: bool = False  # the paged backend without CUDA graphs and fused kernels: slower, and easier to look into
    deterministic: bool = False  # nothing depends on timing, to the last bit
    lend_memory: bool = False  # on a GPU, KV memory goes back to the device while weights are updated
    words: OptionNames = field(default_factory=OptionNames)  # in sentences about these settings
