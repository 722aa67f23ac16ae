"""KV pages: every page is free, or owned by as many holders as its reference count says.

Pages are handed out as one consecutive run where possible, because a backend without a paged kernel can then read a
history as a plain view of the pool instead of copying it together at every step.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import torch

FREE = b"\x01"


class PagePool:
    """Page numbers and their reference counts; knows nothing of tensors."""

    def __init__(self, num_pages: int) -> None:
        assert num_pages > 0
        self.num_pages = num_pages
        self.num_free = num_pages
        self._free = bytearray(FREE * num_pages)
        self._references = [0] * num_pages
        self._cursor = 0

    def allocate(self, count: int) -> list[int] | None:
        """`count` pages, consecutive if such a run is free; None if there are not that many."""
        if count > self.num_free:
            return None
        pages = self._run(count) or self._scattered(count)
        for page in pages:
            self._free[page] = 0
            self._references[page] = 1
        self.num_free -= count
        return pages

    def _run(self, count: int) -> list[int] | None:
        pattern = FREE * count
        start = self._free.find(pattern, self._cursor)
        if start < 0:
            start = self._free.find(pattern)
        if start < 0:
            return None
        self._cursor = start + count
        return list(range(start, start + count))

    def _scattered(self, count: int) -> list[int]:
        pages, at = [], -1
        for _ in range(count):
            at = self._free.find(FREE, at + 1)
            pages.append(at)
        return pages

    def share(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, "a free page cannot be shared"
            self._references[page] += 1

    def release(self, pages: Iterable[int]) -> None:
        for page in pages:
            assert self._references[page] > 0, "released twice"
            self._references[page] -= 1
            if self._references[page] == 0:
                self._free[page] = 1
                self.num_free += 1

    def references(self, page: int) -> int:
        return self._references[page]


class KVStore:
    """The tensors behind the pages: keys and values of each layer as [slot, kv head, head size]."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        page_size: int,
        kv_heads: int,
        head_dim: int,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        self.page_size = page_size
        shape = (num_pages * page_size, kv_heads, head_dim)
        # zeros, not empty: a masked slot is multiplied by 0, and 0 * NaN from stale memory would be NaN
        self.keys = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]
        self.values = [torch.zeros(shape, dtype=dtype, device=device) for _ in range(num_layers)]

    def copy_pages(self, source: Sequence[int], target: Sequence[int]) -> None:
        """Copy whole pages, layer by layer; a stretch that is consecutive on both sides is one copy."""
        assert len(source) == len(target)
        for a, b, pages in _stretches(source, target):
            for tensor in (*self.keys, *self.values):
                paged = tensor.view(-1, self.page_size * tensor.shape[1] * tensor.shape[2])
                paged[b : b + pages] = paged[a : a + pages]


def _stretches(source: Sequence[int], target: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """(first source page, first target page, pages) of each stretch that goes up by one on both sides."""
    start = 0
    for i in range(1, len(source) + 1):
        goes_on = i < len(source) and source[i] == source[i - 1] + 1 and target[i] == target[i - 1] + 1
        if not goes_on:
            yield source[start], target[start], i - start
            start = i
