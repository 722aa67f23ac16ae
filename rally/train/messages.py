"""What rank 0 broadcasts: each message is one computation that all ranks run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rally.models.parallel import Message
from rally.train.batch import TrainBatch
from rally.train.packing import Row


@dataclass(frozen=True)
class Update(Message):
    """Train on a batch, from a seed for whatever draws."""

    batch: TrainBatch
    step: int
    seed: int


@dataclass(frozen=True)
class AskReference(Message):
    """What the reference gives the sampled tokens of rows."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class AskValues(Message):
    """What the critic expects before the sampled tokens of rows."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class TeachCritic(Message):
    """Train the critic on a batch, from a seed for whatever draws."""

    batch: TrainBatch
    step: int
    seed: int


@dataclass(frozen=True)
class AskLogits(Message):
    """The policy's logits over one history."""

    ids: Sequence[int]


@dataclass(frozen=True)
class Supervise(Message):
    """One step on conversations, from a seed for whatever draws."""

    rows: Sequence[Row]
    seed: int


@dataclass(frozen=True)
class AskLoss(Message):
    """The loss on conversations, without training."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class GatherWeights(Message):
    """All weights, as servers want them."""


@dataclass(frozen=True)
class GatherState(Message):
    """Everything that a checkpoint holds of the policy; `merged`: the whole model beside its adapters."""

    merged: bool = False


@dataclass(frozen=True)
class GatherCritic(Message):
    """Everything that a checkpoint holds of the critic."""


@dataclass(frozen=True)
class Leave(Message):
    """There is nothing more to do."""


Asking = AskReference | AskValues | AskLoss | AskLogits


Training = Update | TeachCritic | Supervise


Gathering = GatherWeights | GatherState | GatherCritic


Order = Asking | Training | Gathering
