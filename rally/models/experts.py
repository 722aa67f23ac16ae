"""The experts of a mixture-of-experts model in decode steps on a GPU.

transformers computes experts by grouped products (`grouped_mm`), which are made for many rows per expert. In a decode
step there are few, and the weights of all experts are read for them. `rally_experts` computes such steps by a kernel of
its own, and leaves everything else, training included, to transformers.

Shapes: T tokens, k experts of a token, S = T k pairs, E experts, C hidden size, F outputs, B blocks of pairs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from rally.models.kernels.dispatch import kernels_for
from rally.platforms import has_kernels

NAME = "rally"
MOST_ROWS = 64  # pairs per expert, on average, up to which our kernel is used


def install(model: PreTrainedModel) -> None:
    """Make the experts of `model` use `rally_experts`, if they use grouped products now."""
    if getattr(model.config, "_experts_implementation", None) == "grouped_mm":
        ALL_EXPERTS_FUNCTIONS.register(NAME, rally_experts)
        model.set_experts_implementation(NAME)


def rally_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """The forward of a module of experts, for `ALL_EXPERTS_FUNCTIONS`."""
    tokens, chosen = top_k_index.shape
    few = tokens * chosen <= MOST_ROWS * self.num_experts
    if not (few and supported(self, hidden_states)):
        output: Tensor = ALL_EXPERTS_FUNCTIONS["grouped_mm"](self, hidden_states, top_k_index, top_k_weights)
        return output
    return experts_by_kernel(self, hidden_states, top_k_index, top_k_weights)


def supported(experts: Any, hidden_states: Tensor) -> bool:
    """Whether `experts_by_kernel` computes these experts: in half precision on a GPU, without gradients."""
    # weights that are stored transposed (gpt-oss) are read twice as fast by grouped products
    # transformers 5.17 neither divides experts among devices nor has norms after them
    special = any(getattr(experts, name, False) for name in ("_is_expert_parallel", "has_post_expert_norm"))
    plain = not (special or experts.is_transposed)
    half = hidden_states.dtype in (torch.bfloat16, torch.float16)
    return plain and half and has_kernels(hidden_states.device) and not torch.is_grad_enabled()


class Blocks(NamedTuple):
    """Pairs sorted by expert, and their blocks for `grouped_linear`."""

    order_S: Tensor  # the pair at each place
    expert_S: Tensor
    ends_E: Tensor
    blocks_B2: Tensor
    block_m: int


def blocks_of(top_k_index: Tensor, experts: int) -> Blocks:
    pairs, device = top_k_index.numel(), top_k_index.device
    block_m = 16 if pairs <= 24 * experts else 32 if pairs <= 48 * experts else 64
    expert_S, order_S = torch.sort(top_k_index.reshape(-1).to(torch.int16 if experts < 2**15 else torch.int32))
    bounds = torch.arange(experts, device=device, dtype=expert_S.dtype)
    ends_E = torch.searchsorted(expert_S, bounds, right=True, out_int32=True)
    begins_E = torch.cat((ends_E.new_zeros(1), ends_E[:-1]))
    until_E = torch.cumsum((ends_E - begins_E + block_m - 1) // block_m, 0, dtype=torch.int32)
    number_B = torch.arange(pairs // block_m + min(experts, pairs), device=device, dtype=torch.int32)
    owner_B = torch.searchsorted(until_E, number_B, right=True, out_int32=True)
    at_B = owner_B.clamp(max=experts - 1).long()
    count_B = (ends_E - begins_E + block_m - 1)[at_B] // block_m
    first_B = begins_E[at_B] + (number_B - until_E[at_B] + count_B) * block_m
    expert_B = torch.where(owner_B < experts, owner_B, -1)
    return Blocks(order_S, expert_S.long(), ends_E, torch.stack((expert_B, first_B.int()), 1).contiguous(), block_m)


def experts_by_kernel(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    tokens, chosen = top_k_index.shape
    blocks = blocks_of(top_k_index, self.num_experts)
    first = self.gate_up_proj if self.has_gate else self.up_proj
    bias = (self.gate_up_proj_bias if self.has_gate else self.up_proj_bias) if self.has_bias else None
    inner = _linear(self, hidden_states, first, bias, blocks, blocks.order_S // chosen)
    inner = self._apply_gate(inner) if self.has_gate else self.act_fn(inner)
    places_S = torch.arange(tokens * chosen, device=hidden_states.device)
    output = _linear(self, inner, self.down_proj, self.down_proj_bias if self.has_bias else None, blocks, places_S)
    weighted_SC = output * top_k_weights.reshape(-1)[blocks.order_S, None]
    by_pair_SC = torch.empty_like(weighted_SC).index_copy_(0, blocks.order_S, weighted_SC)
    return by_pair_SC.view(tokens, chosen, -1).sum(1).to(hidden_states.dtype)


def _linear(self: Any, x: Tensor, weight: Tensor, bias: Tensor | None, blocks: Blocks, rows_S: Tensor) -> Tensor:
    weight_EFC = weight.transpose(1, 2) if self.is_transposed else weight
    out_SF = x.new_empty((len(blocks.order_S), weight_EFC.shape[1]))
    kernels_for(x.device).grouped_linear(
        x.contiguous(), weight_EFC, rows_S, blocks.ends_E, blocks.blocks_B2, out_SF, blocks.block_m
    )
    return out_SF if bias is None else out_SF + bias[blocks.expert_S]
