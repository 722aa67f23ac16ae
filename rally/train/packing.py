"""Packs rows into micro-batches without padding, computes shared prefixes once, and selects the sampled tokens.

The rows of a micro-batch form a prefix tree. The branch of a row holds the tokens that it does not share with the row
before it; its keys are its whole history, parts of which lie on the branches of other rows. So the prompt of a group is
computed once, as is any prefix that several responses share. Prefixes are found by comparing ids; the id of an image is
a hash of its content, and an image in several rows is encoded once.

Shapes: T packed tokens, S keys of all branches, M sampled tokens, U different (position, sampled token) pairs, V tokens
of images.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rally.models.vision import rope_of
from rally.types import Image, ImageSpan, Routes, Segment

KEYS_PER_TOKEN = 8  # bounds the copied keys too: many short responses to one long prompt have many keys

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]


@dataclass(frozen=True, kw_only=True)
class Row:
    """One segment as the trainer sees it. `episode` numbers the episode it belongs to within the batch."""

    ids: tuple[int, ...]
    sampled: tuple[int, ...]  # positions in ids of sampled tokens; each is predicted from the position before it
    logprobs: tuple[float, ...]  # of those tokens, as the engine recorded them
    episode: int
    advantages: tuple[float, ...] = ()  # one per sampled token, like the fields below; () is 0 for all
    weights: tuple[float, ...] = ()  # of a token's policy loss; () is 1 for all
    stale: tuple[bool, ...] = ()  # tokens that an older version sampled, or whose KV may be of one; () is none
    marked: tuple[bool, ...] = ()  # tokens that the objective treats separately; () is none
    values: tuple[float, ...] = ()  # the critic's values at these tokens
    returns: tuple[float, ...] = ()  # the critic's targets
    images: tuple[ImageSpan, ...] = ()  # which of its tokens belong to images
    routes: Routes | None = None  # the experts that its tokens are computed with
    teacher: int = 0  # the number of its teacher, in distillation

    def __post_init__(self) -> None:
        per_token = (self.advantages, self.weights, self.stale, self.marked, self.values, self.returns)
        assert all(len(values) in (0, len(self.sampled)) for values in per_token), "one value per sampled token"

    @classmethod
    def of(cls, segment: Segment, episode: int) -> Row:
        sampled = tuple(itertools.compress(range(len(segment.prompt_ids), len(segment.ids)), segment.response_mask))
        assert not sampled or sampled[0] > 0, "the first token of a segment cannot have been sampled"
        return cls(
            ids=segment.ids,
            sampled=sampled,
            logprobs=tuple(itertools.compress(segment.response_logprobs, segment.response_mask)),
            episode=episode,
            images=segment.images,
            routes=segment.routes,
        )

    @cached_property
    def inputs(self) -> tuple[int, ...]:
        """The tokens to compute: all before the last sampled one. Tokens of an image are a negative number, the same
        for the same image."""
        used = list(self.ids[: self.sampled[-1]]) if self.sampled else []
        for span in self.shown:
            used[span.start : span.end] = [image_id(span.image)] * (span.end - span.start)
        return tuple(used)

    @property
    def shown(self) -> tuple[ImageSpan, ...]:
        """The images among the tokens to compute."""
        end = self.sampled[-1] if self.sampled else 0
        return tuple(span for span in self.images if span.end <= end)


def image_id(image: Image) -> int:
    return -1 - int(image.hash[:15], 16)


@dataclass(frozen=True)
class PackedImages:
    """The distinct images, in the order of their features, and which feature belongs to which packed token."""

    images: tuple[Image, ...]
    at_V: Tensor
    feature_V: Tensor


@dataclass(frozen=True, kw_only=True)
class PackedRows:
    """Several rows in one sequence. Branch i is `queries[i]` packed tokens, which are the last of its `keys[i]` keys.

    `positions_3T` has three axes, which differ at images; `positions_T` counts the tokens of a row."""

    ids_T: Tensor
    positions_T: Tensor
    positions_3T: Tensor | None
    images: PackedImages | None
    queries: list[int]
    keys: list[int]
    parents: list[int]  # the packed token before the first one of each branch; -1: none
    source_S: Tensor | None  # the packed token that each key belongs to; None: branches share nothing, S = T in order
    paths: list[Ints]  # the packed tokens of each row
    routes_TLk: Tensor | None  # int16; -1: not recorded
    predict_U: Tensor  # index of the token before each sampled one
    targets_U: Tensor  # the sampled tokens
    pair_M: Tensor  # the U pair of each sampled token
    old_logp_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor
    marked_M: Tensor
    episode_M: Tensor
    row_M: Tensor
    rows: int


def pack(rows: Sequence[Row], device: torch.device) -> PackedRows:
    """Pack rows, each with a sampled token, into one prefix tree. Only neighbouring rows share a prefix."""
    tree = _build_tree([row.inputs for row in rows], [0, *itertools.starmap(shared_tokens, itertools.pairwise(rows))])
    sampled = [np.array(row.sampled) for row in rows]
    predict = np.concatenate([path[at - 1] for path, at in zip(tree.paths, sampled, strict=True)])
    targets = np.array([row.ids[p] for row in rows for p in row.sampled])
    keys = predict * (targets.max() + 1) + targets
    _, first, pair = np.unique(keys, return_index=True, return_inverse=True)
    counts = [len(at) for at in sampled]

    def tensor(values: np.ndarray) -> Tensor:
        return placed(torch.from_numpy(values), device)

    return PackedRows(
        ids_T=tensor(np.maximum(tree.ids, 0)),
        positions_T=tensor(tree.positions),
        positions_3T=tensor(_three_axes(rows, tree)) if any(row.shown for row in rows) else None,
        images=_images(rows, tree, tensor),
        queries=tree.queries,
        keys=tree.keys,
        parents=tree.parents,
        source_S=None if sum(tree.keys) == len(tree.ids) else tensor(tree.source),
        paths=tree.paths,
        routes_TLk=tensor(routes) if (routes := _routes(rows, tree)) is not None else None,
        predict_U=tensor(predict[first]),
        targets_U=tensor(targets[first]),
        pair_M=tensor(pair),
        old_logp_M=tensor(np.array([p for row in rows for p in row.logprobs], dtype=np.float32)),
        advantages_M=tensor(_per_token([r.advantages for r in rows], counts, 0.0, np.float32)),
        weights_M=tensor(_per_token([r.weights for r in rows], counts, 1.0, np.float32)),
        marked_M=tensor(_per_token([r.marked for r in rows], counts, False, np.bool_)),
        episode_M=tensor(np.repeat([row.episode for row in rows], counts)),
        row_M=tensor(np.repeat(np.arange(len(rows)), counts)),
        rows=len(rows),
    )


def placed(here: Tensor, device: torch.device) -> Tensor:
    """A copy on the device from pinned memory, so that the next micro-batch is packed while the GPU computes this
    one."""
    return here.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else here


def _three_axes(rows: Sequence[Row], tree: _Tree) -> np.ndarray:
    ropes = [rope_of(len(row.inputs), row.shown).positions_3L for row in rows]
    positions_3T = np.empty((3, len(tree.ids)), dtype=np.int64)
    for path, rope_3L in zip(tree.paths, ropes, strict=True):
        positions_3T[:, path] = rope_3L
    return positions_3T


def _images(rows: Sequence[Row], tree: _Tree, tensor: Callable[[np.ndarray], Tensor]) -> PackedImages | None:
    """The distinct images of all rows, and the packed tokens that show them."""
    begins: dict[Image, int] = {}
    feature_T = np.full(len(tree.ids), -1, dtype=np.int64)
    features = 0
    for row, path in zip(rows, tree.paths, strict=True):
        for span in row.shown:
            count = span.end - span.start
            if span.image not in begins:
                begins[span.image], features = features, features + count
            feature_T[path[span.start : span.end]] = begins[span.image] + np.arange(count)
    if not begins:
        return None
    assert len({image_id(image) for image in begins}) == len(begins), "two images have the same id"
    at_V = np.flatnonzero(feature_T >= 0)
    return PackedImages(tuple(begins), tensor(at_V), tensor(feature_T[at_V]))


def _per_token(values: Sequence[Sequence[float]], counts: Sequence[int], default: float, kind: type) -> np.ndarray:
    """One value per sampled token of each row; `default` for rows without values."""
    return np.concatenate(
        [np.array(one, dtype=kind) if one else np.full(n, default, kind) for one, n in zip(values, counts, strict=True)]
    )


class _Tree(NamedTuple):
    """The branches, concatenated. `source` holds the keys of each branch, `paths` the packed tokens of each row."""

    ids: Ints
    positions: Ints
    queries: list[int]
    keys: list[int]
    parents: list[int]
    source: Ints
    paths: list[Ints]


def _build_tree(rows: Sequence[tuple[int, ...]], shares: Sequence[int]) -> _Tree:
    """The tree of `rows`, each of which shares so many tokens with the one before it. Branches are ordered by shape,
    because those of one shape share an attention call."""
    branches = sorted(
        (i for i, row in enumerate(rows) if len(row) > shares[i]),
        key=lambda i: (len(rows[i]), len(rows[i]) - shares[i]),
    )
    queries = [len(rows[i]) - shares[i] for i in branches]
    begins = dict(zip(branches, np.cumsum([0, *queries]), strict=False))
    paths: list[Ints] = []
    path = np.empty(0, dtype=np.int64)
    for i, (row, share) in enumerate(zip(rows, shares, strict=True)):
        path = np.concatenate([path[:share], begins.get(i, 0) + np.arange(len(row) - share)])
        paths.append(path)
    return _Tree(
        ids=np.concatenate([np.array(rows[i][shares[i] :]) for i in branches]),
        positions=np.concatenate([np.arange(shares[i], len(rows[i])) for i in branches]),
        queries=queries,
        keys=[len(rows[i]) for i in branches],
        parents=[int(paths[i][shares[i] - 1]) if shares[i] else -1 for i in branches],
        source=np.concatenate([paths[i] for i in branches]),
        paths=paths,
    )


def shared(a: Sequence[int], b: Sequence[int]) -> int:
    """The length of the common prefix of two rows."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


def shared_tokens(a: Row, b: Row) -> int:
    """How many tokens of two rows are computed once: their common prefix, as far as both use the same experts."""
    count = shared(a.inputs, b.inputs)
    if a.routes is None or b.routes is None or a.routes == b.routes:
        return count
    mine, other = (route_array(routes)[:count] for routes in (a.routes, b.routes))
    if mine.shape != other.shape:
        return 0
    differs = (mine != other).any((1, 2))
    return int(differs.argmax()) if differs.any() else count


def route_array(routes: Routes) -> np.ndarray[Any, np.dtype[np.int16]]:
    """[tokens, layers, experts]."""
    return np.frombuffer(routes.data, "<i2").reshape(-1, routes.layers, routes.experts)


def _routes(rows: Sequence[Row], tree: _Tree) -> np.ndarray | None:
    known = [(route_array(row.routes), path) for row, path in zip(rows, tree.paths, strict=True) if row.routes]
    if not known:
        return None
    found = np.full((len(tree.ids), *known[0][0].shape[1:]), -1, np.int16)
    for routes, path in known:
        count = min(len(routes), len(path))
        found[path[:count]] = routes[:count]
    return found


def micro_batches(rows: Iterable[Row], max_tokens: int, max_rows: int | None = None) -> Iterator[list[Row]]:
    """Divide rows into batches that compute at most `max_tokens` tokens; a longer row gets its own batch.

    Rows are sorted by their tokens, so that those with a common prefix are neighbours. A batch ends, within its second
    half, where neighbours share least: a group is split only if it has to be. Rows without sampled tokens are left out.
    """
    order = sorted((row for row in rows if row.sampled), key=lambda row: row.inputs)
    lengths = [len(row.inputs) for row in order]
    shares = [0, *itertools.starmap(shared_tokens, itertools.pairwise(order))]
    first = 0
    while first < len(order):
        end = _furthest(first, lengths, shares, max_tokens, max_rows or len(order))
        if end < len(order):
            end = max(range(first + 1 + (end - first) // 2, end + 1), key=lambda i: (-shares[i], i), default=end)
        yield order[first:end]
        first = end


def _furthest(first: int, lengths: Sequence[int], shares: Sequence[int], max_tokens: int, max_rows: int) -> int:
    """The latest end of a batch that begins with row `first`. A batch has at least one row."""
    tokens = keys = lengths[first]
    for i in range(first + 1, min(len(lengths), first + max_rows)):
        tokens += lengths[i] - shares[i]
        keys += lengths[i]
        if tokens > max_tokens or keys > KEYS_PER_TOKEN * max_tokens:
            return i
    return min(len(lengths), first + max_rows)
