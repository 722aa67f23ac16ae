"""Settings of the embedded engine, and the names under which error messages refer to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal


@dataclass(frozen=True, kw_only=True)
class OptionNames:
    """The names of the user's options, for error messages; the defaults are the keys of a training run."""

    max_model_len: str = "rollout.max_model_len"
    lengths: str = "data.max_prompt_length, data.max_response_length or rollout.max_model_len"
    """The options that limit the length of a history."""
    memory: str = "rollout.gpu_memory_utilization"
    torch_attention: str = "rollout.attention_backend=gather"
    """The option that runs attention in plain torch."""


InFlight = Literal["abort", "keep", "recompute"]
Backend = Literal["auto", "paged", "gather"]
"""How attention reads pages. `paged`: Triton kernels. `gather`: plain torch over copies and views. `auto`: paged on a
GPU, otherwise gather."""


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes and policies; the defaults are those of the configuration."""

    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    page_size: int = 16
    memory_share: float = 0.5  # of the memory free at start, for KV and what a step needs
    max_kv_bytes: int | None = None  # a limit of the KV cache beside it
    in_flight: InFlight = "keep"
    seed: int = 0
    backend: Backend = "auto"
    eager: bool = False  # the paged backend without CUDA graphs and fused kernels: slower, easier to debug
    deterministic: bool = False  # bit-identical results, whatever the timing
    isolated: bool = False  # compute each request alone and without cached prefixes: its bits depend on nothing else
    lend_memory: bool = False  # on a GPU, release the KV memory while weights are updated
    return_routes: bool = False  # record the experts of a mixture-of-experts model, for router replay
    option_names: OptionNames = field(default_factory=OptionNames)  # for error messages
