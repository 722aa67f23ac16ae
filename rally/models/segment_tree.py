"""The segments of a packed batch as a tree, and the plans by which convolutions and scans follow it.

A segment begins where another one ended, with the state of an earlier forward, or with an empty state. Plans are index
tensors. They are made once per batch, for all layers.

Shapes: T packed tokens, N segments, R rows of initial states, W kernel width.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rally.platforms import from_host

Ints = np.ndarray[Any, np.dtype[np.int64]]
Plan = TypeVar("Plan")


class StateSegment(NamedTuple):
    """Consecutive packed tokens of one history. It continues segment `parent`, or row `initial` of the initial states;
    with neither, its state is empty at first. Segments may stand before their parents."""

    length: int
    parent: int = -1
    initial: int = -1


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
