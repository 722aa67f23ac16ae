"""Divides a batch into micro-batches, and the micro-batches among ranks.

Rank 0 holds the rows. It divides them once and sends each rank its micro-batches; the other ranks neither sort nor
compare rows.

Shapes: M sampled tokens of rows.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from torch import Tensor

from rally.models.sharding import Message, Ranks, gather_groups, sequence_size
from rally.train.packing import Row, SortedRows

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


@dataclass(frozen=True)
class MicroBatches(Message):
    """What rank 0 sends to one rank: all micro-batches that it computes next."""

    shares: list[MicroBatchShare]


Round = list[list[Row]]
"""Micro-batches that are computed at the same time: the first one by rank 0 or its sequence-parallel group, and so
on."""


def micro_batches_for(ranks: Ranks, rows: Sequence[Row], limits: MicroBatchLimits) -> list[Round]:
    """All micro-batches: within the limits, and small enough that every rank, or group of ranks, gets one. Rank 0
    divides the rows; the other ranks get an empty list. The token limit is that of one rank, and the ranks of a
    sequence-parallel group compute a micro-batch together."""
    if ranks.rank > 0:
        return []
    ordered, together = SortedRows(rows), sequence_size(ranks)
    tokens, size = limits.max_tokens * together, ranks.world_size // together
    if size > 1:
        tokens = max(1, min(tokens, -(-ordered.computed // size)))
    parts = list(ordered.micro_batches(tokens, limits.max_rows))
    return [parts[first : first + size] for first in range(0, len(parts), size)]


def share_of(ranks: Ranks, rounds: Sequence[Round]) -> list[MicroBatchShare]:
    """The micro-batches that this rank computes, which rank 0 sends; every rank has equally many."""
    everyone = range(ranks.world_size) if ranks.rank == 0 else range(0)
    groups = [rank // sequence_size(ranks) for rank in everyone]
    return ranks.scatter([MicroBatches([_part(one, group) for one in rounds]) for group in groups]).shares


def _part(one: Round, group: int) -> MicroBatchShare:
    return MicroBatchShare(one[group]) if group < len(one) else MicroBatchShare(one[-1], counts=False)


def parts_of(rounds: Sequence[Round]) -> list[list[Row]]:
    """The micro-batches of all ranks, in order."""
    return list(itertools.chain.from_iterable(rounds))


def in_order(
    ranks: Ranks,
    rounds: Sequence[Round],
    mine_M: Tensor,
    count: Callable[[Row], int] = lambda row: len(row.sampled),
) -> list[Tensor]:
    """The numbers of each micro-batch, from all ranks: by default one per sampled token. `mine_M` are those of this
    rank's micro-batches that count. Ranks other than 0 send theirs and get an empty list."""
    gathered = gather_groups(ranks, mine_M)
    if ranks.rank > 0:
        return []
    of_group = [
        iter(numbers.split([sum(map(count, one[group])) for one in rounds if group < len(one)]))
        for group, numbers in enumerate(gathered)
    ]
    return [next(of_group[group]) for one in rounds for group in range(len(one))]
