"""What rank 0 broadcasts: each message is one computation that all ranks run together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rally.models.parallel import Message
from rally.train.batch import TrainBatch
from rally.train.packing import Row


@dataclass(frozen=True)
class UpdatePolicy(Message):
    """Train on a batch, from a seed for whatever draws."""

    batch: TrainBatch
    step: int
    seed: int


@dataclass(frozen=True)
class ComputeReference(Message):
    """What the reference gives the sampled tokens of rows."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class ComputeValues(Message):
    """What the critic expects before the sampled tokens of rows."""

    rows: Sequence[Row]


@dataclass(frozen=True)
class UpdateCritic(Message):
    """Train the critic on a batch, from a seed for whatever draws."""

    batch: TrainBatch
    step: int
    seed: int


@dataclass(frozen=True)
class ComputeLogits(Message):
    """The policy's logits over one history."""

    ids: Sequence[int]


@dataclass(frozen=True)
class SftStep(Message):
    """One step on conversations, from a seed for whatever draws."""

    rows: Sequence[Row]
    seed: int


@dataclass(frozen=True)
class ComputeLoss(Message):
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
class Shutdown(Message):
    """There is nothing more to do."""


Asking = ComputeReference | ComputeValues | ComputeLoss | ComputeLogits


Training = UpdatePolicy | UpdateCritic | SftStep


Gathering = GatherWeights | GatherState | GatherCritic


Order = Asking | Training | Gathering
