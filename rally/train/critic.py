"""The critic: values before every decision, the advantages that follow from them, and the update of the value model.

All values of a step are computed before the critic is updated with it, so they do not depend on the rewards of the
step's own episodes. The loss of a mini-batch does not depend on how it is divided into micro-batches.

Shapes: N episodes, D decisions of all of them in order (tokens or turns, see rally/algos/gae.py), M sampled tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from rally.algos.credit_assignment import CreditSettings
from rally.algos.gae import advantages_and_returns, decisions, explained_variance, value_loss
from rally.algos.losses import Aggregation, token_weights
from rally.models.residence import on_device
from rally.models.sharding import Ranks, gather_groups
from rally.train.batch import TrainBatch, batch_of, rows_of, scored_of
from rally.train.checkpoint.snapshot import Part
from rally.train.checkpoint.state_shards import state_parts
from rally.train.checkpoint.store import read_state
from rally.train.divergence import Tried
from rally.train.loss_inputs import over_rows
from rally.train.micro_batches import MicroBatchLimits, MicroBatchShare, micro_batches_for, share_of
from rally.train.packing import Row, joined
from rally.train.policy import Policy
from rally.train.rank_messages import ComputeValues, GatherCritic, UpdateCritic
from rally.train.update import take_step, visit_order
from rally.train.value_model import token_values, value_model_part
from rally.types import Episode

FOLDER, OPTIMIZER = "critic", "optimizer.pt"


@dataclass(frozen=True, kw_only=True)
class CriticSettings:
    """The value loss and the sizes of its batches. `forward_*` limit the pass that computes values without a
    gradient."""

    mini_batch_groups: int
    clip: float = 0.5
    aggregation: Aggregation = "token-mean"
    loss_scale: float | None = None
    epochs: int = 1
    max_tokens: int = 32768
    max_rows: int | None = None
    forward_max_tokens: int = 32768
    forward_max_rows: int | None = None
    shuffle_seed: int | None = None  # None: mini-batches in the order of the prompts
    warmup_steps: int = 0  # steps in which only the critic is updated

    def mini_batches(self, groups: int) -> int:
        return -(-groups // self.mini_batch_groups) * self.epochs


class CriticOutput(NamedTuple):
    """The batches that policy and critic are trained on, and metrics of the values."""

    policy: TrainBatch
    critic: TrainBatch
    metrics: dict[str, float]


@dataclass
class CriticMetrics:
    """Sums over decisions. They stay on the device, so that adding to them does not synchronize."""

    decisions: int = 0
    clipped: Tensor = field(default_factory=lambda: torch.zeros(()))
    predicted: Tensor = field(default_factory=lambda: torch.zeros(()))
    losses: list[Tensor] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)

    def add(self, values_D: Tensor, clipped_D: Tensor) -> None:
        self.decisions += values_D.numel()
        self.clipped = self.clipped + clipped_D.sum()
        self.predicted = self.predicted + values_D.detach().sum(dtype=torch.float64)

    def result(self, ranks: Ranks) -> dict[str, float]:
        """The metrics over all ranks, which have run the same mini-batches."""
        loss = sum(map(float, self.losses))
        mine = torch.tensor([self.decisions, loss, float(self.clipped), float(self.predicted)], dtype=torch.float64)
        decisions, loss, clipped, predicted = sum(gather_groups(ranks, mine), torch.zeros_like(mine)).tolist()
        return {
            "critic/vf_loss": loss / max(1, len(self.losses)),
            "critic/vf_clipfrac": clipped / max(1, decisions),
            "critic/vpred_mean": predicted / max(1, decisions),
            "critic/grad_norm": sum(self.grad_norms) / max(1, len(self.grad_norms)),
        }


@dataclass(frozen=True)
class Critic:
    """A value model with its optimizer."""

    learner: Policy  # the value model and its optimizer
    settings: CriticSettings

    def judge(
        self, episodes: Sequence[Episode], credit: CreditSettings, token_rewards_M: Tensor | None
    ) -> CriticOutput:
        """The values of all decisions of one step, and the advantages that follow from them."""
        scored = scored_of(episodes, credit, token_rewards_M)
        chosen, rows = decisions(scored, credit), rows_of(episodes)
        decision_rows = _only(rows, chosen.first_D)
        values_D = self.values(decision_rows)
        result = advantages_and_returns(chosen, values_D, credit)
        critic = replace(
            batch_of([], scored, torch.zeros(0)),
            rows=_with_targets(decision_rows, values_D, result.returns_D),
            tokens_N=chosen.lengths_N,
        )
        return CriticOutput(
            batch_of(rows, scored, result.advantages_M), critic, _value_metrics(values_D, result.returns_D)
        )

    def values(self, rows: Sequence[Row]) -> Tensor:
        """The value before each sampled token of the rows, which only rank 0 has."""
        learner, settings = self.learner, self.settings
        limits = MicroBatchLimits(settings.forward_max_tokens, settings.forward_max_rows)
        with learner.ranks.broadcast(ComputeValues()), on_device(learner.model):
            return over_rows(
                rows, lambda packed: token_values(learner.model, packed), learner.device, limits, learner.ranks
            )

    def update(
        self, batch: TrainBatch, *, step: int = 0, progress: Callable[[], None] = lambda: None
    ) -> dict[str, float]:
        """Run all mini-batches of one step and return its metrics."""
        settings, learner, metrics = self.settings, self.learner, CriticMetrics()
        with learner.ranks.broadcast(UpdateCritic(replace(batch, rows=[]), step, torch.initial_seed())):
            with learner.training():
                for epoch in range(settings.epochs):
                    order = visit_order(batch.num_groups, settings.shuffle_seed, step, epoch)
                    for members in batch.mini_batches(settings.mini_batch_groups, order):
                        self._mini_batch(batch, members, metrics)
                        progress()
            rate = learner.optimizer.param_groups[0]["lr"]
            learner.advance()
            return {**metrics.result(learner.ranks), "critic/lr": rate}

    def _mini_batch(self, batch: TrainBatch, members: Sequence[int], metrics: CriticMetrics) -> None:
        settings, chosen = self.settings, set(members)
        weights_N = torch.zeros(len(batch.tokens_N))
        counts = batch.tokens_N[list(members)]
        weights_N[list(members)] = token_weights(counts, settings.aggregation, settings.loss_scale)
        rows = [row for row in batch.rows if row.episode in chosen]
        total, tried = torch.zeros(()), []
        ranks = self.learner.ranks
        rounds = micro_batches_for(ranks, rows, MicroBatchLimits(settings.max_tokens, settings.max_rows))
        shares = share_of(ranks, rounds)
        for part in shares:
            loss_D = self._loss(part, weights_N, metrics)
            (loss_D.sum() * part.counts).backward()
            if part.counts:
                total = total + loss_D.detach().sum()
                tried.append(Tried(part.rows, loss_D.detach()))
        if shares:
            metrics.grad_norms.append(take_step(self.learner, rounds, tried))
        metrics.losses.append(total)

    def _loss(self, part: MicroBatchShare, weights_N: Tensor, metrics: CriticMetrics) -> Tensor:
        """The contribution of each decision to the loss of its mini-batch."""
        device, rows = self.learner.device, part.rows
        packed = self.learner.pack(rows)
        old_D, returns_D = (
            torch.from_numpy(joined(values, np.float32)).to(device)
            for values in ([row.values for row in rows], [row.returns for row in rows])
        )
        values_D = token_values(self.learner.model, packed)
        loss_D, clipped_D = value_loss(values_D, old_D, returns_D, self.settings.clip)
        if part.counts:
            metrics.add(values_D, clipped_D)
        return loss_D * weights_N.to(device)[packed.episode_M]

    def part(self) -> Part:
        """The critic's part of a checkpoint, in one folder. The state is copied now and written when the part is
        called; other ranks write theirs with the policy's."""
        with self.learner.ranks.broadcast(GatherCritic()), on_device(self.learner.model):
            model = value_model_part(self.learner.model)
            states = state_parts(OPTIMIZER, self.learner)

        def write(checkpoint: Path) -> None:
            for part in (model, *states):
                part(checkpoint / FOLDER)

        return write

    def read(self, folder: Path) -> None:
        """Restore the optimizer from a checkpoint. The weights have been loaded from there already."""
        self.learner.load_state(read_state(folder / FOLDER / OPTIMIZER))


def _only(rows: Sequence[Row], first_D: Tensor) -> list[Row]:
    """The rows with only the first token of each decision marked as sampled."""
    counts = torch.tensor([len(row.sampled) for row in rows], dtype=torch.long)
    chosen_M = torch.zeros(int(counts.sum()), dtype=torch.bool)
    chosen_M[first_D] = True
    return [
        replace(row, sampled=row.sampled[part], logprobs=row.logprobs[part], allowed=())
        for row, part in zip(rows, (part.numpy() for part in chosen_M.split(counts.tolist())), strict=True)
    ]


def _with_targets(rows: Sequence[Row], values_D: Tensor, returns_D: Tensor) -> list[Row]:
    sizes = [len(row.sampled) for row in rows]
    return [
        replace(row, values=values.numpy(), returns=returns.numpy())
        for row, values, returns in zip(rows, values_D.split(sizes), returns_D.split(sizes), strict=True)
    ]


def _value_metrics(values_D: Tensor, returns_D: Tensor) -> dict[str, float]:
    if not values_D.numel():
        return {}
    metrics = {"critic/vf_explained_var": explained_variance(values_D, returns_D)}
    for name, numbers_D in (("values", values_D), ("returns", returns_D)):
        metrics[f"critic/{name}/mean"] = float(numbers_D.mean(dtype=torch.float64))
        metrics[f"critic/{name}/max"] = float(numbers_D.max())
        metrics[f"critic/{name}/min"] = float(numbers_D.min())
    return metrics
