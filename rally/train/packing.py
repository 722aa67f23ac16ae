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
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch
from torch import Tensor

from rally.models.token_masks import TokenMasks, decompressed
from rally.models.vision import rope_of
from rally.platforms import from_host
from rally.types import Image, ImageSpan, Routes, Segment

KEYS_PER_TOKEN = 8  # bounds the copied keys too: many short responses to one long prompt have many keys

Ints = np.ndarray[tuple[int], np.dtype[np.int64]]
Tokens = np.ndarray[tuple[int], np.dtype[np.int32]]
Floats = np.ndarray[tuple[int], np.dtype[np.float32]]
Flags = np.ndarray[tuple[int], np.dtype[np.bool_]]
N = TypeVar("N", bound=np.generic)

FIELDS: dict[str, type[np.generic]] = {
    "ids": np.int32,
    "sampled": np.int32,
    "logprobs": np.float32,
    "advantages": np.float32,
    "weights": np.float32,
    "stale": np.bool_,
    "marked": np.bool_,
    "values": np.float32,
    "returns": np.float32,
}
"""The arrays of a row, and their types."""

PER_SAMPLED = tuple(FIELDS)[2:]  # those with one value per sampled token


def _no_floats() -> Floats:
    return np.empty(0, np.float32)


def _no_flags() -> Flags:
    return np.empty(0, np.bool_)


class TeacherTokens(NamedTuple):
    """What a served teacher answered for the sampled tokens of a row: K tokens at each, and their log-probabilities."""

    ids_MK: np.ndarray[Any, np.dtype[np.int64]]
    logp_MK: np.ndarray[Any, np.dtype[np.float32]]


@dataclass(frozen=True, kw_only=True, eq=False)
class Row:
    """One segment as the trainer sees it. `episode` numbers the episode it belongs to within the batch.

    Any sequence can be given for an array. Rows are compared by identity."""

    ids: Tokens
    sampled: Tokens  # positions in ids of sampled tokens, ascending; each is predicted from the position before it
    logprobs: Floats  # of those tokens, as the engine recorded them
    episode: int
    advantages: Floats = field(default_factory=_no_floats)  # one per sampled token, like the fields below; none: all 0
    weights: Floats = field(default_factory=_no_floats)  # of a token's policy loss; none: all 1
    stale: Flags = field(default_factory=_no_flags)  # tokens of an older version, or whose KV may be of one
    marked: Flags = field(default_factory=_no_flags)  # tokens that the objective treats separately
    values: Floats = field(default_factory=_no_floats)  # the critic's values at these tokens
    returns: Floats = field(default_factory=_no_floats)  # the critic's targets
    images: tuple[ImageSpan, ...] = ()  # which of its tokens belong to images
    routes: Routes | None = None  # the experts that its tokens are computed with
    teacher: int = 0  # the number of its teacher, in distillation
    teacher_tokens: TeacherTokens | None = field(default=None, compare=False)  # the answer of a served teacher
    allowed: tuple[bytes | None, ...] = ()  # the mask of each sampled token's grammar; None, or () for all: no grammar

    def __post_init__(self) -> None:
        for name, kind in FIELDS.items():
            object.__setattr__(self, name, np.asarray(getattr(self, name), kind))
        sizes = {len(self.allowed), *(len(getattr(self, name)) for name in PER_SAMPLED)}
        assert sizes <= {0, len(self.sampled)}, "one value per sampled token"
        assert len(self.logprobs) == len(self.sampled), "one log-probability per sampled token"
        assert (self.sampled[1:] > self.sampled[:-1]).all(), "sampled positions are ascending"

    @classmethod
    def of(cls, segment: Segment, episode: int) -> Row:
        prompt, response = len(segment.prompt_ids), len(segment.response_ids)
        chosen = np.fromiter(segment.response_mask, np.bool_, response)
        sampled = (np.flatnonzero(chosen) + prompt).astype(np.int32)
        assert not len(sampled) or sampled[0] > 0, "the first token of a segment cannot have been sampled"
        return cls(
            ids=np.fromiter(itertools.chain(segment.prompt_ids, segment.response_ids), np.int32, prompt + response),
            sampled=sampled,
            logprobs=np.fromiter(segment.response_logprobs, np.float32, response)[chosen],
            episode=episode,
            images=segment.images,
            routes=segment.routes,
            allowed=_allowed(segment),
        )

    @cached_property
    def inputs(self) -> Tokens | Ints:
        """The tokens to compute: all before the last sampled one. Tokens of an image are a negative number, the same
        for the same image, which needs 64 bits."""
        used = self.ids[: self._end]
        if not self.shown:
            return used
        wide = used.astype(np.int64)
        for span in self.shown:
            wide[span.start : span.end] = image_id(span.image)
        return wide

    @property
    def shown(self) -> tuple[ImageSpan, ...]:
        """The images among the tokens to compute."""
        return tuple(span for span in self.images if span.end <= self._end)

    @property
    def mask(self) -> Flags:
        """Whether each token is sampled."""
        flags = np.zeros(len(self.ids), np.bool_)
        flags[self.sampled] = True
        return flags

    @property
    def _end(self) -> int:
        return int(self.sampled[-1]) if len(self.sampled) else 0


def joined(parts: Iterable[np.ndarray[Any, Any]], kind: type[N]) -> np.ndarray[tuple[int], np.dtype[N]]:
    """The arrays as one, which may be empty."""
    return np.concatenate([np.empty(0, kind), *parts], dtype=kind)


def per_token(rows: Sequence[Row], name: str, default: float, kind: type[N]) -> np.ndarray[tuple[int], np.dtype[N]]:
    """A field of all sampled tokens of rows; `default` for rows without values."""
    parts = (getattr(row, name) for row in rows)
    given = (p if len(p) else np.full(len(row.sampled), default, kind) for row, p in zip(rows, parts, strict=True))
    return joined(given, kind)


def _allowed(segment: Segment) -> tuple[bytes | None, ...]:
    """The mask of each sampled token."""
    if not segment.constrained:
        return ()
    masks: list[bytes | None] = [None] * len(segment.response_ids)
    for span in segment.constrained:
        masks[span.start : span.end] = decompressed(span.masks)
    assert len(masks) == len(segment.response_ids), "one mask per token"
    return tuple(itertools.compress(masks, segment.response_mask))


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
    masks: TokenMasks | None  # of the U pairs, for tokens that were sampled under a grammar
    old_logp_M: Tensor
    advantages_M: Tensor
    weights_M: Tensor
    marked_M: Tensor
    episode_M: Tensor
    row_M: Tensor
    rows: int
    keep_probabilities: bool = False  # the forward pass of the output head keeps them for the backward pass


def pack(rows: Sequence[Row], device: torch.device) -> PackedRows:
    """Pack rows, each with a sampled token, into one prefix tree. Only neighbouring rows share a prefix. Tokens with
    different masks are different pairs."""
    tree = _build_tree([row.inputs for row in rows], _shares(rows))
    predict = np.concatenate([path[row.sampled - 1] for path, row in zip(tree.paths, rows, strict=True)])
    targets = np.concatenate([row.ids[row.sampled] for row in rows]).astype(np.int64)
    keys = predict * (targets.max() + 1) + targets
    masks, mask_M = _mask_numbers(rows)
    keys = keys * (len(masks) + 1) + mask_M
    _, first, pair = np.unique(keys, return_index=True, return_inverse=True)
    counts = [len(row.sampled) for row in rows]

    def tensor(values: np.ndarray) -> Tensor:
        return from_host(torch.from_numpy(values), device)

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
        masks=_masks_of_pairs(masks, mask_M[first], device),
        old_logp_M=tensor(np.concatenate([row.logprobs for row in rows])),
        advantages_M=tensor(per_token(rows, "advantages", 0.0, np.float32)),
        weights_M=tensor(per_token(rows, "weights", 1.0, np.float32)),
        marked_M=tensor(per_token(rows, "marked", False, np.bool_)),
        episode_M=tensor(np.repeat([row.episode for row in rows], counts)),
        row_M=tensor(np.repeat(np.arange(len(rows)), counts)),
        rows=len(rows),
    )


def _mask_numbers(rows: Sequence[Row]) -> tuple[list[bytes], Ints]:
    """The different masks, and for each sampled token the number of its mask, counted from 1; 0: none."""
    numbers: dict[bytes, int] = {}
    of_tokens = np.zeros(sum(len(row.sampled) for row in rows), dtype=np.int64)
    at = 0
    for row in rows:
        for place, mask in enumerate(row.allowed, start=at):
            if mask is not None:
                of_tokens[place] = numbers.setdefault(mask, len(numbers) + 1)
        at += len(row.sampled)
    return list(numbers), of_tokens


def _masks_of_pairs(masks: Sequence[bytes], mask_U: Ints, device: torch.device) -> TokenMasks | None:
    if not masks:
        return None
    rows = np.flatnonzero(mask_U)
    return TokenMasks.of(rows.tolist(), [masks[number - 1] for number in mask_U[rows]], device)


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


class _Tree(NamedTuple):
    """The branches, concatenated. `source` holds the keys of each branch, `paths` the packed tokens of each row."""

    ids: Ints
    positions: Ints
    queries: list[int]
    keys: list[int]
    parents: list[int]
    source: Ints
    paths: list[Ints]


def _build_tree(rows: Sequence[Tokens | Ints], shares: Sequence[int]) -> _Tree:
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
        ids=np.concatenate([rows[i][shares[i] :] for i in branches]).astype(np.int64),
        positions=np.concatenate([np.arange(shares[i], len(rows[i])) for i in branches]),
        queries=queries,
        keys=[len(rows[i]) for i in branches],
        parents=[int(paths[i][shares[i] - 1]) if shares[i] else -1 for i in branches],
        source=np.concatenate([paths[i] for i in branches]),
        paths=paths,
    )


CHUNK = 4096  # tokens that are compared at once


def shared(a: Tokens | Ints, b: Tokens | Ints) -> int:
    """The length of the common prefix of two rows."""
    count = min(len(a), len(b))
    for first in range(0, count, CHUNK):
        end = min(first + CHUNK, count)
        differs = a[first:end] != b[first:end]
        at = int(differs.argmax())
        if differs[at]:
            return first + at
    return count


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


def _shares(rows: Sequence[Row]) -> list[int]:
    """How many tokens each row shares with the one before it."""
    return [0, *itertools.starmap(shared_tokens, itertools.pairwise(rows))]


class SortedRows:
    """The rows that have sampled tokens, sorted by their tokens, so that those with a common prefix are neighbours."""

    def __init__(self, rows: Iterable[Row]) -> None:
        given = [row for row in rows if len(row.sampled)]
        kind = np.int64 if any(row.inputs.dtype == np.int64 for row in given) else np.int32
        self.rows = sorted(given, key=lambda row: _sort_key(row.inputs, kind))
        self.lengths = [len(row.inputs) for row in self.rows]
        self.shares = _shares(self.rows) if self.rows else []

    @property
    def computed(self) -> int:
        """How many tokens a forward over all rows computes."""
        return sum(self.lengths) - sum(self.shares)

    def micro_batches(self, max_tokens: int, max_rows: int | None = None) -> Iterator[list[Row]]:
        """Batches that compute at most `max_tokens` tokens; a longer row gets its own batch. A batch ends, within its
        second half, where neighbours share least: a group is split only if it has to be."""
        shares, count = self.shares, len(self.rows)
        first = 0
        while first < count:
            end = _furthest(first, self.lengths, shares, max_tokens, max_rows or count)
            if end < count:
                end = max(range(first + 1 + (end - first) // 2, end + 1), key=lambda i: (-shares[i], i), default=end)
            yield self.rows[first:end]
            first = end


def _sort_key(inputs: Tokens | Ints, kind: type[np.int32] | type[np.int64]) -> bytes:
    """Bytes in the order of the tokens: big-endian, with the sign bit flipped, because an image has a negative id."""
    flipped = np.bitwise_xor(inputs, np.iinfo(kind).min, dtype=kind)
    return flipped.astype(np.dtype(kind).newbyteorder(">")).tobytes()


def micro_batches(rows: Iterable[Row], max_tokens: int, max_rows: int | None = None) -> Iterator[list[Row]]:
    """Divide rows into batches, see `SortedRows`. Rows without sampled tokens are left out."""
    return SortedRows(rows).micro_batches(max_tokens, max_rows)


def _furthest(first: int, lengths: Sequence[int], shares: Sequence[int], max_tokens: int, max_rows: int) -> int:
    """The latest end of a batch that begins with row `first`. A batch has at least one row."""
    tokens = keys = lengths[first]
    for i in range(first + 1, min(len(lengths), first + max_rows)):
        tokens += lengths[i] - shares[i]
        keys += lengths[i]
        if tokens > max_tokens or keys > KEYS_PER_TOKEN * max_tokens:
            return i
    return min(len(lengths), first + max_rows)
