"""An update is the same whether one process makes it or several: which rows each computes, and what they tell each
other.

A rank is one of the processes that hold the policy together. All of them run the very same functions over the same rows
in the same order, each over its share of the micro-batches. Rank 0 is the run; the others do what it orders. A module
that lies on several ranks carries them with it; one that does not is alone. `rally/cluster` has the several.

Shapes: M sampled tokens of rows, X any numbers.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor
from transformers import PreTrainedModel

from rally.config import Config, SftConfig
from rally.train.batch import TrainBatch
from rally.train.cuts import Cut
from rally.train.packing import Row, micro_batches, shared

CARRIED = "rally_ranks"
Found = TypeVar("Found")


@dataclass(frozen=True)
class Plan:
    """What every rank builds the policy from."""

    config: Config | SftConfig
    checkpoint: Path | None
    steps: int


@dataclass(frozen=True)
class Update:
    """Train on a batch, from a seed for whatever draws."""

    batch: TrainBatch
    step: int
    seed: int


@dataclass(frozen=True)
class AskReference:
    """What the reference gives the sampled tokens of rows."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class AskValues:
    """What the critic expects before the sampled tokens of rows."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class TeachCritic:
    """Train the critic on a batch, from a seed for whatever draws."""

    batch: TrainBatch
    step: int
    seed: int


@dataclass(frozen=True)
class AskLogits:
    """The policy's logits over one history."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Supervise:
    """One step on conversations, from a seed for whatever draws."""

    rows: Sequence[Row]
    seed: int


@dataclass(frozen=True)
class AskLoss:
    """The loss on conversations, without training."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class GatherWeights:
    """All weights, as servers want them."""


@dataclass(frozen=True)
class GatherState:
    """Everything that a checkpoint holds of the policy; `merged`: the whole model beside its adapters."""

    merged: bool = False


@dataclass(frozen=True)
class GatherCritic:
    """Everything that a checkpoint holds of the critic."""


@dataclass(frozen=True)
class Leave:
    """There is nothing more to do."""


Asking = AskReference | AskValues | AskLoss | AskLogits
Training = Update | TeachCritic | Supervise
Gathering = GatherWeights | GatherState | GatherCritic
Order = Asking | Training | Gathering


class Ranks(Protocol):
    """Those that hold a policy together, seen from one of them."""

    @property
    def number(self) -> int: ...

    @property
    def count(self) -> int: ...

    def begin(self, plan: Plan) -> None:
        """From now on all ranks are there, and each builds what the plan says."""
        ...

    def spread(self, model: PreTrainedModel) -> None:
        """Let a module that all ranks have loaded lie on all of them, and carry them with it."""
        ...

    def watching(self) -> AbstractAsyncContextManager[None]:
        """What is awaited within ends, with the reason, as soon as a rank is lost."""
        ...

    def doing(self, order: Order) -> AbstractContextManager[None]:
        """What all ranks do within it is `order`; rank 0 tells the others, who do the same."""
        ...

    def within(self, model: PreTrainedModel, work: Callable[..., Found], *given: Any) -> Found:
        """`work(model, *given)`, which may use weights that no layer of the module would ask for."""
        ...

    def gathered(self, numbers_X: Tensor) -> list[Tensor]:
        """Of every rank, as many numbers as it has, on the CPU in float64."""
        ...


class Alone:
    """One process that holds everything."""

    number, count = 0, 1

    def begin(self, plan: Plan) -> None:
        """There is nobody to wait for."""

    def spread(self, model: PreTrainedModel) -> None:
        """It lies where it was loaded."""

    def watching(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def doing(self, order: Order) -> AbstractContextManager[None]:
        return nullcontext()

    def within(self, model: PreTrainedModel, work: Callable[..., Found], *given: Any) -> Found:
        return work(model, *given)

    def gathered(self, numbers_X: Tensor) -> list[Tensor]:
        return [numbers_X.detach().double().cpu()]


ALONE = Alone()


def ranks_of(model: PreTrainedModel) -> Ranks:
    found: Ranks = getattr(model, CARRIED, ALONE)
    return found


class Share(NamedTuple):
    """A micro-batch. One that does not count is another rank's: all ranks must compute equally often."""

    rows: list[Row]
    counts: bool = True


def cut_for(ranks: Ranks, rows: Sequence[Row], cut: Cut) -> list[list[Row]]:
    """All micro-batches, the same on every rank: within the cut, and small enough that no rank is left without."""
    tokens = cut.max_tokens
    if ranks.count > 1:
        tokens = max(1, min(tokens, -(-_computed(rows) // ranks.count)))
    return list(micro_batches(rows, tokens, cut.max_rows))


def share_of(ranks: Ranks, parts: Sequence[list[Row]]) -> list[Share]:
    """What this rank computes, as many as every other does."""
    rounds = range(0, len(parts), ranks.count)
    mine = [first + ranks.number for first in rounds]
    return [Share(parts[i]) if i < len(parts) else Share(parts[-1], counts=False) for i in mine]


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
