"""Paged attention in plain torch: writes new keys and values to their pages, then each request attends to its history.

Three ways with equal results, on any device. `_Strided` reads the histories of many decoding requests as one regular
view of the pool, without copying, if their pages allow it. `_Gathered` copies short histories into one padded block.
`_PerSequence` makes one call per request over a view of its pages, which is best for long histories.

Shapes as in attention.py; n is the number of requests of a group, P the width of their page tables.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from rally.engines.embedded.kv_cache import KVStore
from rally.engines.embedded.request_slots import Ints
from rally.engines.embedded.state_cache import StepStates
from rally.models.attention import Scores, grouped_attention, visible

SHORT_HISTORY_BYTES = 64 * 1024  # keys of one request and layer; above this a call per request costs less than padding


@dataclass(frozen=True)
class BatchRows:
    """For each request: its packed tokens [offset, offset + tokens) have positions `start`.. in its history, whose
    pages are table_nP."""

    offset: Ints
    tokens: Ints
    start: Ints
    table_nP: npt.NDArray[np.int32]

    @property
    def length(self) -> Ints:
        return self.start + self.tokens

    def take(self, chosen: Any) -> BatchRows:
        return BatchRows(self.offset[chosen], self.tokens[chosen], self.start[chosen], self.table_nP[chosen])

    def __len__(self) -> int:
        return len(self.offset)


class PagedContext:
    """What attention contexts of the engine have in common. Calls are numbered in the order of the forward."""

    compressed = True

    def __init__(self, store: KVStore) -> None:
        self.store = store
        self.calls = 0

    def use_states(self, states: StepStates) -> None:
        """Serve the layers that hold state, too."""
        self.tree, self.keeps_states = states.tree, states.keeps_states
        self.initial_states, self.store_final_states = states.initial_states, states.store_final_states

    def next_call(self) -> int:
        self.calls += 1
        return self.calls - 1


class PagedAttention(PagedContext):
    """The attention context of one step over the KV store; `stride` is that of the page pool."""

    def __init__(self, store: KVStore, rows: BatchRows, places_T: Tensor, stride: int) -> None:
        super().__init__(store)
        self.places_T = places_T
        widest = max((keys.shape[1] * keys.shape[2] * keys.element_size() for keys in store.keys), default=1)
        limit = SHORT_HISTORY_BYTES // widest
        short = rows.length <= limit
        strided = short & (rows.tokens == 1) & _aligned(rows, store.page_size, stride)
        self.groups: list[_Strided | _Gathered | _PerSequence] = [
            *(_Strided(store, rows.take(part), stride) for part in _neighbours(rows, strided, stride)),
            *(_Gathered(store, rows.take(part)) for part in _similar(rows, short & ~strided)),
        ]
        if not short.all():
            self.groups.append(_PerSequence(store, rows.take(~short)))

    def attend(self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scores: Scores) -> Tensor:
        number = self.next_call()
        self.store.write(number, self.places_T, k_TKD, v_TKD)
        keys, values = self.store.keys[number], self.store.values[number]
        out_THD = q_THD.new_empty((*q_THD.shape[:2], values.shape[2]))
        for group in self.groups:
            group.attend(keys, values, q_THD, out_THD, scores)
        return out_THD


def _aligned(rows: BatchRows, page_size: int, stride: int) -> npt.NDArray[np.bool_]:
    """Which histories are in consecutive pages that begin at a multiple of the stride."""
    used = -(-rows.length // page_size)
    width = int(used.max())
    expected = rows.table_nP[:, :1] + np.arange(width)
    beyond = np.arange(width) >= used[:, None]
    in_line = ((rows.table_nP[:, :width] == expected) | beyond).all(axis=1)
    result: npt.NDArray[np.bool_] = in_line & (rows.table_nP[:, 0] % stride == 0) & (used <= stride)
    return result


def _neighbours(rows: BatchRows, chosen: npt.NDArray[np.bool_], stride: int) -> Iterator[Ints]:
    """Split the chosen rows into groups whose stretches of the pool are so close that at most half of them are idle."""
    numbers = np.flatnonzero(chosen)
    order = numbers[np.argsort(rows.table_nP[numbers, 0])]
    stretch = (rows.table_nP[order, 0] // stride).tolist()
    first = 0
    for i in range(1, len(order) + 1):
        if i == len(order) or stretch[i] - stretch[first] + 1 > 2 * (i - first + 1):
            yield order[first:i]
            first = i


def _similar(rows: BatchRows, chosen: npt.NDArray[np.bool_]) -> Iterator[Ints]:
    """Split the chosen rows into groups of similar width and length, to limit padding."""
    numbers = np.flatnonzero(chosen)
    blocks: dict[tuple[int, int], list[int]] = {}
    for i, tokens, length in zip(numbers.tolist(), rows.tokens[numbers], rows.length[numbers], strict=True):
        blocks.setdefault((int(tokens).bit_length(), int(length // 16).bit_length()), []).append(i)
    yield from (np.array(block) for block in blocks.values())


class _Masks:
    """Additive masks of a group of rows that begin at `starts`, `width` queries against `length` keys, by window."""

    def __init__(self, starts: Tensor, width: int, length: int) -> None:
        self._sizes = (starts, width, length)
        self._made: dict[tuple[int | None, int | None], Tensor] = {}

    def get(self, scores: Scores, dtype: torch.dtype) -> Tensor:
        kind = (scores.window, scores.chunk)
        if kind not in self._made:
            seen = visible(*self._sizes, *kind)
            empty = torch.zeros(seen.shape, dtype=dtype, device=seen.device)
            self._made[kind] = empty.masked_fill(~seen, -torch.inf)
        return self._made[kind]


class _Strided:
    """Decoding requests whose histories begin at regular intervals: one view, in which some rows may be idle."""

    def __init__(self, store: KVStore, rows: BatchRows, stride: int) -> None:
        device = store.device
        stretch = rows.table_nP[:, 0] // stride
        self.n = int(stretch[-1] - stretch[0]) + 1
        self.first = int(stretch[0]) * stride * store.page_size
        self.apart = stride * store.page_size
        self.length = int(rows.length.max())
        self.rows = torch.from_numpy(stretch - stretch[0]).to(device)
        self.tokens = torch.from_numpy(rows.offset).to(device)
        starts = np.zeros(self.n, np.int64)  # an idle row attends to its first key, and its result is dropped
        starts[stretch - stretch[0]] = rows.start
        self.masks = _Masks(torch.from_numpy(starts).to(device), 1, self.length)

    def attend(self, keys: Tensor, values: Tensor, q_THD: Tensor, out_THD: Tensor, scores: Scores) -> None:
        _, h, d = q_THD.shape
        q = q_THD.new_zeros((self.n, 1, h, d))
        q[self.rows, 0] = q_THD[self.tokens]
        mask = self.masks.get(scores, q.dtype)
        out = grouped_attention(q, self._view(keys), self._view(values), scores, mask, causal=False)
        out_THD[self.tokens] = out[self.rows, 0]

    def _view(self, tensor: Tensor) -> Tensor:
        """[n, length, K, D] of the pool."""
        _, k, d = tensor.shape
        step, head = tensor.stride()[:2]
        return tensor.as_strided(
            (self.n, self.length, k, d), (self.apart * step, step, head, 1), tensor.storage_offset() + self.first * step
        )


class _Gathered:
    """Short requests: histories gathered page by page into one padded block."""

    def __init__(self, store: KVStore, rows: BatchRows) -> None:
        device = store.device
        self.page_size = store.page_size
        self.n, self.width = len(rows), int(rows.tokens.max())
        num_pages = -(-int(rows.length.max()) // store.page_size)
        used = -(-rows.length // store.page_size)
        unused = np.arange(num_pages) >= used[:, None]
        table = np.where(unused, rows.table_nP[:, :1], rows.table_nP[:, :num_pages])
        self.table = torch.from_numpy(table.reshape(-1)).to(device)
        step = np.arange(self.width)
        tokens = rows.offset[:, None] + np.minimum(step, rows.tokens[:, None] - 1)
        self.tokens = torch.from_numpy(tokens.reshape(-1)).to(device)  # a short row repeats its last token
        real = (step < rows.tokens[:, None]).reshape(-1)
        self.kept = torch.from_numpy(np.flatnonzero(real)).to(device)
        self.targets = torch.from_numpy(tokens.reshape(-1)[real]).to(device)
        starts = torch.from_numpy(rows.start).to(device)
        self.masks = _Masks(starts, self.width, num_pages * store.page_size)

    def attend(self, keys: Tensor, values: Tensor, q_THD: Tensor, out_THD: Tensor, scores: Scores) -> None:
        k = self._history(keys)
        v = self._history(values) if values.is_contiguous() else k[..., : values.shape[2]]  # a part of the keys
        q = q_THD[self.tokens].view(self.n, self.width, *q_THD.shape[1:])
        out = grouped_attention(q, k, v, scores, self.masks.get(scores, q.dtype), causal=False)
        out_THD.index_copy_(0, self.targets, out.reshape(-1, *out_THD.shape[1:])[self.kept])

    def _history(self, tensor: Tensor) -> Tensor:
        """[n, length, K, D] of the padded histories."""
        paged = tensor.view(-1, self.page_size * tensor.shape[1] * tensor.shape[2])
        return paged.index_select(0, self.table).view(self.n, -1, tensor.shape[1], tensor.shape[2])


class _PerSequence:
    """One call per request, over a view of its pages."""

    def __init__(self, store: KVStore, rows: BatchRows) -> None:
        spans = zip(rows.offset.tolist(), rows.tokens.tolist(), rows.start.tolist(), strict=True)
        self.rows = [(*span, self._where(store, rows.table_nP[i], sum(span[1:]))) for i, span in enumerate(spans)]

    @staticmethod
    def _where(store: KVStore, table: npt.NDArray[np.int32], length: int) -> slice | Tensor:
        """The places of a history: a slice of the pool if its pages are consecutive, else an index."""
        size = store.page_size
        pages = table[: -(-length // size)].astype(np.int64)
        if (np.diff(pages) == 1).all():
            first = int(pages[0]) * size
            return slice(first, first + length)
        places = (pages[:, None] * size + np.arange(size)).reshape(-1)[:length]
        return torch.from_numpy(places).to(store.device)

    def attend(self, keys: Tensor, values: Tensor, q_THD: Tensor, out_THD: Tensor, scores: Scores) -> None:
        for offset, tokens, start, where in self.rows:
            span = slice(offset, offset + tokens)
            q = q_THD[span].unsqueeze(0)
            mask, causal = self._mask(tokens, start, scores, q.device)
            k, v = keys[where].unsqueeze(0), values[where].unsqueeze(0)
            out_THD[span] = grouped_attention(q, k, v, scores, mask, causal)[0]

    @staticmethod
    def _mask(tokens: int, start: int, scores: Scores, device: torch.device) -> tuple[Tensor | None, bool]:
        length = start + tokens
        sliding = any(size is not None and size < length for size in (scores.window, scores.chunk))
        if tokens == 1 and not sliding:
            return None, False
        if start == 0 and not sliding:
            return None, True
        return visible(torch.tensor([start], device=device), tokens, length, scores.window, scores.chunk), False
