"""Messages that rank 0 broadcasts. Each names one computation that all ranks run together.

Rows are not broadcast: within a computation each rank gets its own micro-batches (`rally.train.micro_batches`). Only
the start-up checks broadcast a few rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from rally.models.sharding import Message
from rally.train.batch import TrainBatch
from rally.train.packing import Row


@dataclass(frozen=True)
class UpdatePolicy(Message):
    """Train the policy on a batch, with a seed for everything random. Its rows follow as micro-batches."""

    batch: TrainBatch
    step: int
    seed: int


@dataclass(frozen=True)
class ComputeReference(Message):
    """The reference's log-probabilities of sampled tokens. The rows follow as micro-batches."""


@dataclass(frozen=True)
class ComputeValues(Message):
    """The critic's values at sampled tokens. The rows follow as micro-batches."""


@dataclass(frozen=True)
class UpdateCritic(Message):
    """Train the critic on a batch, with a seed for everything random. Its rows follow as micro-batches."""

    batch: TrainBatch
    step: int
    seed: int


@dataclass(frozen=True)
class ComputeLogits(Message):
    """The policy's logits over one token sequence."""

    ids: Sequence[int]


@dataclass(frozen=True)
class CompareForwards(Message):
    """The training forward over rows, and the module's own. The run allows rows of up to `max_length` tokens."""

    rows: Sequence[Row]
    max_length: int


@dataclass(frozen=True)
class ComputePlain(Message):
    """The module's own forward over rows, one at a time."""

    rows: Sequence[Row]
    temperature: float


@dataclass(frozen=True)
class SftStep(Message):
    """One supervised step on conversations with so many supervised tokens, with a seed for everything random. The rows
    follow as micro-batches."""

    tokens: int
    seed: int


@dataclass(frozen=True)
class ComputeLoss(Message):
    """The loss on conversations, without training. The rows follow as micro-batches."""


@dataclass(frozen=True)
class GatherWeights(Message):
    """Gather all weights, for the rollout servers."""


@dataclass(frozen=True)
class StartEngine(Message):
    """Start an engine over a copy of the policy in every rank. A generation under a grammar may end with any of
    `end_ids`."""

    end_ids: tuple[int, ...] = ()


@dataclass(frozen=True)
class PublishWeights(Message):
    """Copy the policy's weights into the engine of every rank; what it samples from then on has this version."""

    version: int


@dataclass(frozen=True)
class GatherState(Message):
    """Gather the weights of the policy for a checkpoint, and write the shards of its training state, with those that
    `GatherCritic` has copied, into `folder`. Each rank reports under `ticket` when it has written its own.
    `merged`: gather the full model beside its adapters too. `background`: write while training continues."""

    folder: Path
    ticket: str
    merged: bool = False
    background: bool = False


@dataclass(frozen=True)
class GatherCritic(Message):
    """Gather the weights of the critic for a checkpoint, and copy the shards of its training state."""


@dataclass(frozen=True)
class Shutdown(Message):
    """The run is over; leave the process group."""
