"""How a batch is cut into micro-batches, and which of them each rank computes.

All ranks run the same functions over the same rows in the same order, each over its share of the micro-batches.

Shapes: M sampled tokens of rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from rally.models.parallel import Ranks
from rally.train.packing import Row, micro_batches, shared

UNBOUND = sys.maxsize


class MicroBatchLimits(NamedTuple):
    """At most so many tokens and, unless None, so many rows."""

    max_tokens: int
    max_rows: int | None = None

    def within(self, other: MicroBatchLimits) -> MicroBatchLimits:
        """What keeps to both."""
        rows = [count for count in (self.max_rows, other.max_rows) if count is not None]
        return MicroBatchLimits(min(self.max_tokens, other.max_tokens), min(rows, default=None))


def limits_of(budget: int, rows: int | None, by_tokens: bool) -> MicroBatchLimits:
    return MicroBatchLimits(budget if by_tokens else UNBOUND, rows)


class MicroBatchShare(NamedTuple):
    """A micro-batch. One that does not count is another rank's: all ranks must compute equally often."""

    rows: list[Row]
    counts: bool = True


def micro_batches_for(ranks: Ranks, rows: Sequence[Row], cut: MicroBatchLimits) -> list[list[Row]]:
    """All micro-batches, the same on every rank: within the cut, and small enough that no rank is left without."""
    tokens = cut.max_tokens
    if ranks.count > 1:
        tokens = max(1, min(tokens, -(-_computed(rows) // ranks.count)))
    return list(micro_batches(rows, tokens, cut.max_rows))


def share_of(ranks: Ranks, parts: Sequence[list[Row]]) -> list[MicroBatchShare]:
    """What this rank computes, as many as every other does."""
    rounds = range(0, len(parts), ranks.count)
    mine = [first + ranks.number for first in rounds]
    return [MicroBatchShare(parts[i]) if i < len(parts) else MicroBatchShare(parts[-1], counts=False) for i in mine]


def in_order(ranks: Ranks, parts: Sequence[list[Row]], mine_M: Tensor) -> list[Tensor]:
    """A number per sampled token of each part, where this rank has `mine_M` of those parts of its share that count."""
    found: list[Tensor] = [torch.empty(0)] * len(parts)
    for number, numbers in enumerate(ranks.gathered(mine_M)):
        theirs = range(number, len(parts), ranks.count)
        sizes = [sum(len(row.sampled) for row in parts[i]) for i in theirs]
        for i, one in zip(theirs, numbers.split(sizes), strict=True):
            found[i] = one
    return found


def _computed(rows: Sequence[Row]) -> int:
    """How many tokens a forward over all rows computes."""
    order = sorted(row.inputs for row in rows if row.sampled)
    return sum(map(len, order)) - sum(shared(a, b) for a, b in itertools.pairwise(order))
