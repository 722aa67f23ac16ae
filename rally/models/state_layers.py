"""Layers that hold state, such as convolutions and linear attention, in packed forwards.

transformers computes these layers over a batch of rows, each from an empty state. A packed forward needs more: its one
row holds segments of several histories, and a segment begins where another segment ended, with a state that the caller
kept, or empty. `install` replaces the functions that the modeling module of a model calls, by its names there: the
convolution, the scan, and the fused kernels that would skip both. Inside a packed forward ours run; otherwise the
original function is called with the same arguments.

A packed forward is one whose body is called with the keyword `rally`, a `StateContext`. Gradient checkpointing computes
layers again in another thread, where that keyword may not arrive; the context is therefore a forward variable.

States are float32, as are gates and norms. The scans are plain torch on any device.

Shapes: T packed tokens, N segments, R rows of initial states, C channels, W kernel width, H heads, K key size, V value
size, c tokens of a chunk.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers.activations import ACT2FN

from rally.models.forward_variables import forward_variable
from rally.models.kernels.dispatch import kernels_for
from rally.platforms import from_host

CHUNK = 64  # tokens that a scan combines by matrix products
CHANNEL_CHUNK = 16  # the same where each channel has its own decay, which takes c * K numbers a token
STATE_NUMBERS = 2**26  # of states that a token-by-token scan keeps for the backward pass at a time

Ints = np.ndarray[Any, np.dtype[np.int64]]
Plan = TypeVar("Plan")


class StateSegment(NamedTuple):
    """Consecutive packed tokens of one history. It continues segment `parent`, or row `initial` of the initial states;
    with neither, its state is empty at first. Segments may stand before their parents."""

    length: int
    parent: int = -1
    initial: int = -1


class StateContext(Protocol):
    """What a packed forward tells the layers that hold state.

    A state is named after its module, `model.layers.3.linear_attn.conv0` or `...scan0`. A convolution's is [C, W - 1],
    its last inputs, oldest first. A scan's is [H, K, V] in float32, and [channels, V] for Mamba 1 and RecurrentGemma.
    """

    @property
    def tree(self) -> SegmentTree | DecodeTree: ...

    @property
    def keeps_states(self) -> bool:
        """Whether `store_final_states` is called."""
        ...

    def initial_states(self, name: str) -> Tensor | None:
        """[R, ...]; None if no segment has an `initial` row."""
        ...

    def store_final_states(self, name: str, states: Tensor) -> None:
        """[N, ...], the state at the end of every segment."""
        ...


class ConvPlan(NamedTuple):
    """Inputs of a convolution over all segments, each after its last W - 1 ancestors."""

    source_L: Tensor  # into the T tokens, then the R * (W - 1) initial inputs, then a zero
    output_T: Tensor  # into the L - W + 1 outputs
    final_NW: Tensor  # into the L inputs: the last W - 1 of each segment


class ChunkGroup(NamedTuple):
    """Chunks of one depth and size. The groups of a size are its chunks, in order."""

    size: int
    chunks: int


class ChunkPlan(NamedTuple):
    """Chunks of segments, by depth: the chunks of a depth begin where chunks of the depth before ended."""

    tokens: dict[int, Tensor]  # per size [chunks, size], padded with 0
    real: dict[int, Tensor]  # per size [chunks, size], False at padding
    groups: list[list[ChunkGroup]]  # per depth
    parents: list[Tensor | None]  # per depth: into the chunks of the depth before; None: the same, in order
    output_T: Tensor  # into all sizes' chunks, flat
    final_N: Tensor  # into the chunks by depth: the last one of each segment


class StepwisePlan(NamedTuple):
    """Tokens by depth: each depth holds the next token of every history."""

    order_T: Tensor
    counts: list[int]
    parents: list[Tensor | None]
    inverse_T: Tensor
    final_N: Tensor


class SegmentTree:
    """The segments of a packed batch, in order. What layers need is computed once per batch."""

    def __init__(self, segments: Sequence[StateSegment], device: torch.device) -> None:
        self.segments = list(segments)
        self.device = device
        self.ends = np.cumsum([segment.length for segment in segments])
        self.begins = self.ends - [segment.length for segment in segments]
        self.tokens = int(self.ends[-1])
        self.continues = any(segment.initial >= 0 for segment in segments)
        assert all(segment.length > 0 for segment in segments), "segments are not empty"
        assert all(s.parent < 0 or s.initial < 0 for s in segments), "a segment has one beginning"
        self._plans: dict[tuple[str, int], Any] = {}

    @classmethod
    def of_branches(cls, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> SegmentTree:
        """From consecutive branches; `parents` is the packed token before the first one of each, -1 for none. Branches
        are cut where another one leaves them."""
        ends = np.cumsum(lengths)
        cuts = np.unique([0, *ends, *(parent + 1 for parent in parents if parent >= 0)])
        before = dict(zip((ends - lengths).tolist(), parents, strict=True))
        ending = {int(end): number for number, end in enumerate(cuts[1:])}
        segments = []
        for number, (begin, end) in enumerate(zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True)):
            parent = before.get(begin, begin - 1)
            assert begin in before or ending[begin] == number - 1
            segments.append(StateSegment(end - begin, ending[parent + 1] if parent >= 0 else -1))
        return cls(segments, device)

    @functools.cached_property
    def topological(self) -> list[int]:
        """Segments, each after its parent."""
        children: dict[int, list[int]] = {}
        for number, segment in enumerate(self.segments):
            children.setdefault(segment.parent, []).append(number)
        order = list(children.get(-1, ()))
        for number in order:  # grows
            order.extend(children.get(number, ()))
        assert len(order) == len(self.segments), "every segment has a first ancestor"
        return order

    def conv_plan(self, width: int) -> ConvPlan:
        return self._planned("conv", width, self._conv_plan)

    def chunk_plan(self, size: int) -> ChunkPlan:
        return self._planned("chunk", size, self._chunk_plan)

    def step_plan(self) -> StepwisePlan:
        return self._planned("step", 1, lambda _: self._step_plan())

    def _planned(self, kind: str, size: int, make: Callable[[int], Plan]) -> Plan:
        if (kind, size) not in self._plans:
            self._plans[kind, size] = make(size)
        plan: Plan = self._plans[kind, size]
        return plan

    def _placed(self, values: Any) -> Tensor:
        here = torch.from_numpy(np.ascontiguousarray(values))
        return from_host(here, self.device)

    def _conv_plan(self, width: int) -> ConvPlan:
        past = width - 1
        rows = 1 + max((segment.initial for segment in self.segments), default=-1)
        zero = self.tokens + rows * past
        histories: dict[int, Ints] = {}  # the last inputs at the end of each segment
        parts: list[Ints] = [np.empty(0, np.int64)] * len(self.segments)
        for number in self.topological:
            segment = self.segments[number]
            if segment.parent >= 0:
                before = histories[segment.parent]
            elif segment.initial >= 0:
                before = self.tokens + segment.initial * past + np.arange(past)
            else:
                before = np.full(past, zero)
            parts[number] = np.concatenate([before, np.arange(self.begins[number], self.ends[number])])
            histories[number] = parts[number][len(parts[number]) - past :]
        shifts = past * np.arange(len(self.segments))
        outputs = np.arange(self.tokens) + np.repeat(shifts, [segment.length for segment in self.segments])
        finals = (self.ends + shifts + past)[:, None] - np.arange(past, 0, -1)
        return ConvPlan(*(self._placed(x) for x in (np.concatenate(parts), outputs, finals)))

    def _chunk_plan(self, size: int) -> ChunkPlan:
        """Sizes are 1, 16 and `size`, so that a decode step beside a prompt is not padded to a whole chunk."""
        sizes = sorted({1, min(16, size), size})
        depth_after: dict[int, tuple[int, int]] = {}  # per segment: depth and number of its last chunk
        chunks: list[list[tuple[int, int, int, int]]] = []  # per depth: size, first token, length, parent's number
        lasts: dict[int, tuple[int, int]] = {}
        for number in self.topological:
            segment = self.segments[number]
            depth, parent = depth_after[segment.parent] if segment.parent >= 0 else (-1, segment.initial)
            for begin in range(int(self.begins[number]), int(self.ends[number]), size):
                depth += 1
                length = min(size, int(self.ends[number]) - begin)
                if depth == len(chunks):
                    chunks.append([])
                chunks[depth].append((next(s for s in sizes if s >= length), begin, length, parent))
                parent = len(chunks[depth]) - 1
            depth_after[number] = lasts[number] = (depth, parent)
        tokens: dict[int, list[Ints]] = {s: [] for s in sizes}
        real: dict[int, list[Any]] = {s: [] for s in sizes}
        groups, parents, places = [], [], []
        positions: list[list[int]] = []  # per depth: the place of each chunk after sorting by size
        for level in chunks:
            order = sorted(range(len(level)), key=lambda i: level[i][0])
            places_of = np.empty(len(level), np.int64)
            places_of[order] = np.arange(len(level))
            found: list[ChunkGroup] = []
            sources = []
            for i in order:
                padded, begin, length, parent = level[i]
                if not found or found[-1].size != padded:
                    found.append(ChunkGroup(padded, 0))
                found[-1] = found[-1]._replace(chunks=found[-1].chunks + 1)
                inside = np.arange(padded) < length
                places.append((padded, len(tokens[padded]), begin, length))
                tokens[padded].append(np.where(inside, begin + np.arange(padded), 0))
                real[padded].append(inside)
                sources.append(parent if not positions else positions[-1][parent])
            groups.append(found)
            parents.append(np.array(sources, np.int64))
            positions.append(places_of.tolist())
        starts, flat = {}, 0
        for s in sizes:
            starts[s], flat = flat, flat + s * len(tokens[s])
        outputs = np.empty(self.tokens, np.int64)
        for padded, number, begin, length in places:
            outputs[begin : begin + length] = starts[padded] + number * padded + np.arange(length)
        before = np.cumsum([0, *(len(level) for level in chunks)])
        finals = [before[lasts[n][0]] + positions[lasts[n][0]][lasts[n][1]] for n in range(len(self.segments))]
        return ChunkPlan(
            tokens={s: self._placed(np.stack(tokens[s])) for s in sizes if tokens[s]},
            real={s: self._placed(np.stack(real[s])) for s in sizes if real[s]},
            groups=groups,
            parents=self._parents(parents, [len(level) for level in chunks]),
            output_T=self._placed(outputs),
            final_N=self._placed(np.array(finals, np.int64)),
        )

    def _step_plan(self) -> StepwisePlan:
        order: list[list[int]] = []
        sources: list[list[int]] = []
        after: dict[int, tuple[int, int]] = {}
        for number in self.topological:
            segment = self.segments[number]
            depth, parent = after[segment.parent] if segment.parent >= 0 else (-1, segment.initial)
            for token in range(int(self.begins[number]), int(self.ends[number])):
                depth += 1
                if depth == len(order):
                    order.append([])
                    sources.append([])
                order[depth].append(token)
                sources[depth].append(parent)
                parent = len(order[depth]) - 1
            after[number] = (depth, parent)
        counts = [len(level) for level in order]
        flat = np.array([token for level in order for token in level], np.int64)
        before = np.cumsum([0, *counts])
        finals = [before[after[n][0]] + after[n][1] for n in range(len(self.segments))]
        return StepwisePlan(
            order_T=self._placed(flat),
            counts=counts,
            parents=self._parents([np.array(s, np.int64) for s in sources], counts),
            inverse_T=self._placed(np.argsort(flat)),
            final_N=self._placed(np.array(finals, np.int64)),
        )

    def _parents(self, parents: Sequence[Ints], counts: Sequence[int]) -> list[Tensor | None]:
        """On the device in one copy; None where chunk i follows chunk i. The first ones are rows of initial states."""
        flat = self._placed(np.concatenate(list(parents))).split([len(p) for p in parents])
        same = [
            depth > 0 and len(p) == counts[depth - 1] and bool((p == np.arange(len(p))).all())
            for depth, p in enumerate(parents)
        ]
        return [None if skip else part for part, skip in zip(flat, same, strict=True)]


class DecodeTree(NamedTuple):
    """A step of one token per history. The initial states are all rows of a cache, of which `rows_T` are those of the
    tokens; a scan may update them in place. No plan depends on the histories, so a CUDA graph can capture it."""

    rows_T: Tensor


class BranchContext:
    """The context of a training forward: branches of a packed batch, all of which begin with an empty state or within
    the batch."""

    keeps_states = False

    def __init__(self, lengths: Sequence[int], parents: Sequence[int], device: torch.device) -> None:
        self._branches = (lengths, parents, device)

    @functools.cached_property
    def tree(self) -> SegmentTree:
        return SegmentTree.of_branches(*self._branches)

    def initial_states(self, name: str) -> None:
        return None

    def store_final_states(self, name: str, states: Tensor) -> None:
        raise AssertionError("training keeps no states")


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


@dataclass
class _StateLayer:
    """A layer that is being computed in a packed forward. Its convolutions and scans are numbered by their calls."""

    context: StateContext
    name: str
    outer: _StateLayer | None
    calls: dict[str, int]

    def run(self, kind: str, compute: Callable[..., tuple[Tensor, Tensor | None]], *arguments: Any) -> Tensor:
        """Call `compute(*arguments, tree, initial, keep)` between reading and storing the state."""
        number = self.calls.get(kind, 0)
        self.calls[kind] = number + 1
        name = f"{self.name}.{kind}{number}"
        output, final = compute(
            *arguments, self.context.tree, self.context.initial_states(name), self.context.keeps_states
        )
        if final is not None:
            self.context.store_final_states(name, final)
        return output


_context: ContextVar[StateContext | None] = forward_variable("packed forward")
_layer: ContextVar[_StateLayer | None] = ContextVar("layer of a packed forward", default=None)

Original = Callable[..., Any]


def _conv1d(
    layer: _StateLayer,
    hidden_states: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    activation: Any = None,
    **_: Any,
) -> Tensor:
    output_CT = layer.run("conv", conv, hidden_states[0], weight, bias)
    if activation is not None:
        output_CT = ACT2FN[activation](output_CT)
    return output_CT.to(hidden_states.dtype)[None]


def _gated_delta_rule(
    layer: _StateLayer,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    g: Tensor,
    beta: Tensor,
    *,
    use_qk_l2norm_in_kernel: bool = False,
    **_: Any,
) -> tuple[Tensor, None]:
    q, k = query[0].float(), key[0].float()
    if use_qk_l2norm_in_kernel:
        q, k = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (q, k))
    q = q * q.shape[-1] ** -0.5
    output = layer.run("scan", chunked_scan, q, k, value[0], g[0].float(), beta[0].float())
    return output.to(query.dtype)[None], None


def _mamba2_scan(
    layer: _StateLayer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    chunk_size: int,
    D: Tensor | None = None,
    *,
    dt_bias: Tensor | None = None,
    dt_softplus: bool = False,
    dt_limit: tuple[float, float] = (0.0, float("inf")),
    **_: Any,
) -> Tensor:
    if dt_bias is not None:
        dt = dt + dt_bias.to(dt.dtype)
    if dt_softplus:
        dt = F.softplus(dt)
    dt_TH = dt[0].clamp(*dt_limit).float()
    x_THV = hidden_states[0].float()
    k, q = (y[0].float().repeat_interleave(x_THV.shape[1] // y.shape[2], 1) for y in (B, C))
    output = layer.run("scan", chunked_scan, q, k, x_THV * dt_TH[..., None], A.float() * dt_TH, None)
    if D is not None:
        output = output + D[..., None] * x_THV
    return output[None]


def _selective_scan(
    layer: _StateLayer,
    hidden_states: Tensor,
    dt: Tensor,
    A: Tensor,
    B: Tensor,
    C: Tensor,
    D: Tensor | None = None,
    z: Tensor | None = None,
    *,
    delta_bias: Tensor | None = None,
    delta_softplus: bool = False,
    **_: Any,
) -> Tensor:
    if delta_bias is not None:
        dt = dt + delta_bias.to(dt.dtype)[..., None]
    if delta_softplus:
        dt = F.softplus(dt)
    x_TC, dt_TC, A_CV = hidden_states[0].t(), dt[0].t().float(), A.float()

    def step(state: Tensor, dt: Tensor, scaled: Tensor, b: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.addcmul(scaled[..., None] * b[:, None], torch.exp(A_CV * dt[..., None]), state)
        return state, torch.einsum("ncv,nv->nc", state, c)

    inputs = (dt_TC, dt_TC * x_TC.float(), B[0].t().float(), C[0].t().float())
    output_TC = layer.run("scan", stepwise, step, inputs, torch.zeros_like(A_CV)).to(hidden_states.dtype)
    if D is not None:
        output_TC = output_TC + x_TC * D
    if z is not None:
        output_TC = output_TC * F.silu(z[0].t())
    return output_TC.t()[None]


def _rwkv_attention(
    layer: _StateLayer, time_decay: Tensor, time_first: Tensor, key: Tensor, value: Tensor, **_: Any
) -> tuple[Tensor, None]:
    """RWKV 4. The state is numerator and denominator of a weighted mean, and the exponent that both are scaled by."""
    decay = -torch.exp(time_decay.float())

    def step(state: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        numerator, denominator, exponent = state.unbind(-1)
        top = torch.maximum(exponent, k + time_first)
        old, new = torch.exp(exponent - top), torch.exp(k + time_first - top)
        output = (old * numerator + new * v) / (old * denominator + new)
        top = torch.maximum(exponent + decay, k)
        old, new = torch.exp(exponent + decay - top), torch.exp(k - top)
        return torch.stack([old * numerator + new * v, old * denominator + new, top], -1), output

    inputs = (key[0].float(), value[0].float())
    empty = key.new_zeros((key.shape[-1], 3), dtype=torch.float32)
    empty[:, 2] = -1e38
    output_TC = layer.run("scan", stepwise, step, inputs, empty)
    return output_TC.to(key.dtype)[None], None


def _lightning_attention(
    layer: _StateLayer, self: Any, hidden_states: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, Tensor | None]:
    qkv_TH = self.act_fn(self.qkv_proj(hidden_states[0])).unflatten(-1, (self.num_attention_heads, -1))
    q, k, v = (x.float() for x in qkv_TH.split(self.head_dim, -1))
    g_TH = -self.slope_rate.float().flatten().expand(len(q), -1)
    output = layer.run("scan", chunked_scan, q, k, v, g_TH, None).to(hidden_states.dtype).flatten(1)
    output = torch.sigmoid(self.output_gate(hidden_states[0])) * self.norm(output)
    return self.out_proj(output)[None], None


def _rg_lru_scan(
    layer: _StateLayer, self: Any, hidden_states: Tensor, recurrent_gate: Tensor, reset: Tensor, *_: Any, **__: Any
) -> tuple[Tensor, None]:
    gate = (recurrent_gate * ~reset)[0].float()
    return layer.run("scan", stepwise_scan, gate, hidden_states[0].float()).to(hidden_states.dtype)[None], None


class TreeConv1d(nn.Conv1d):
    """A causal convolution with padding on both sides, whose caller cuts the right side off."""

    def forward(self, input: Tensor) -> Tensor:
        layer = _layer.get()
        if layer is None:
            return super().forward(input)
        return layer.run("conv", conv, input[0], self.weight[:, 0], self.bias)[None]


class TreeShift(nn.ZeroPad2d):
    """Each token's predecessor; 0 for the first one."""

    def forward(self, input: Tensor) -> Tensor:
        layer = _layer.get()
        if layer is None:
            return super().forward(input)
        before = F.pad(input.new_ones((input.shape[-1], 1)), (0, 1))
        return layer.run("conv", conv, input[0].t(), before, None).t()[None]


def _no_fused_kernel(layer: _StateLayer, *_: Any, **__: Any) -> None:
    """The module computes the convolution and the scan separately."""


REPLACED: dict[str, Callable[..., Any]] = {
    "causal_conv1d_fn": _conv1d,
    "torch_chunk_gated_delta_rule": _gated_delta_rule,
    "chunk_kimi_delta_attention": _gated_delta_rule,
    "mamba2_chunk_scan": _mamba2_scan,
    "mamba2_split_conv1d_scan_combined": _no_fused_kernel,
    "mamba_selective_scan": _selective_scan,
    "mamba_inner_fn": _no_fused_kernel,
    "rwkv_linear_attention": _rwkv_attention,
    "MiniMaxLightningAttention.forward": _lightning_attention,
    "RecurrentGemmaRglru._rnn_scan": _rg_lru_scan,
}
"""Functions and methods of transformers' modeling modules, and what they are in a packed forward."""

LAYERS = {"MiniMaxLightningAttention", "RecurrentGemmaRecurrentBlock", "RwkvFeedForward"}
"""Classes of layers that hold state without calling one of those functions directly."""

SUBMODULES: dict[str, type[nn.Module]] = {"conv_1d": TreeConv1d, "time_shift": TreeShift}
"""Submodules of such layers that look at earlier tokens."""


def install(model: nn.Module, body: nn.Module) -> None:
    """Make the layers of `model` that hold state compute packed forwards of `body`. Other forwards do not change. May
    be called again, for example after a module was replaced."""
    for name in {type(module).__module__ for module in model.modules()}:
        if name.startswith("transformers."):
            _replace_functions(sys.modules[name])
    found = False
    for name, module in model.named_modules():
        if _holds_state(type(module)):
            found = True
            module.rally_name = name
            for child, ours in SUBMODULES.items():
                if type(getattr(module, child, None)) is ours.__base__:
                    getattr(module, child).__class__ = ours
            if _enter_layer not in module._forward_pre_hooks.values():
                module.register_forward_pre_hook(_enter_layer, with_kwargs=True)
                module.register_forward_hook(_leave_layer, always_call=True)
    if found and _enter_body not in body._forward_pre_hooks.values():
        body.register_forward_pre_hook(_enter_body, with_kwargs=True)
        body.register_forward_hook(_leave_body, always_call=True)


def holds_state(model: nn.Module) -> bool:
    """Whether a layer of `model` carries more than keys and values from token to token."""
    return any(_holds_state(type(module)) for module in model.modules())


def _holds_state(kind: Any) -> bool:
    if not kind.__module__.startswith("transformers."):
        return False
    code = getattr(inspect.unwrap(kind.forward), "__code__", None)
    return kind.__name__ in LAYERS or (code is not None and not REPLACED.keys().isdisjoint(code.co_names))


def _replace_functions(modeling: Any) -> None:
    for path, ours in REPLACED.items():
        *owner, name = path.split(".")
        place = getattr(modeling, owner[0], None) if owner else modeling
        original = getattr(place, name, None)
        if original is not None and not hasattr(original, "rally_original"):
            setattr(place, name, _switched(original, ours))


def _switched(original: Original, ours: Callable[..., Any]) -> Original:
    @functools.wraps(original)
    def switched(*args: Any, **kwargs: Any) -> Any:
        layer = _layer.get()
        return original(*args, **kwargs) if layer is None else ours(layer, *args, **kwargs)

    switched.rally_original = original  # type: ignore[attr-defined]
    return switched


def _enter_body(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    _context.set(kwargs.get("rally"))
    return args, kwargs


def _leave_body(module: nn.Module, args: Any, output: Any) -> None:
    _context.set(None)


def _enter_layer(module: nn.Module, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    context = kwargs.get("rally") or _context.get()
    if context is not None:
        if not hasattr(context, "tree"):
            raise TypeError(f"this forward does not support {type(module).__name__}, which holds state")
        _layer.set(_StateLayer(context, str(module.rally_name), _layer.get(), {}))
        if "attention_mask" in kwargs:  # these layers know masks of padding, and a packed forward has none
            kwargs = {**kwargs, "attention_mask": None}
    return args, kwargs


def _leave_layer(module: nn.Module, args: Any, output: Any) -> None:
    layer = _layer.get()
    if layer is not None and layer.name == module.rally_name:
        _layer.set(layer.outer)
