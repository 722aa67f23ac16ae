"""The radix cache: KV pages by (weight version, token prefix).

A tree whose edges are pages of tokens, with one root per weight version, so that KV of old weights is never matched
under new ones. A leaf may be a partly filled page, and a match may end within a page, because the scheduler copies that
page. Least recently used leaves are evicted first.

Tokens are bytes, four each (`token_bytes`): slicing and hashing them costs a tenth of what tuples cost.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from rally.engines.embedded.kv_cache import PagePool
from rally.engines.embedded.state_cache import StateStore

MAX_BRANCHES = 64
WIDTH = 4  # bytes of a token
DROPPED = -2  # the page of a node that is no longer in the tree


def token_bytes(ids: Sequence[int] | npt.NDArray[np.int32]) -> bytes:
    return np.asarray(ids, np.int32).tobytes()


_NO_CHILDREN: dict[bytes, _Node] = {}
_NO_STATES: dict[int, int] = {}
"""The snapshots of a node: after how many tokens of its page, and the row that holds it."""


class _Node:
    __slots__ = ("children", "page", "parent", "stamp", "states", "tokens")

    def __init__(self, tokens: bytes, page: int, parent: _Node | None) -> None:
        self.tokens = tokens
        self.page = page
        self.parent = parent
        self.children = _NO_CHILDREN  # shared, to relieve the garbage collector: most nodes have none
        self.stamp = 0
        self.states = _NO_STATES


class TreePosition(NamedTuple):
    """A node, and the number of whole pages up to it; stale once the node has been dropped."""

    node: _Node
    pages: int

    @property
    def stale(self) -> bool:
        return self.node.page == DROPPED


class Match(NamedTuple):
    """The longest cached prefix: its pages (the last may be partly used), its length in tokens, and its tree
    position. If the model has states, the prefix ends at a snapshot, `state`, and `kv_tokens` is the length of the
    longest prefix whose keys and values alone are cached."""

    pages: list[int]
    tokens: int
    position: TreePosition | None = None
    state: int | None = None
    kv_tokens: int = 0


_Leaf = tuple[int, int, _Node]  # time of last use, serial number, leaf


class RadixCache:
    """Holds one reference on each of its pages. The caller of `match` must `share` the pages before the next
    eviction. `states` are the snapshots of a model that has states."""

    def __init__(self, pool: PagePool, page_size: int, states: StateStore | None = None) -> None:
        self.pool = pool
        self.page_size = page_size
        self.states = states
        self._step = page_size * WIDTH
        self._clock = itertools.count(1)
        self.clear()

    def clear(self) -> None:
        """Forget everything without releasing pages; the pool is cleared too."""
        self._roots: dict[int, _Node] = {}
        self._nodes = 0
        self._leaves: list[_Leaf] = []  # a heap; outdated entries are skipped
        self._snapshots: dict[int, tuple[_Node, int]] = {}  # by row: node and offset; least recently used first

    def match(self, version: int, tokens: bytes) -> Match:
        """The longest cached prefix of `tokens`."""
        node, pages, stamp, step = self._roots.get(version), [], next(self._clock), self._step
        if node is None:
            return Match([], 0)
        at = 0
        while at + step <= len(tokens):
            child = node.children.get(tokens[at : at + step])
            if child is None:
                break
            child.stamp = stamp
            pages.append(child.page)
            node, at = child, at + step
        shared, nearest = self._within_page(node, tokens[at : at + step])
        position = TreePosition(node, at // step)
        self._used(node if nearest is None else nearest, stamp)
        if nearest is None:
            return Match(pages, at // WIDTH, position)
        return Match([*pages, nearest.page], at // WIDTH + shared, position)

    def match_state(self, version: int, tokens: bytes) -> Match:
        """The longest cached prefix of `tokens` that ends at a snapshot."""
        whole = self.match(version, tokens)
        if whole.position is None:
            return whole
        node, depth = whole.position
        rest = tokens[depth * self._step : (depth + 1) * self._step]
        inside = [
            (offset, child)
            for child in (node.children.values() if len(node.children) <= MAX_BRANCHES else ())
            if child.states
            for offset in child.states
            if offset <= _common(rest, child.tokens)
        ]
        if inside:
            offset, child = max(inside, key=lambda found: found[0])
            return self._at_snapshot(whole, child, depth + 1, offset)
        while depth and not node.states:
            assert node.parent is not None
            node, depth = node.parent, depth - 1
        if depth:
            return self._at_snapshot(whole, node, depth, max(node.states))
        return Match([], 0, TreePosition(node, 0), None, whole.tokens)

    def _at_snapshot(self, whole: Match, node: _Node, depth: int, offset: int) -> Match:
        """`whole` cut back to the snapshot after `offset` tokens of page `depth`."""
        row = node.states[offset]
        self._snapshots[row] = self._snapshots.pop(row)  # now the most recently used
        position = TreePosition(node, depth)
        if offset < self.page_size:
            assert node.parent is not None
            position = TreePosition(node.parent, depth - 1)
        tokens = (depth - 1) * self.page_size + offset
        return Match([*whole.pages[: depth - 1], node.page], tokens, position, row, whole.tokens)

    def take_state(self) -> int | None:
        """A free row for a snapshot; the least recently used snapshot is dropped for it if necessary."""
        assert self.states is not None
        row = self.states.take()
        if row is None and self._snapshots:
            self._drop_state(next(iter(self._snapshots)))
            row = self.states.take()
        return row

    def hold_state(self, version: int, tokens: bytes, row: int) -> bool:
        """Keep the snapshot in `row` after `tokens`, whose pages were inserted. Released if there is one already; then
        the result is False."""
        assert self.states is not None
        node, depth = self._roots.get(version), -(-len(tokens) // self._step)
        for number in range(depth):
            node = node.children.get(tokens[number * self._step : (number + 1) * self._step]) if node else None
        offset = len(tokens) // WIDTH - (depth - 1) * self.page_size
        if node is None or node.parent is None or offset in node.states:
            self.states.release(row)
            return False
        node.states = {**node.states, offset: row}
        self._snapshots[row] = (node, offset)
        return True

    def _drop_state(self, row: int) -> None:
        assert self.states is not None
        node, offset = self._snapshots.pop(row)
        node.states = {at: other for at, other in node.states.items() if at != offset}
        self.states.release(row)

    def _drop_states(self, node: _Node) -> None:
        for row in list(node.states.values()):
            self._drop_state(row)

    def _used(self, node: _Node, stamp: int) -> None:
        """Mark a node as used. Only leaves are queued for eviction."""
        node.stamp = stamp
        if node.parent is not None and not node.children:
            heapq.heappush(self._leaves, (stamp, next(self._clock), node))
            if len(self._leaves) > 64 + 2 * self._nodes:  # mostly outdated entries
                self._queue_leaves()

    def _queue_leaves(self) -> None:
        nodes = itertools.chain.from_iterable(map(self._below, self._roots.values()))
        self._leaves = [(node.stamp, next(self._clock), node) for node in nodes if not node.children]
        heapq.heapify(self._leaves)

    def _within_page(self, node: _Node, rest: bytes) -> tuple[int, _Node | None]:
        """The child with the longest common beginning with `rest`. Not searched if there are very many children."""
        best: tuple[int, _Node | None] = (0, None)
        if len(node.children) <= MAX_BRANCHES:
            for child in node.children.values():
                shared = _common(rest, child.tokens)
                if shared > best[0]:
                    best = shared, child
        return best

    def insert(
        self, version: int, tokens: bytes, pages: Sequence[int], after: TreePosition | None = None
    ) -> TreePosition:
        """Insert `pages`, which hold the KV of `tokens`; the last may be partly filled. Cached prefixes keep their
        pages.

        Returns the position after the last whole page; pass it as `after` when inserting more of the same history.
        """
        if after is None or after.stale:
            after = TreePosition(self._roots.setdefault(version, _Node(b"", -1, None)), 0)
        node, stamp, step = after.node, next(self._clock), self._step
        position = after
        for number in range(after.pages, -(-len(tokens) // step)):
            key = tokens[number * step : (number + 1) * step]
            child = node.children.get(key)
            if child is None:
                if node.children is _NO_CHILDREN:
                    node.children = {}
                child = node.children[key] = _Node(key, pages[number], node)
                self._nodes += 1
                self.pool.share((pages[number],))
            child.stamp = stamp
            node = child
            if len(key) == step:
                position = TreePosition(node, number + 1)
        self._used(node, stamp)
        return position

    def evict(self, count: int) -> int:
        """Free up to `count` pages that only this cache holds, least recently used leaves first; returns how many."""
        held: list[_Leaf] = []
        freed = 0
        while self._leaves and freed < count:
            entry = heapq.heappop(self._leaves)
            stamp, _, node = entry
            if node.page == DROPPED or node.children or node.stamp != stamp:
                continue
            if self.pool.references(node.page) > 1:
                held.append(entry)
            else:
                self._drop(node)
                freed += 1
        for entry in held:
            heapq.heappush(self._leaves, entry)
        return freed

    def _drop(self, leaf: _Node) -> None:
        parent = leaf.parent
        assert parent is not None
        del parent.children[leaf.tokens]
        self._nodes -= 1
        self._drop_states(leaf)
        self.pool.release((leaf.page,))
        leaf.page = DROPPED
        self._used(parent, parent.stamp)

    def forget(self, keep_version: int | None = None) -> None:
        """Drop the KV of all versions except `keep_version`. Pages that requests hold stay allocated."""
        for version in [v for v in self._roots if v != keep_version]:
            root = self._roots.pop(version)
            dropped = list(self._below(root))
            self.pool.release(node.page for node in dropped)
            for node in (root, *dropped):
                self._drop_states(node)
                node.page = DROPPED
            self._nodes -= len(dropped)
        self._queue_leaves()

    def __len__(self) -> int:
        return self._nodes

    def _below(self, root: _Node) -> Iterator[_Node]:
        stack = list(root.children.values())
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            yield node


def _common(a: bytes, b: bytes) -> int:
    """How many tokens two pages have in common from their beginning."""
    count = min(len(a), len(b)) // WIDTH
    while count and a[: count * WIDTH] != b[: count * WIDTH]:
        count -= 1
    return count
