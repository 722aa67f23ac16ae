"""Paged attention in plain torch: new keys and values go to their pages, then each request attends to its own history.

Two ways, equal in result. `PerSequence` reads a history as a view of the pool (a copy only where its pages are not
consecutive) and is best for long histories; `Gathered` copies the histories of many short requests into one padded
block and is best where a call costs more than the copy. `Gathered` works on any device.

Shapes as in attention.py; n is the number of requests of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from rally.engines.embedded.attention import grouped_sdpa, visible
from rally.engines.embedded.pages import KVStore

SHORT_HISTORY_BYTES = 64 * 1024  # keys of one request and layer; below this a padded copy beats a call per request


class Row(NamedTuple):
    """`tokens` packed tokens from `offset` on belong to one request and sit at positions `start`.. of its history."""

    offset: int
    tokens: int
    start: int
    pages: Sequence[int]

    @property
    def length(self) -> int:
        return self.start + self.tokens


class PagedAttention:
    """The context of one engine step over the KV store."""

    def __init__(self, store: KVStore, rows: Sequence[Row], slots_T: Tensor) -> None:
        self.store = store
        self.slots_T = slots_T
        sample = store.keys[0]
        limit = SHORT_HISTORY_BYTES // (sample.shape[1] * sample.shape[2] * sample.element_size())
        blocks: dict[tuple[int, int], list[Row]] = {}  # of similar width and length, so that little is padded
        for row in rows:
            if row.length <= limit:
                blocks.setdefault((row.tokens.bit_length(), (row.length // 16).bit_length()), []).append(row)
        self.groups: list[_Gathered | _PerSequence] = [_Gathered(store, block) for block in blocks.values()]
        long = [row for row in rows if row.length > limit]
        if long:
            self.groups.append(_PerSequence(store, long))

    def attend(
        self, layer: int, q_THD: Tensor, k_TKD: Tensor, v_TKD: Tensor, scale: float, window: int | None
    ) -> Tensor:
        keys, values = self.store.keys[layer], self.store.values[layer]
        keys.index_copy_(0, self.slots_T, k_TKD.to(keys.dtype))
        values.index_copy_(0, self.slots_T, v_TKD.to(values.dtype))
        out_THD = torch.empty_like(q_THD)
        for group in self.groups:
            group.attend(keys, values, q_THD, out_THD, scale, window)
        return out_THD


class _Gathered:
    """Many short requests: histories gathered page by page into one padded block."""

    def __init__(self, store: KVStore, rows: Sequence[Row]) -> None:
        device = store.keys[0].device
        self.page_size = store.page_size
        self.n, self.width = len(rows), max(row.tokens for row in rows)
        self.num_pages = -(-max(row.length for row in rows) // store.page_size)
        tables = [list(row.pages[: self.num_pages]) for row in rows]
        padded = [table + [table[0]] * (self.num_pages - len(table)) for table in tables]
        self.table = torch.tensor(padded, device=device).view(-1)
        self.starts = torch.tensor([row.start for row in rows], device=device)
        tokens = [row.offset + min(i, row.tokens - 1) for row in rows for i in range(self.width)]
        self.tokens = torch.tensor(tokens, device=device)  # a short row repeats its last token; the repeats are dropped
        real = [row.offset + i for row in rows for i in range(row.tokens)]
        self.targets = torch.tensor(real, device=device)
        kept = [b * self.width + i for b, row in enumerate(rows) for i in range(row.tokens)]
        self.kept = torch.tensor(kept, device=device)
        self._masks: dict[int | None, Tensor] = {}

    def attend(
        self, keys: Tensor, values: Tensor, q_THD: Tensor, out_THD: Tensor, scale: float, window: int | None
    ) -> None:
        k, v = self._history(keys), self._history(values)
        q = q_THD[self.tokens].view(self.n, self.width, *q_THD.shape[1:])
        out = grouped_sdpa(q, k, v, scale, self._mask(window, q.dtype), causal=False)
        out_THD.index_copy_(0, self.targets, out.reshape(-1, *q_THD.shape[1:])[self.kept])

    def _history(self, tensor: Tensor) -> Tensor:
        """[n, length, K, D] of the padded histories."""
        paged = tensor.view(-1, self.page_size * tensor.shape[1] * tensor.shape[2])
        return paged.index_select(0, self.table).view(self.n, -1, tensor.shape[1], tensor.shape[2])

    def _mask(self, window: int | None, dtype: torch.dtype) -> Tensor:
        if window not in self._masks:
            seen = visible(self.starts, self.width, self.num_pages * self.page_size, window)
            self._masks[window] = torch.zeros(seen.shape, dtype=dtype, device=seen.device).masked_fill(
                ~seen, -torch.inf
            )
        return self._masks[window]


class _PerSequence:
    """One call per request, over a view of its pages."""

    def __init__(self, store: KVStore, rows: Sequence[Row]) -> None:
        self.rows = rows
        self.histories = [self._where(store, row) for row in rows]

    @staticmethod
    def _where(store: KVStore, row: Row) -> slice | Tensor:
        """The slots of a history: a slice of the pool if its pages are consecutive, else an index."""
        size = store.page_size
        pages = row.pages[: -(-row.length // size)]
        if pages[-1] - pages[0] == len(pages) - 1 and all(b - a == 1 for a, b in pairwise(pages)):
            return slice(pages[0] * size, pages[0] * size + row.length)
        slots = torch.tensor(pages)[:, None] * size + torch.arange(size)[None, :]
        return slots.view(-1)[: row.length].to(store.keys[0].device)

    def attend(
        self, keys: Tensor, values: Tensor, q_THD: Tensor, out_THD: Tensor, scale: float, window: int | None
    ) -> None:
        for row, where in zip(self.rows, self.histories, strict=True):
            span = slice(row.offset, row.offset + row.tokens)
            q = q_THD[span].unsqueeze(0)
            mask, causal = self._mask(row, window, q.device)
            out_THD[span] = grouped_sdpa(q, keys[where].unsqueeze(0), values[where].unsqueeze(0), scale, mask, causal)[
                0
            ]

    @staticmethod
    def _mask(row: Row, window: int | None, device: torch.device) -> tuple[Tensor | None, bool]:
        sliding = window is not None and window < row.length
        if row.tokens == 1 and not sliding:
            return None, False
        if row.start == 0 and not sliding:
            return None, True
        return visible(torch.tensor([row.start], device=device), row.tokens, row.length, window), False
