"""Ulysses sequence parallelism: the ranks of a group compute one micro-batch together, each a part of its tokens.

Outside of attention a rank has consecutive packed tokens with all their heads. Inside, one all-to-all gives it all
tokens of a part of the heads, so the attention over packed tokens is that of a single rank; a second all-to-all gives
the outputs back. Numbers per sampled token are gathered, so every rank of a group has the same loss over all of them.
The gradient of a gathered number stays with the rank that computed it: the sum of gradients over ranks, which follows,
is that of a single rank.

Every rank computes at least one token. If there are fewer tokens than ranks, the last ranks compute a padding token
that no attention, loss or gradient sees.

Shapes: T packed tokens, L those of one rank, N ranks of a group, H query heads, K key/value heads, D head size, W width
of all that is exchanged for a token and a rank, U different (position, sampled token) pairs.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel

from rally.models.attention import AttentionContext, Scores
from rally.models.state_layers import holds_state
from rally.types import RallyError

KEY = "ulysses_sequence_parallel_size"
LENGTH_DEPENDENT = ("dynamic", "longrope")  # rotary embeddings that depend on the longest position of a forward


class SequenceParallelError(RallyError):
    """A model whose sequences cannot be divided among ranks."""


def check_divisible(model: PreTrainedModel, size: int) -> None:
    """Raise unless `size` ranks can divide the tokens of a sequence. What the attention function does not see, such as
    an attention of the model's own, is found by the start-up check."""
    name, advice = type(model).__name__, f"set {KEY}=1"
    config = model.config.get_text_config()
    if holds_state(model):
        raise SequenceParallelError(
            f"{name} has layers that carry a state from token to token, and {KEY}={size} divides a sequence among "
            f"GPUs; {advice}"
        )
    heads: int | None = getattr(config, "num_attention_heads", None)
    if heads is not None and heads % size:
        raise SequenceParallelError(
            f"{KEY}={size} must divide the {heads} attention heads of {name}; choose another size"
        )
    scaling = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    kinds = {part.get("rope_type") for part in (scaling, *scaling.values()) if isinstance(part, dict)}
    if found := kinds.intersection(LENGTH_DEPENDENT):
        raise SequenceParallelError(
            f"the rotary embedding of {name} ({found.pop()}) depends on the longest position of a forward pass, and "
            f"{KEY}={size} divides a sequence among GPUs; {advice}"
        )


class SequenceGroup:
    """The ranks that compute the same micro-batch, as seen from one of them."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self._group = group
        self.rank, self.size = group.rank(), group.size()

    def tokens(self, count: int) -> list[range]:
        """Which of the packed tokens each rank computes, without padding."""
        return [range(min(first, count), min(end, count)) for first, end in itertools.pairwise(self.bounds(count))]

    def lengths(self, tokens: int) -> list[int]:
        """How many tokens each rank computes, padding included."""
        least, more = divmod(max(tokens, self.size), self.size)
        return [least + (rank < more) for rank in range(self.size)]

    def bounds(self, tokens: int) -> list[int]:
        """Where the tokens of each rank begin, and where those of the last one end."""
        return [0, *itertools.accumulate(self.lengths(tokens))]

    def own(self, values_T: Tensor) -> Tensor:
        """The part of this rank of values whose last dimension is the packed tokens; 0 for padding."""
        tokens = values_T.shape[-1]
        first, end = self.bounds(tokens)[self.rank : self.rank + 2]
        return F.pad(values_T[..., first:end], (0, max(0, end - max(first, tokens))))

    def exchange(self, values_XW: Tensor, sent: Sequence[int], received: Sequence[int]) -> Tensor:
        """Send the first `sent[0]` rows to the first rank, and so on, and get rows in the same way, with a gradient."""
        result: Tensor = _Exchange.apply(values_XW, list(sent), list(received), self._group)
        return result

    def gather(self, values_U: Tensor, counts: Sequence[int]) -> Tensor:
        """The rows of all ranks, `counts[0]` of the first, and so on. The gradient of a row goes to the rank that gave
        it: each rank of the group computes the same function of all rows, and only one gradient of each is wanted."""
        result: Tensor = _Gather.apply(values_U, list(counts), self.rank, self._group)
        return result


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_XW: Tensor, sent: list[int], received: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.sizes = (received, sent, group)
        output = values_XW.new_empty((sum(received), *values_XW.shape[1:]))
        dist.all_to_all_single(output, values_XW.contiguous(), received, sent, group=group)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return _Exchange.apply(gradients[0], *ctx.sizes), None, None, None


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values_U: Tensor, counts: list[int], rank: int, group: dist.ProcessGroup) -> Tensor:
        first = sum(counts[:rank])
        ctx.own = slice(first, first + counts[rank])
        padded = values_U.new_zeros((max(counts), *values_U.shape[1:]))
        padded[: counts[rank]] = values_U
        parts = [torch.empty_like(padded) for _ in counts]
        dist.all_gather(parts, padded, group=group)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0][ctx.own], None, None, None


@dataclass(frozen=True)
class PairShare:
    """The pairs at the tokens that this rank computes: `own` of all U. `positions_U` count from its first token."""

    own: slice
    positions_U: Tensor
    counts: tuple[int, ...] = ()  # of each rank of the group
    group: SequenceGroup | None = None

    def gather(self, values_U: Tensor) -> Tensor:
        """The numbers of all pairs, from this rank's."""
        return values_U if self.group is None else self.group.gather(values_U, self.counts)


def pair_share(group: SequenceGroup | None, predict_U: Tensor, tokens: int) -> PairShare:
    """This rank's share of pairs whose positions, `predict_U`, ascend."""
    if group is None:
        return PairShare(slice(0, len(predict_U)), predict_U)
    bounds = group.bounds(tokens)
    ends: list[int] = torch.searchsorted(predict_U, torch.tensor(bounds, device=predict_U.device)).tolist()
    own = slice(ends[group.rank], ends[group.rank + 1])
    counts = tuple(end - first for first, end in itertools.pairwise(ends))
    return PairShare(own, predict_U[own] - bounds[group.rank], counts, group)


class UlyssesAttention:
    """The attention of another context over all tokens, where each rank has a part of them and computes a part of the
    heads. Key/value heads that several ranks need are repeated."""

    compressed = False

    def __init__(self, whole: AttentionContext, group: SequenceGroup, tokens: int) -> None:
        self._whole, self._group, self._tokens = whole, group, tokens
        self._lengths = group.lengths(tokens)

    def attend(self, layer: int, q_LHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, scores: Scores) -> Tensor:
        size, (heads, kv_heads) = self._group.size, (q_LHD.shape[1], k_LKD.shape[1])
        if heads % size:
            raise SequenceParallelError(f"{KEY}={size} must divide the {heads} attention heads of layer {layer}")
        repeats = math.lcm(kv_heads, size) // kv_heads
        k_LKD, v_LKD = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (k_LKD, v_LKD))
        q, k, v = (x[: self._tokens] for x in self._heads_of_all_tokens(q_LHD, k_LKD, v_LKD))
        if scores.sinks_H is not None:
            scores = scores._replace(sinks_H=scores.sinks_H.chunk(size)[self._group.rank])
        return self._all_heads(self._whole.attend(layer, q, k, v, scores))

    def _heads_of_all_tokens(self, *parts: Tensor) -> list[Tensor]:
        """This rank's part of the heads, for all tokens. All parts travel together."""
        size, own = self._group.size, self._lengths[self._group.rank]
        pieces = [part.unflatten(1, (size, -1)) for part in parts]
        sent_NLW = torch.cat([piece.flatten(2) for piece in pieces], dim=-1).transpose(0, 1)
        all_TW = self._group.exchange(sent_NLW.flatten(0, 1), [own] * size, self._lengths)
        shapes = [piece.shape[2:] for piece in pieces]
        found = all_TW.split([math.prod(shape) for shape in shapes], dim=-1)
        return [one.unflatten(1, shape) for one, shape in zip(found, shapes, strict=True)]

    def _all_heads(self, x_THD: Tensor) -> Tensor:
        """All heads of this rank's tokens."""
        size, own = self._group.size, self._lengths[self._group.rank]
        padded = F.pad(x_THD.flatten(1), (0, 0, 0, sum(self._lengths) - self._tokens))
        found_NLW = self._group.exchange(padded, self._lengths, [own] * size).unflatten(0, (size, own))
        heads_LHD: Tensor = found_NLW.transpose(0, 1).flatten(1).unflatten(1, (-1, x_THD.shape[-1]))
        return heads_LHD
