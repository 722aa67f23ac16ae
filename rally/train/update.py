"""One policy update: mini-batches, micro-batches, the loss, the optimizer step, and what a person should know of it.

A mini-batch's loss is the same number however it is cut into micro-batches: the weight of a token is fixed before.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from rally.algos import losses
from rally.algos.correction import CorrectionSettings
from rally.algos.surrogates import Sampled, SurrogateSettings, policy_loss
from rally.train.agreement import probability_agreement
from rally.train.batch import TrainBatch
from rally.train.clock import Timed, untimed
from rally.train.cuts import Cut
from rally.train.exact import exact_decoder, exact_logprobs, with_value
from rally.train.forward import TokenLogprobs, token_logprobs
from rally.train.guards import Tried
from rally.train.packing import PackedRows, micro_batches, pack
from rally.train.policy import Policy
from rally.train.reference import Reference
from rally.train.rows import corrected_rows, marked_rows, over_rows


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """The objective and how it is cut."""

    mini_batch_groups: int
    surrogate: SurrogateSettings = field(default_factory=SurrogateSettings)
    correction: CorrectionSettings = field(default_factory=CorrectionSettings)
    aggregation: losses.Aggregation = "token-mean"
    loss_scale: float | None = None
    entropy_coeff: float = 0.0
    kl_coef: float = 0.0  # 0: no reference policy
    kl_kind: str = "low_var_kl"
    epochs: int = 1
    max_tokens: int = 16384
    max_rows: int | None = None
    log_prob_cut: Cut | None = None  # of a pass for old log-probabilities; None: as in the update
    reference_cut: Cut | None = None  # of one for the reference's
    temperature: float = 1.0
    deterministic: bool = False  # logprobs by the kernels of a deterministic rollout
    shuffle_seed: int | None = None  # None: mini-batches in the order of the prompts

    @property
    def cut(self) -> Cut:
        return Cut(self.max_tokens, self.max_rows)

    @property
    def needs_every_row(self) -> bool:
        """Rows without advantage have no gradient unless a KL or entropy term reaches them."""
        return self.kl_coef != 0 or self.entropy_coeff != 0 or self.surrogate.mode == "kl_cov"


@dataclass
class UpdateMetrics:
    """Sums over tokens, turned into means at the end; they stay on the device, so that nothing waits for them."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    grad_norms: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    mismatches: list[Tensor] = field(default_factory=list)
    mismatch_tokens: int = 0
    mismatch_sum: Tensor = field(default_factory=lambda: torch.zeros(()))
    trained: list[Tensor] = field(default_factory=list)
    recorded: list[Tensor] = field(default_factory=list)

    def add(self, tokens: int, **values_M: Tensor) -> None:
        self.tokens += tokens
        for name, values in values_M.items():
            total = values.detach().sum(dtype=torch.float64)
            self.sums[name] = self.sums[name] + total if name in self.sums else total

    def add_mismatch(self, logp_M: Tensor, recorded_M: Tensor) -> None:
        """Rollout against trainer on the same weights; only the first mini-batch still has those."""
        k3 = losses.kl_estimate(recorded_M, logp_M.detach(), "k3")
        self.mismatch_sum = self.mismatch_sum + k3.sum(dtype=torch.float64)
        self.mismatch_tokens += k3.numel()
        self.mismatches.append((logp_M.detach() - recorded_M).abs().max())
        self.trained.append(logp_M.detach())
        self.recorded.append(recorded_M)

    def result(self) -> dict[str, float]:
        means = {f"actor/{k}": float(v) / max(1, self.tokens) for k, v in self.sums.items()}
        means["actor/pg_loss"] = sum(map(float, self.losses)) / max(1, len(self.losses))
        if self.grad_norms:
            means["actor/grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
        if self.mismatch_tokens:
            means["actor/rollout_mismatch_kl"] = float(self.mismatch_sum) / self.mismatch_tokens
            means["actor/rollout_mismatch_max"] = max(map(float, self.mismatches))
            means |= probability_agreement(self.trained, self.recorded)
        means["actor/trained_tokens"] = float(self.tokens)
        return means


class CorrectedBatch(NamedTuple):
    batch: TrainBatch
    metrics: dict[str, float]


def update_policy(
    policy: Policy,
    batch: TrainBatch,
    settings: UpdateSettings,
    *,
    step: int = 0,
    reference: Reference | None = None,
    progress: Callable[[], None] = lambda: None,
    timed: Timed = untimed,
) -> dict[str, float]:
    """Run all mini-batches of one training step and return its metrics."""
    assert (reference is not None) == (settings.kl_coef != 0), "a reference policy comes with a KL coefficient"
    metrics = UpdateMetrics()
    told: dict[str, float] = {}
    if settings.correction.active:
        with timed("old_log_prob"):
            batch, told = _corrected(policy, batch, settings)
    with policy.training():
        for epoch in range(settings.epochs):
            order = visit_order(batch.num_groups, settings.shuffle_seed, step, epoch)
            for number, members in enumerate(batch.mini_batches(settings.mini_batch_groups, order)):
                fresh = epoch == number == 0 and not settings.correction.active  # which has measured it already
                _mini_batch(policy, batch, members, settings, reference, metrics, fresh=fresh)
                progress()
    rate = policy.optimizer.param_groups[0]["lr"]
    policy.advance()
    return {**metrics.result(), **told, "actor/lr": rate}


def _corrected(policy: Policy, batch: TrainBatch, settings: UpdateSettings) -> CorrectedBatch:
    """The batch with the trainer's own log-probabilities as the old ones, and what its tokens count for."""

    def forward(packed: PackedRows) -> Tensor:
        return _logprobs(policy, packed, settings).logp_M

    logp_M = over_rows(batch.rows, forward, policy.device, *(settings.log_prob_cut or settings.cut))
    rows, metrics = corrected_rows(batch.rows, logp_M, settings.correction)
    return CorrectedBatch(replace(batch, rows=rows), metrics)


def visit_order(groups: int, seed: int | None, step: int, epoch: int) -> list[int]:
    """In which order the prompts' groups are visited: a pure function of (seed, step, epoch)."""
    if seed is None:
        return list(range(groups))
    generator = torch.Generator().manual_seed(hash((seed, step, epoch)) & (2**63 - 1))
    return [int(i) for i in torch.randperm(groups, generator=generator)]


def _mini_batch(
    policy: Policy,
    batch: TrainBatch,
    members: Sequence[int],
    settings: UpdateSettings,
    reference: Reference | None,
    metrics: UpdateMetrics,
    fresh: bool,
) -> None:
    chosen = set(members)
    weights_N = torch.zeros(len(batch.tokens_N))
    weights_N[list(members)] = losses.token_weights(
        batch.tokens_N[list(members)], settings.aggregation, settings.loss_scale
    )
    weights_N = weights_N.to(policy.device)
    rows = [r for r in batch.rows if r.episode in chosen]
    if settings.surrogate.marks_tokens:
        rows = marked_rows(rows, settings.surrogate)
    rows = [r for r in rows if settings.needs_every_row or any(r.advantages)]
    total, tried = torch.zeros(()), []
    for part in micro_batches(rows, settings.max_tokens, settings.max_rows):
        packed = pack(part, policy.device)
        loss_M = _loss(policy, packed, weights_N, settings, reference, metrics, fresh)
        loss_M.sum().backward()
        total = total + loss_M.detach().sum()
        tried.append(Tried(part, loss_M.detach()))
    if rows:
        metrics.grad_norms.append(policy.optimizer_step(tried))
    metrics.losses.append(total)


def _logprobs(policy: Policy, packed: PackedRows, settings: UpdateSettings) -> TokenLogprobs:
    found = token_logprobs(policy.model, packed, settings.temperature, entropy_gradient=settings.entropy_coeff != 0)
    if not (settings.deterministic and policy.device.type == "cuda"):
        return found
    exact_M = exact_logprobs(exact_decoder(policy.model), packed, settings.temperature)
    return found._replace(logp_M=with_value(found.logp_M, exact_M))


def _loss(
    policy: Policy,
    packed: PackedRows,
    weights_N: Tensor,
    settings: UpdateSettings,
    reference: Reference | None,
    metrics: UpdateMetrics,
    fresh: bool,
) -> Tensor:
    """What each sampled token adds to the loss of its mini-batch."""
    logp_M, entropy_M = _logprobs(policy, packed, settings)
    if fresh:
        metrics.add_mismatch(logp_M, packed.old_logp_M)
    tokens = Sampled(logp_M, packed.old_logp_M, packed.advantages_M, packed.row_M, packed.rows, packed.marked_M)
    surrogate = policy_loss(tokens, settings.surrogate)
    loss_M = surrogate.loss_M * packed.weights_M
    if settings.entropy_coeff:
        loss_M = loss_M - settings.entropy_coeff * entropy_M
    if reference is not None:
        kl_M = losses.kl_estimate(logp_M, reference(packed, settings.temperature), settings.kl_kind)
        loss_M = loss_M + settings.kl_coef * kl_M
        metrics.add(0, kl_loss=kl_M)
    metrics.add(
        logp_M.numel(),
        entropy=entropy_M,
        ppo_kl=packed.old_logp_M - logp_M.detach(),
        pg_clipfrac=surrogate.clipped_M,
        pg_clipfrac_lower=surrogate.clipped_lower_M,
    )
    return loss_M * weights_N[packed.episode_M]
