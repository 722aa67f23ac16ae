"""States of layers such as convolutions and linear attention: one row per slot, and snapshots for later requests.

A state cannot be cut back to an earlier token as keys and values can, so prefixes are reused only from snapshots. They
are taken at the end of a prompt, at the end of a turn and where histories branch, and are held by nodes of the radix
cache. The least recently used one makes room for the next.

Shapes: T packed tokens, N segments of a step.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import prod

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rally.engines.embedded.kv_cache import ALIGNMENT, LentMemory
from rally.models.segment_tree import DecodeTree, SegmentTree, StateSegment

Ints = npt.NDArray[np.int64]
StateShapes = Mapping[str, tuple[torch.Size, torch.dtype]]


def state_bytes(shapes: StateShapes) -> int:
    """The bytes of one row of all states."""
    return sum(prod(shape) * torch.empty((), dtype=dtype).element_size() for shape, dtype in shapes.values())


class StateStore:
    """Rows of all states: `slots` rows, one for padding (`trash`), then `snapshots` rows."""

    def __init__(
        self, shapes: StateShapes, *, slots: int, snapshots: int, device: torch.device, lend: bool = False
    ) -> None:
        self.trash, self.device = slots, device
        self.first, self.snapshots = slots + 1, snapshots
        rows = self.first + snapshots
        sizes = [
            -(-rows * prod(shape) * torch.empty((), dtype=dtype).element_size() // ALIGNMENT) * ALIGNMENT
            for shape, dtype in shapes.values()
        ]
        self.memory = LentMemory(sum(sizes), device, lend)
        self.tensors: dict[str, Tensor] = {}
        at = 0
        for (name, (shape, dtype)), size in zip(shapes.items(), sizes, strict=True):
            whole = self.memory.flat[at : at + size].view(dtype)
            self.tensors[name] = whole[: rows * prod(shape)].view(rows, *shape)
            at += size
        self.clear()

    def clear(self) -> None:
        """Free every snapshot, whoever holds it."""
        self._free = list(range(self.first + self.snapshots - 1, self.first - 1, -1))

    def take(self) -> int | None:
        """A row for a snapshot; None if all are in use."""
        return self._free.pop() if self._free else None

    def release(self, row: int) -> None:
        assert row >= self.first and row not in self._free, "released twice"
        self._free.append(row)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def copy(self, copies: Iterable[tuple[int, int]]) -> None:
        """Copy rows (from, to) of all states. No row is both read and written."""
        pairs = np.array(list(copies), np.int64).reshape(-1, 2)
        if len(pairs):
            source, target = torch.from_numpy(pairs.T.copy()).to(self.device)
            for tensor in self.tensors.values():
                tensor.index_copy_(0, target, tensor.index_select(0, source))


class StepStates:
    """The states that one step reads and writes; a `StateContext`, together with the step's attention."""

    keeps_states = True

    def __init__(self, store: StateStore, owners: Ints, starts: Ints, tokens: Ints) -> None:
        """Of the request in slot `owners`, `tokens` tokens from position `starts` on."""
        self.store = store
        rows = iter(range(len(owners)))
        segments = [
            StateSegment(length, initial=next(rows) if start else -1)
            for length, start in zip(tokens.tolist(), starts.tolist(), strict=True)
        ]
        self.tree: SegmentTree | DecodeTree = SegmentTree(segments, store.device)
        self.initial = torch.from_numpy(owners[starts > 0]).to(store.device)
        self.final = torch.from_numpy(owners).to(store.device)

    def initial_states(self, name: str) -> Tensor | None:
        return self.store.tensors[name].index_select(0, self.initial) if len(self.initial) else None

    def store_final_states(self, name: str, states: Tensor) -> None:
        tensor = self.store.tensors[name]
        tensor.index_copy_(0, self.final, states.to(tensor.dtype))


class DecodeStates(StepStates):
    """The same for a step of one token per request, each with a state. Nothing depends on the requests but the values
    of `rows_T`, so a CUDA graph can capture it."""

    def __init__(self, store: StateStore, rows_T: Tensor) -> None:
        self.store, self.final = store, rows_T
        self.tree = DecodeTree(rows_T)

    def initial_states(self, name: str) -> Tensor:
        return self.store.tensors[name]
