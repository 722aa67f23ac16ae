"""Causal convolutions and scans over the tree of segments of a packed batch, in plain torch on any device.

States are float32, as are gates. A step of one token per history runs in one kernel where the device has it.

Shapes: T packed tokens, N segments, R rows of initial states, C channels, W kernel width, H heads, K key size, V value
size, c tokens of a chunk.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from rally.models.kernels.dispatch import kernels_for
from rally.models.segment_tree import ChunkPlan, DecodeTree, SegmentTree

CHUNK = 64  # tokens that a scan combines by matrix products
CHANNEL_CHUNK = 16  # the same where each channel has its own decay, which takes c * K numbers a token
STATE_NUMBERS = 2**26  # of states that a token-by-token scan keeps for the backward pass at a time


def conv(
    x_CT: Tensor,
    weight_CW: Tensor,
    bias_C: Tensor | None,
    tree: SegmentTree | DecodeTree,
    initial_RCP: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """A causal convolution of each channel over every history: [C, T], and the last P = W - 1 inputs of each segment
    [N, C, P] if `keep`."""
    channels, width = weight_CW.shape
    if isinstance(tree, DecodeTree):
        assert initial_RCP is not None
        before = initial_RCP.index_select(0, tree.rows_T).to(x_CT.dtype)
        inputs_TCW = torch.cat([before, x_CT.t()[..., None]], -1)
        output_TC = (inputs_TCW.float() * weight_CW.float()).sum(-1)
        output_TC = output_TC if bias_C is None else output_TC + bias_C.float()
        return output_TC.to(weight_CW.dtype).t(), inputs_TCW[..., 1:]
    plan = tree.conv_plan(width)
    parts = [x_CT]
    if tree.continues:
        assert initial_RCP is not None, "segments that continue need initial states"
        rows = 1 + max(segment.initial for segment in tree.segments)
        parts.append(initial_RCP[:rows].to(x_CT.dtype).transpose(0, 1).flatten(1))
    inputs_CL = torch.cat([*parts, x_CT.new_zeros((channels, 1))], 1).index_select(1, plan.source_L)
    output = F.conv1d(inputs_CL.to(weight_CW.dtype)[None], weight_CW[:, None], bias_C, groups=channels)[0]
    final = inputs_CL[:, plan.final_NW].transpose(0, 1) if keep else None
    return output.index_select(1, plan.output_T), final


def chunked_scan(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g: Tensor,
    beta_TH: Tensor | None,
    tree: SegmentTree | DecodeTree,
    initial_RHKV: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """Linear attention over every history, in float32: outputs [T, H, V] and, if `keep`, states [N, H, K, V].

    With a = exp(g), g <= 0 of shape [T, H] or [T, H, K], the state follows `S = a S + k v^T`; with `beta` the delta
    rule `S = a S + beta k (v - (a S)^T k)^T`. The output is `S^T q`.

    The tokens of a chunk are combined by matrix products, for all chunks of the batch at once. Only the states at chunk
    ends are computed one after the other, those of all histories together.
    """
    if isinstance(tree, DecodeTree):
        assert initial_RHKV is not None
        out_THV = torch.empty(v_THV.shape, dtype=torch.float32, device=v_THV.device)
        kernels_for(v_THV.device).scan_step(q_THK, k_THK, v_THV, g, beta_TH, initial_RHKV, tree.rows_T, out_THV)
        return out_THV, None
    plan = tree.chunk_plan(CHUNK if g.ndim == 2 else CHANNEL_CHUNK)
    parts = {}
    for size in plan.tokens:
        counts = [group.chunks for groups in plan.groups for group in groups if group.size == size]
        parts[size] = iter(_chunk_parts(q_THK, k_THK, v_THV, g, beta_TH, plan, size).split(counts))
    outputs: dict[int, list[Tensor]] = {size: [] for size in parts}
    first = plan.parents[0]
    assert first is not None
    zeros = q_THK.new_zeros((len(first), q_THK.shape[1], k_THK.shape[2], v_THV.shape[2]), dtype=torch.float32)
    state, kept = _initial(first, zeros, tree, initial_RHKV), []
    for depth, groups in enumerate(plan.groups):
        parent = plan.parents[depth]
        if depth and parent is not None:
            state = state.index_select(0, parent)
        after = []
        for group, before in zip(groups, state.split([one.chunks for one in groups]), strict=True):
            chunk = next(parts[group.size])
            values = chunk.values if chunk.reads is None else chunk.values - chunk.reads @ before
            outputs[group.size].append(chunk.queries @ before + chunk.attention @ values)
            after.append(before * chunk.decay + chunk.keys.transpose(-1, -2) @ values)
        state = torch.cat(after) if len(after) > 1 else after[0]
        if keep:
            kept.append(state)
    flat = torch.cat([torch.cat(found).transpose(1, 2).flatten(0, 1) for found in outputs.values()])
    return flat.index_select(0, plan.output_T), torch.cat(kept).index_select(0, plan.final_N) if keep else None


class _Chunks(NamedTuple):
    """What the chunks of one size contribute, before their initial states are known. n chunks."""

    queries: Tensor  # [n, H, c, K], decayed since the begin of the chunk
    keys: Tensor  # [n, H, c, K], decayed until its end
    values: Tensor  # [n, H, c, V]
    reads: Tensor | None  # [n, H, c, K], what the delta rule subtracts of the initial state
    attention: Tensor  # [n, H, c, c]
    decay: Tensor  # [n, H, 1 or K, 1]

    def split(self, counts: list[int]) -> list[_Chunks]:
        """Not slices: the gradient of each slice would be as large as the whole."""
        none = [None] * len(counts)
        return [_Chunks(*one) for one in zip(*(none if x is None else x.split(counts) for x in self), strict=True)]


def _chunk_parts(
    q_THK: Tensor, k_THK: Tensor, v_THV: Tensor, g: Tensor, beta_TH: Tensor | None, plan: ChunkPlan, size: int
) -> _Chunks:
    tokens, real = plan.tokens[size], plan.real[size]

    def chunks(x: Tensor, masked: bool = False) -> Tensor:  # [n, H, c, ...]
        y: Tensor = x.index_select(0, tokens.flatten()).unflatten(0, tokens.shape).float()
        if masked:
            y = y * real.view(*real.shape, *(1,) * (y.ndim - 2))
        return y.transpose(1, 2)

    q, k, v, since = chunks(q_THK), chunks(k_THK, True), chunks(v_THV), chunks(g, True).cumsum(2)
    later = torch.ones((size, size), dtype=torch.bool, device=q.device).triu(1)
    if g.ndim == 2:
        between = (since[..., :, None] - since[..., None, :]).masked_fill(later, -torch.inf).exp()
        attention = q @ k.transpose(-1, -2) * between
        since = since[..., None]
    else:
        attention = _channel_products(q, k, since, later)
    last = since[:, :, -1:]
    queries, keys, decay = q * since.exp(), k * (last - since).exp(), last.exp().transpose(-1, -2)
    if beta_TH is None:
        return _Chunks(queries, keys, v, None, attention, decay)
    beta = chunks(beta_TH, True)[..., None]
    if g.ndim == 2:
        system = (k * beta) @ k.transpose(-1, -2) * between
    else:
        system = _channel_products(k * beta, k, since, later)
    right = torch.cat([v * beta, k * beta * since.exp()], -1)
    solved = torch.linalg.solve_triangular(system, right, upper=False, unitriangular=True)
    values, reads = solved.split([v.shape[-1], k.shape[-1]], -1)
    return _Chunks(queries, keys, values, reads, attention, decay)


def _channel_products(a: Tensor, b: Tensor, since: Tensor, later: Tensor) -> Tensor:
    """a_i b_j, decayed from j to i in each channel; 0 for later j. The backward pass computes the c * c * K decays of a
    chunk again."""

    def products(a: Tensor, b: Tensor, since: Tensor) -> Tensor:
        between = (since[..., :, None, :] - since[..., None, :, :]).masked_fill(later[..., None], -torch.inf).exp()
        return torch.einsum("nhik,nhjk,nhijk->nhij", a, b, between)

    if not torch.is_grad_enabled():
        return products(a, b, since)
    output: Tensor = checkpoint(products, a, b, since, use_reentrant=False, preserve_rng_state=False)
    return output


def stepwise(
    step: Callable[..., tuple[Tensor, Tensor]],
    inputs: Sequence[Tensor],
    empty: Tensor,
    tree: SegmentTree | DecodeTree,
    initial: Tensor | None = None,
    keep: bool = False,
) -> tuple[Tensor, Tensor | None]:
    """`state, output = step(state, *inputs)` for every token of every history: outputs [T, ...], and the states at
    segment ends if `keep`. One call per position, for all histories together; `empty` is the state before the first."""
    if isinstance(tree, DecodeTree):
        assert initial is not None
        state, output = step(initial.index_select(0, tree.rows_T), *inputs)
        return output, state
    plan = tree.step_plan()
    first = plan.parents[0]
    assert first is not None
    state = _initial(first, empty.expand(len(first), *empty.shape), tree, initial)

    def run(state: Tensor, counts: list[int], parents: list[Tensor | None], *values: Tensor) -> tuple[Tensor, ...]:
        outputs, states = [], []
        for parent, *now in zip(parents, *(x.split(counts) for x in values), strict=True):
            if parent is not None:
                state = state.index_select(0, parent)
            state, output = step(state, *now)
            outputs.append(output)
            states.append(state)
        return state, torch.cat(outputs), *((torch.cat(states),) if keep else ())

    parts: list[tuple[Tensor, ...]] = []
    blocks = _blocks(plan.counts, empty.numel())
    tokens = [sum(plan.counts[block]) for block in blocks]
    ordered = [x.index_select(0, plan.order_T).split(tokens) for x in inputs]
    again = torch.is_grad_enabled() and len(blocks) > 1
    for block, *values in zip(blocks, *ordered, strict=True):
        parents = [None, *plan.parents[1:]][block]
        arguments = (state, plan.counts[block], parents, *values)
        if again:
            parts.append(checkpoint(run, *arguments, use_reentrant=False, preserve_rng_state=False))
        else:
            parts.append(run(*arguments))
        state = parts[-1][0]
    final = torch.cat([part[2] for part in parts]).index_select(0, plan.final_N) if keep else None
    return torch.cat([part[1] for part in parts]).index_select(0, plan.inverse_T), final


def _blocks(counts: Sequence[int], size: int) -> list[slice]:
    """Consecutive depths whose states, of `size` numbers each, have at most STATE_NUMBERS together. The backward pass
    computes a block again, so that not all states are in memory."""
    blocks, begin, held = [], 0, 0
    for depth, count in enumerate(counts):
        if held and held + count * size > STATE_NUMBERS:
            blocks.append(slice(begin, depth))
            begin, held = depth, 0
        held += count * size
    return [*blocks, slice(begin, len(counts))]


def stepwise_scan(
    a: Tensor, b: Tensor, tree: SegmentTree | DecodeTree, initial: Tensor | None = None, keep: bool = False
) -> tuple[Tensor, Tensor | None]:
    """`h = a h + b` elementwise over every history: h at each token [T, ...], and at segment ends if `keep`."""

    def step(state: Tensor, factor: Tensor, added: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.addcmul(added, factor, state)
        return state, state

    return stepwise(step, (a, b), b.new_zeros(b.shape[1:]), tree, initial, keep)


def _initial(rows: Tensor, zeros: Tensor, tree: SegmentTree, initial: Tensor | None) -> Tensor:
    """The states at the first depth; row -1 is empty."""
    if not tree.continues:
        return zeros
    assert initial is not None, "segments that continue need initial states"
    given = (rows >= 0).view(-1, *(1,) * (zeros.ndim - 1))
    return torch.where(given, initial.to(zeros.dtype).index_select(0, rows.clamp(min=0)), zeros)
