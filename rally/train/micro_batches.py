"""Divides a batch into micro-batches, and the micro-batches among ranks.

All ranks run the same functions over the same rows in the same order, each over its share of the micro-batches.

Shapes: M sampled tokens of rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rally.models.sharding import Ranks
from rally.train.packing import Row, micro_batches, shared_tokens

UNBOUND = sys.maxsize


class MicroBatchLimits(NamedTuple):
    """The most tokens and, unless None, the most rows of a micro-batch."""

    max_tokens: int
    max_rows: int | None = None

    def within(self, other: MicroBatchLimits) -> MicroBatchLimits:
        """The tighter of both limits."""
        rows = [count for count in (self.max_rows, other.max_rows) if count is not None]
        return MicroBatchLimits(min(self.max_tokens, other.max_tokens), min(rows, default=None))


def limits_of(budget: int, rows: int | None, by_tokens: bool) -> MicroBatchLimits:
    return MicroBatchLimits(budget if by_tokens else UNBOUND, rows)


class MicroBatchShare(NamedTuple):
    """A micro-batch of this rank. All ranks must run equally many: a rank without one repeats another's, which does
    not count."""

    rows: list[Row]
    counts: bool = True


def micro_batches_for(ranks: Ranks, rows: Sequence[Row], limits: MicroBatchLimits) -> list[list[Row]]:
    """All micro-batches, the same on every rank: within the limits, and small enough that every rank gets one."""
    tokens = limits.max_tokens
    if ranks.world_size > 1:
        tokens = max(1, min(tokens, -(-_computed(rows) // ranks.world_size)))
    return list(micro_batches(rows, tokens, limits.max_rows))


def share_of(ranks: Ranks, parts: Sequence[list[Row]]) -> list[MicroBatchShare]:
    """The micro-batches that this rank computes; every rank has equally many."""
    rounds = range(0, len(parts), ranks.world_size)
    mine = [first + ranks.rank for first in rounds]
    return [MicroBatchShare(parts[i]) if i < len(parts) else MicroBatchShare(parts[-1], counts=False) for i in mine]


def in_order(
    ranks: Ranks, parts: Sequence[list[Row]], mine_M: Tensor, count: Callable[[Row], int] = lambda row: len(row.sampled)
) -> list[Tensor]:
    """The numbers of each part, from all ranks: by default one per sampled token. `mine_M` are those of this rank's
    parts that count."""
    gathered: list[Tensor] = [torch.empty(0)] * len(parts)
    for rank, numbers in enumerate(ranks.all_gather(mine_M)):
        theirs = range(rank, len(parts), ranks.world_size)
        sizes = [sum(map(count, parts[i])) for i in theirs]
        for i, one in zip(theirs, numbers.split(sizes), strict=True):
            gathered[i] = one
    return gathered


def _computed(rows: Sequence[Row]) -> int:
    """How many tokens a forward over all rows computes."""
    order = sorted((row for row in rows if row.sampled), key=lambda row: row.inputs)
    return sum(len(row.inputs) for row in order) - sum(itertools.starmap(shared_tokens, itertools.pairwise(order)))
