"""Settings of the embedded engine, and the names under which error messages refer to them."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, NamedTuple


@dataclass(frozen=True, kw_only=True)
class OptionNames:
    """The names of the user's options, for error messages; the defaults are the keys of a training run."""

    max_model_len: str = "rollout.max_model_len"
    lengths: str = "data.max_prompt_length, data.max_response_length or rollout.max_model_len"
    """The options that limit the length of a history."""
    memory: str = "rollout.gpu_memory_utilization"
    torch_attention: str = "rollout.attention_backend=gather"
    """The option that runs attention in plain torch."""
    speculation: str = "rollout.speculative_config"
    quantization: str = "rollout.quantization"
    routes: str = "rollout.enable_rollout_routing_replay and actor.router_replay.mode"


InFlight = Literal["abort", "keep", "recompute"]
Backend = Literal["auto", "paged", "gather"]
"""How attention reads pages. `paged`: Triton kernels. `gather`: plain torch over copies and views. `auto`: paged on a
GPU, otherwise gather."""


@dataclass(frozen=True, kw_only=True)
class NgramSpeculation:
    """Speculative decoding with drafts from the request's own history: what followed the last occurrence of its latest
    tokens. The names are vLLM's."""

    num_speculative_tokens: int = 4  # the most drafted tokens of a request in one step
    prompt_lookup_max: int = 4  # the longest sequence of latest tokens that is looked up, then shorter ones
    prompt_lookup_min: int = 2
    disable_by_batch_size: int = 32  # with more running requests nothing is drafted


class RolloutDemand(NamedTuple):
    """What can be of use in the KV cache at once, within one weight version: so many histories, each of so many tokens
    at most. Each of their turns may leave a partly filled page behind, which the next turn copies."""

    histories: int
    tokens: int
    turns: int = 1

    def pages(self, page_size: int) -> int:
        return self.histories * (-(-self.tokens // page_size) + self.turns)


@dataclass(frozen=True, kw_only=True)
class EngineSettings:
    """Sizes and policies; the defaults are those of the configuration."""

    max_model_len: int = 2048
    max_num_seqs: int = 256
    max_num_batched_tokens: int = 8192
    page_size: int = 16
    memory_share: float = 0.5  # of the memory free at start, for KV and what a step needs
    max_kv_bytes: int | None = None  # a limit of the KV cache beside it
    demand: RolloutDemand | None = None  # a further one on a GPU: what the rollouts of a run can use; None: unknown
    in_flight: InFlight = "keep"
    seed: int = 0
    backend: Backend = "auto"
    eager: bool = False  # the paged backend without CUDA graphs and fused kernels: slower, easier to debug
    deterministic: bool = False  # bit-identical results, whatever the timing
    isolated: bool = False  # compute each request alone and without cached prefixes: its bits depend on nothing else
    lend_memory: bool = False  # on a GPU, release the KV memory while weights are updated
    speculation: NgramSpeculation | None = None
    return_routes: bool = False  # record the experts of a mixture-of-experts model, for router replay
    quantization: Literal["fp8"] | None = None  # fp8: linear layers multiply by 8-bit copies of their weights
    option_names: OptionNames = field(default_factory=OptionNames)  # for error messages

    @property
    def max_sampled_rows(self) -> int:
        """The most tokens that one step samples: one of each request, those just admitted included, and one for each
        draft of the few that ran before."""
        drafting = self.speculation
        if drafting is None:
            return self.max_num_seqs
        few = min(self.max_num_seqs, drafting.disable_by_batch_size)
        return self.max_num_seqs + few * drafting.num_speculative_tokens
