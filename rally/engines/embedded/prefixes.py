"""The prefix index: cached KV pages, found by (weight version, tokens) and by nothing less.

A tree whose edges are pages of tokens, one root per weight version, so KV computed under old weights cannot be reached
under new ones. A leaf may be a page that is not full, and a match may end within a page, because whoever takes it
copies the page. Least recently used leaves go first when pages run out.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from rally.engines.embedded.pages import PagePool

MOST_BRANCHES = 64


class _Node:
    __slots__ = ("children", "page", "parent", "stamp", "tokens")

    def __init__(self, tokens: tuple[int, ...], page: int, parent: _Node | None) -> None:
        self.tokens = tokens
        self.page = page
        self.parent = parent
        self.children: dict[tuple[int, ...], _Node] = {}
        self.stamp = 0


class Match(NamedTuple):
    """The pages that hold the longest known prefix, the last maybe in part, and its length in tokens."""

    pages: list[int]
    tokens: int


class PrefixIndex:
    """Holds one reference on every page it knows; whoever matches pages must `share` them before the next eviction."""

    def __init__(self, pool: PagePool, page_size: int) -> None:
        self.pool = pool
        self.page_size = page_size
        self._roots: dict[int, _Node] = {}
        self._clock = itertools.count(1)

    def match(self, version: int, ids: Sequence[int]) -> Match:
        """The longest known prefix of `ids`."""
        node, pages, stamp = self._roots.get(version), [], next(self._clock)
        if node is None:
            return Match([], 0)
        for key in self._keys(ids):
            child = node.children.get(key)
            if child is None or len(key) < self.page_size:
                break
            child.stamp = stamp
            pages.append(child.page)
            node = child
        tokens = len(pages) * self.page_size
        shared, nearest = self._within_page(node, tuple(ids[tokens : tokens + self.page_size]))
        if nearest is None:
            return Match(pages, tokens)
        nearest.stamp = stamp
        return Match([*pages, nearest.page], tokens + shared)

    def _within_page(self, node: _Node, rest: tuple[int, ...]) -> tuple[int, _Node | None]:
        """The child that begins most like `rest`; where very many branch off, looking costs more than it saves."""
        best: tuple[int, _Node | None] = (0, None)
        if len(node.children) <= MOST_BRANCHES:
            for child in node.children.values():
                shared = _common(rest, child.tokens)
                if shared > best[0]:
                    best = shared, child
        return best

    def insert(self, version: int, ids: Sequence[int], pages: Sequence[int]) -> None:
        """Remember that `pages` hold the KV of `ids`, the last page maybe in part. Known prefixes keep their page."""
        node = self._roots.setdefault(version, _Node((), -1, None))
        stamp = next(self._clock)
        for key, page in zip(self._keys(ids), pages, strict=False):
            child = node.children.get(key)
            if child is None:
                child = node.children[key] = _Node(key, page, node)
                self.pool.share((page,))
            child.stamp = stamp
            node = child

    def evict(self, count: int) -> int:
        """Free pages that nobody but the index holds, least recently used leaves first: `count` of them if there are so
        many, and at least a small share of the pool, because looking for them costs more than freeing them."""
        count = max(count, self.pool.num_pages // 64)
        leaves = [(n.stamp, id(n), n) for n in self._nodes() if not n.children and self.pool.references(n.page) == 1]
        heapq.heapify(leaves)
        freed = 0
        while leaves and freed < count:
            _, _, node = heapq.heappop(leaves)
            parent = node.parent
            assert parent is not None
            del parent.children[node.tokens]
            self.pool.release((node.page,))
            freed += 1
            if parent.parent is not None and not parent.children and self.pool.references(parent.page) == 1:
                heapq.heappush(leaves, (parent.stamp, id(parent), parent))
        return freed

    def forget(self, keep_version: int | None = None) -> None:
        """Drop what was computed under any version but `keep_version`; pages still held by requests live on there."""
        for version in [v for v in self._roots if v != keep_version]:
            self.pool.release(node.page for node in self._below(self._roots.pop(version)))

    def __len__(self) -> int:
        return sum(1 for _ in self._nodes())

    def _keys(self, ids: Sequence[int]) -> Iterator[tuple[int, ...]]:
        return (tuple(ids[i : i + self.page_size]) for i in range(0, len(ids), self.page_size))

    def _nodes(self) -> Iterator[_Node]:
        for root in self._roots.values():
            yield from self._below(root)

    def _below(self, root: _Node) -> Iterator[_Node]:
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many tokens two pages have in common from their beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
