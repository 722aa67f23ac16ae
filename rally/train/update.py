"""The policy update of one step: mini-batches, micro-batches, the loss, the optimizer step and their metrics.

The loss of a mini-batch does not depend on how it is divided into micro-batches: the weight of every token is fixed
before.

Shapes: M sampled tokens, N episodes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from rally.algos import losses
from rally.algos.distillation import DistillationSettings, distillation_loss
from rally.algos.losses import Sampled, SurrogateSettings, policy_loss
from rally.algos.off_policy_correction import CorrectionSettings
from rally.models.residence import on_device
from rally.models.routing import Routing, RoutingError, load_metrics, routers_of
from rally.models.sharding import Ranks, gather_groups
from rally.platforms import from_host, has_kernels
from rally.track.timing import Timed, untimed
from rally.train.batch import TrainBatch
from rally.train.divergence import DivergedError, Tried
from rally.train.forward.deterministic_logprobs import exact_decoder, exact_logprobs, with_value
from rally.train.forward.logprobs import LogitsFunction, TokenLogprobs, token_logprobs
from rally.train.forward.router_replay import fitted_row, recorded_rows
from rally.train.loss_inputs import corrected_rows, fresh_tokens, marked_rows, over_rows, recorded_logprobs
from rally.train.micro_batches import MicroBatchLimits, Round, in_order, micro_batches_for, parts_of, share_of
from rally.train.packing import PackedRows, Row
from rally.train.policy import Policy
from rally.train.rank_messages import ComputeReference, UpdatePolicy
from rally.train.reference import Reference
from rally.train.teacher import Teachers, TeacherView
from rally.types import RallyError


def probability_agreement(trained: Sequence[Tensor], recorded: Sequence[Tensor]) -> dict[str, float]:
    """Differences between the two probabilities of each token, and their correlation unless one of them is constant."""
    p_M, q_M = (torch.cat(list(parts)).double().exp() for parts in (trained, recorded))
    difference_M = (p_M - q_M).abs()
    metrics = {
        "training/rollout_probs_diff_mean": float(difference_M.mean()),
        "training/rollout_probs_diff_max": float(difference_M.max()),
        "training/rollout_probs_diff_std": float(difference_M.std(correction=0)),
    }
    correlation = float(torch.corrcoef(torch.stack([p_M, q_M]))[0, 1]) if len(p_M) > 1 else float("nan")
    return metrics | ({"training/rollout_actor_probs_pearson_corr": correlation} if correlation == correlation else {})


RouterReplayMode = Literal["disabled", "R2", "R3"]
"""The experts of the update: the router's own; those of a forward before the first update (R2); those of the rollout
(R3)."""


@dataclass(frozen=True, kw_only=True)
class UpdateSettings:
    """The objective, and the sizes of mini-batches and micro-batches."""

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
    log_prob_limits: MicroBatchLimits | None = None  # for old log-probabilities; None: as in the update
    reference_limits: MicroBatchLimits | None = None  # for the reference's log-probabilities; None: as in the update
    temperature: float = 1.0
    mismatch_limit: float | None = None  # of the KL (k3) between rollout and trainer, beyond which nothing is trained
    deterministic: bool = False  # compute log-probabilities with the kernels of a deterministic rollout
    shuffle_seed: int | None = None  # None: mini-batches in the order of the prompts
    router_replay: RouterReplayMode = "disabled"  # whose expert choices the update uses
    distillation: DistillationSettings | None = None  # None: no teachers

    @property
    def limits(self) -> MicroBatchLimits:
        return MicroBatchLimits(self.max_tokens, self.max_rows)

    @property
    def needs_every_row(self) -> bool:
        """Whether rows without advantage are computed too: a KL, entropy or distillation term gives them a gradient."""
        other = self.entropy_coeff != 0 or self.distillation is not None
        return self.kl_coef != 0 or other or self.surrogate.needs_every_row


@dataclass
class UpdateMetrics:
    """Sums over tokens, divided at the end. They stay on the device, so that adding to them does not synchronize."""

    sums: dict[str, Tensor] = field(default_factory=dict)
    tokens: int = 0
    grad_norms: list[float] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    trained: list[Tensor] = field(default_factory=list)
    recorded: list[Tensor] = field(default_factory=list)
    routing: Routing = field(default_factory=Routing)
    corrections: list[dict[str, float]] = field(default_factory=list)

    def add(self, result: MicroBatchResult, *, fresh: Tensor | None, counts: bool) -> None:
        """Add a micro-batch. `fresh`: which of its tokens were sampled with the weights that it was computed with; None
        is none."""
        limit = None if counts else 0
        self.tokens += result.logp_M[:limit].numel()
        for name, values_M in result.values.items():
            total = values_M.detach()[:limit].sum(dtype=torch.float64)
            self.sums[name] = self.sums[name] + total if name in self.sums else total
        if counts and result.routing is not None:
            self.routing.add(result.routing)
        if fresh is not None:
            chosen = _index(fresh, result.logp_M.device)
            self.trained.append(result.logp_M[chosen][:limit])
            self.recorded.append(result.recorded_M[chosen][:limit])

    def result(self, ranks: Ranks) -> dict[str, float]:
        """The metrics over all ranks, which have run the same mini-batches."""
        mine = torch.tensor(
            [self.tokens, *map(float, self.losses), *map(float, self.sums.values())], dtype=torch.float64
        )
        tokens, *rest = sum(gather_groups(ranks, mine), torch.zeros_like(mine)).tolist()
        names = [name if "/" in name else f"actor/{name}" for name in self.sums]
        means = {name: v / max(1, tokens) for name, v in zip(names, rest[len(self.losses) :], strict=True)}
        means["actor/pg_loss"] = sum(rest[: len(self.losses)]) / max(1, len(self.losses))
        if self.grad_norms:
            means["actor/grad_norm"] = sum(self.grad_norms) / len(self.grad_norms)
        if self.trained:
            compared = [torch.cat(gather_groups(ranks, torch.cat(x))) for x in (self.trained, self.recorded)]
            means |= _mismatch(*compared) if len(compared[0]) else {}
        means |= {k: sum(one[k] for one in self.corrections) / len(self.corrections) for k in self.correction_names}
        means["actor/trained_tokens"] = tokens
        return means | self._routing_metrics(ranks)

    @property
    def correction_names(self) -> list[str]:
        """The metrics of a correction per mini-batch. The mismatch is that of the first one."""
        return [name for name in (self.corrections or [{}])[0] if name.startswith("rollout_corr/")]

    def _routing_metrics(self, ranks: Ranks) -> dict[str, float]:
        loads = [self.routing.counts[number].double().cpu() for number in sorted(self.routing.counts)]
        changed = float(self.routing.changed) if self.routing.changed is not None else 0.0
        mine = torch.cat([torch.tensor([changed, self.routing.decided], dtype=torch.float64), *loads])
        # every rank has tokens of its own; one whose micro-batches do not count has no loads
        total = torch.zeros_like(mine)
        for numbers in ranks.all_gather(mine):
            total[: len(numbers)] += numbers[: len(total)]
        metrics = load_metrics(dict(enumerate(total[2:].split([len(load) for load in loads])))) if loads else {}
        if total[1]:
            metrics["actor/router_replay_changed"] = float(total[0] / total[1])
        return metrics


def _index(chosen: Tensor, device: torch.device) -> slice | Tensor:
    """The index of the chosen tokens, given by a mask in main memory. A mask on the device would have the host wait for
    the whole micro-batch, and the device then for the next one to be packed."""
    known = chosen.numpy()
    return slice(None) if known.all() else from_host(torch.from_numpy(np.flatnonzero(known)), device)


class MicroBatchResult(NamedTuple):
    """Log-probabilities now and as recorded by the rollout, values to average over tokens, and the expert choices."""

    logp_M: Tensor
    recorded_M: Tensor
    values: dict[str, Tensor]
    routing: Routing | None = None


class MicroBatchLoss(NamedTuple):
    loss_M: Tensor
    result: MicroBatchResult


class MismatchError(RallyError):
    """The rollout's log-probabilities cannot be those of the policy that is trained."""


def _check_mismatch(trained: Sequence[Tensor], recorded: Sequence[Tensor], limit: float | None, ranks: Ranks) -> None:
    """Raise MismatchError before anything is trained. All ranks raise it or none does."""
    if limit is None:
        return
    trained_M, recorded_M = (torch.cat([torch.zeros(0), *(x.float().cpu() for x in xs)]) for xs in (trained, recorded))
    k3 = float(losses.kl_estimate(recorded_M, trained_M, "k3").sum(dtype=torch.float64))
    mine = torch.tensor([len(trained_M), k3, trained_M.sum(), recorded_M.sum()], dtype=torch.float64)
    tokens, k3, trained_sum, recorded_sum = sum(gather_groups(ranks, mine), torch.zeros_like(mine)).tolist()
    if tokens and k3 / tokens > limit:  # a NaN is a matter of the gradient
        raise MismatchError(
            f"the sampled tokens have a mean log-probability of {recorded_sum / tokens:.3f} in the rollout and of "
            f"{trained_sum / tokens:.3f} in the trainer, a KL of {k3 / tokens:.3g} over {tokens:.0f} tokens, over "
            f"rollout.mismatch_limit={limit:g}; the rollout did not sample from this policy, so nothing was trained on "
            "it. Check who can reach the rollout servers, and the dtype and temperature on both sides"
        )


def _mismatch(trained_M: Tensor, recorded_M: Tensor) -> dict[str, float]:
    """How far the rollout's log-probabilities are from the trainer's on the same weights."""
    k3_M = losses.kl_estimate(recorded_M, trained_M, "k3")
    return {
        "actor/rollout_mismatch_kl": float(k3_M.mean()),
        "actor/rollout_mismatch_max": float((trained_M - recorded_M).abs().max()),
        **probability_agreement([trained_M], [recorded_M]),
    }


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
    teachers: Teachers | None = None,
    progress: Callable[[], None] = lambda: None,
    timed: Timed = untimed,
) -> dict[str, float]:
    """Run all mini-batches of one training step and return its metrics. Only rank 0 needs the rows of the batch."""
    assert (reference is not None) == (settings.kl_coef != 0), "a reference policy comes with a KL coefficient"
    assert (teachers is not None) == (settings.distillation is not None), "teachers come with a distillation loss"
    metrics = UpdateMetrics()
    correction: dict[str, float] = {}
    message = UpdatePolicy(replace(batch, rows=[]), step, torch.initial_seed())
    with policy.ranks.broadcast(message), on_device(policy.model):
        if settings.router_replay != "disabled":
            with timed("router_replay"):
                batch = replace(batch, rows=_routed_rows(policy, batch.rows, settings))
        if settings.correction.per_step:
            with timed("old_log_prob"):
                batch, correction = _corrected(policy, batch, settings)
        with policy.training(0 if teachers is None else teachers.largest_resting):
            for epoch in range(settings.epochs):
                order = visit_order(batch.num_groups, settings.shuffle_seed, step, epoch)
                for number, members in enumerate(batch.mini_batches(settings.mini_batch_groups, order)):
                    fresh = epoch == number == 0 and not settings.correction.per_step  # which measures the mismatch
                    _mini_batch(policy, batch, members, settings, reference, teachers, metrics, fresh=fresh)
                    progress()
        rate = policy.optimizer.param_groups[0]["lr"]
        policy.advance()
        return {**metrics.result(policy.ranks), **correction, **policy.recomputed(), "actor/lr": rate}


def _routed_rows(policy: Policy, rows: Sequence[Row], settings: UpdateSettings) -> list[Row]:
    """The rows with the expert choices that the update uses."""
    routers = routers_of(policy.model)
    if not routers:
        raise RoutingError(
            f"{type(policy.model).__name__} has no routers whose choices can be replayed; set "
            "actor.router_replay.mode=disabled"
        )
    if settings.router_replay == "R2":
        return recorded_rows(policy.model, rows, settings.log_prob_limits or settings.limits, settings.temperature)
    missing = sum(row.routes is None or len(row.routes) < len(row.inputs) for row in rows)
    if missing:
        raise RoutingError(
            f"the rollout returned no expert choices for {missing} of {len(rows)} rows; start the servers with "
            "--enable-return-routed-experts, or set actor.router_replay.mode=R2"
        )
    layers = policy.model.config.get_text_config().num_hidden_layers
    return [fitted_row(row, routers, layers) for row in rows]


def _corrected(policy: Policy, batch: TrainBatch, settings: UpdateSettings) -> CorrectedBatch:
    """The batch with the trainer's own log-probabilities as the old ones, and with importance weights."""
    logp_M = _present_logprobs(policy, batch.rows, settings)
    recorded_M = recorded_logprobs(batch.rows)
    fresh_M = fresh_tokens(batch.rows)
    _check_mismatch([logp_M[fresh_M]], [recorded_M[fresh_M]], settings.mismatch_limit, policy.ranks)
    rows, metrics = corrected_rows(batch.rows, logp_M, settings.correction)
    return CorrectedBatch(replace(batch, rows=rows), metrics)


def _present_logprobs(policy: Policy, rows: Sequence[Row], settings: UpdateSettings) -> Tensor:
    """The policy's log-probability of each sampled token of the rows, without a gradient."""

    def forward(packed: PackedRows) -> Tensor:
        return _logprobs(policy, packed, settings, _routing(policy, packed, settings)).logp_M

    return over_rows(rows, forward, policy.device, settings.log_prob_limits or settings.limits, policy.ranks)


def token_energies(policy: Policy, rows: Sequence[Row], settings: UpdateSettings) -> Tensor:
    """1 - 2 p + sum(p^2) of each sampled token, with the probabilities of the policy over the vocabulary."""

    def squares(logits_XV: Tensor, at: slice) -> Tensor:
        return torch.softmax(logits_XV, -1).square().sum(-1, keepdim=True)

    def forward(packed: PackedRows) -> Tensor:
        found = _logprobs(policy, packed, settings, _routing(policy, packed, settings), squares)
        assert found.columns_M is not None
        return 1 - 2 * found.logp_M.exp() + found.columns_M[:, 0]

    with on_device(policy.model):
        return over_rows(rows, forward, policy.device, settings.log_prob_limits or settings.limits, policy.ranks)


def reference_logprobs(policy: Policy, reference: Reference, rows: Sequence[Row], settings: UpdateSettings) -> Tensor:
    """The reference's log-probability of each sampled token of the rows."""

    def forward(packed: PackedRows) -> Tensor:
        return reference(packed, settings.temperature)

    with policy.ranks.broadcast(ComputeReference()), on_device(policy.model):
        return over_rows(rows, forward, policy.device, settings.reference_limits or settings.limits, policy.ranks)


def visit_order(groups: int, seed: int | None, step: int, epoch: int) -> list[int]:
    """The order in which groups are visited, a pure function of (seed, step, epoch)."""
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
    teachers: Teachers | None,
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
    if settings.correction.per_mini_batch:
        rows, measured = corrected_rows(rows, _present_logprobs(policy, rows, settings), settings.correction)
        metrics.corrections.append(measured)
    rows = [r for r in rows if settings.needs_every_row or r.advantages.any()]
    total, tried = torch.zeros(()), []
    apart = [rows] if teachers is None else teachers.by_teacher(rows)
    rounds = [one for some in apart for one in micro_batches_for(policy.ranks, some, settings.limits)]
    shares = share_of(policy.ranks, rounds)
    for part in shares:
        packed = policy.pack(part.rows, 0 if teachers is None else teachers.chunks)
        view = None if teachers is None else teachers(packed, part.rows)
        loss_M, result = _loss(policy, packed, weights_N, settings, reference, view)
        (loss_M.sum() * part.counts).backward()
        metrics.add(result, fresh=fresh_tokens(part.rows) if fresh else None, counts=part.counts)
        if part.counts:
            total = total + loss_M.detach().sum()
            tried.append(Tried(part.rows, loss_M.detach()))
    if fresh:
        _check_mismatch(metrics.trained, metrics.recorded, settings.mismatch_limit, policy.ranks)
    if shares:
        metrics.grad_norms.append(take_step(policy, rounds, tried))
    metrics.losses.append(total)


def take_step(policy: Policy, rounds: Sequence[Round], tried: Sequence[Tried]) -> float:
    """Take an optimizer step. All ranks take it or none does, because they see the same norm. On rank 0, the error for
    a diverged gradient holds the rows and losses of all ranks."""
    try:
        return policy.optimizer_step(tried)
    except DivergedError as error:
        mine_M = torch.cat([torch.zeros(0), *(part.loss_M.float().cpu() for part in tried)])
        losses_of_parts = in_order(policy.ranks, rounds, mine_M)
        raise DivergedError(error.problem, list(map(Tried, parts_of(rounds), losses_of_parts))) from None


def _routing(policy: Policy, packed: PackedRows, settings: UpdateSettings) -> Routing | None:
    if not routers_of(policy.model):
        return None
    return Routing(replay_TLk=None if settings.router_replay == "disabled" else packed.routes_TLk)


def _logprobs(
    policy: Policy,
    packed: PackedRows,
    settings: UpdateSettings,
    routing: Routing | None,
    of_logits: LogitsFunction | None = None,
) -> TokenLogprobs:
    tokens = token_logprobs(
        policy.model,
        packed,
        settings.temperature,
        entropy_gradient=settings.entropy_coeff != 0,
        routing=routing,
        of_logits=of_logits,
    )
    if not (settings.deterministic and has_kernels(policy.device)):
        return tokens
    exact_M = exact_logprobs(exact_decoder(policy.model), packed, settings.temperature)
    return tokens._replace(logp_M=with_value(tokens.logp_M, exact_M))


def _loss(
    policy: Policy,
    packed: PackedRows,
    weights_N: Tensor,
    settings: UpdateSettings,
    reference: Reference | None,
    teacher: TeacherView | None,
) -> MicroBatchLoss:
    """The contribution of each sampled token to the loss of its mini-batch."""
    routing = _routing(policy, packed, settings)
    found = _logprobs(policy, packed, settings, routing, None if teacher is None else teacher.of_logits)
    logp_M, entropy_M, _ = found
    tokens = Sampled(logp_M, packed.old_logp_M, packed.advantages_M, packed.row_M, packed.rows, packed.marked_M)
    surrogate = policy_loss(tokens, settings.surrogate)
    loss_M = surrogate.loss_M * packed.weights_M
    if settings.entropy_coeff:
        loss_M = loss_M - settings.entropy_coeff * entropy_M
    values = {
        "entropy": entropy_M,
        "ppo_kl": packed.old_logp_M - logp_M.detach(),
        "pg_clipfrac": surrogate.clipped_M,
        "pg_clipfrac_lower": surrogate.clipped_lower_M,
        **surrogate.values,
    }
    if reference is not None:
        kl_M = losses.kl_estimate(logp_M, reference(packed, settings.temperature), settings.kl_kind)
        loss_M = loss_M + settings.kl_coef * kl_M
        values["kl_loss"] = kl_M
    if teacher is not None and settings.distillation is not None:
        distilled = _distilled(found, packed, teacher, settings.distillation)
        with_rewards = settings.distillation.with_rewards
        loss_M = loss_M + settings.distillation.coefficient * distilled.loss_M if with_rewards else distilled.loss_M
        values |= distilled.values
    result = MicroBatchResult(logp_M.detach(), packed.old_logp_M, values, routing)
    return MicroBatchLoss(loss_M * weights_N[packed.episode_M], result)


class _Distilled(NamedTuple):
    loss_M: Tensor
    values: dict[str, Tensor]


def _distilled(
    tokens: TokenLogprobs, packed: PackedRows, teacher: TeacherView, settings: DistillationSettings
) -> _Distilled:
    """The distillation loss of each sampled token, and its metrics."""
    logp_M, columns_M = tokens.logp_M, tokens.columns_M
    if teacher.divergence is not None:
        divergence_M, others = teacher.divergence(logp_M), {}
    else:
        assert columns_M is not None
        divergence_M = columns_M[:, 0]
        others = {f"distillation/{name}": columns_M[:, i] for i, name in enumerate(teacher.columns, 1)}
    loss_M, clipped_M = distillation_loss(divergence_M, logp_M, packed.old_logp_M, packed.weights_M, settings)
    values = {"distillation/loss": loss_M, "distillation/divergence": divergence_M, **others}
    values["distillation/abs_loss"] = divergence_M.abs()
    if settings.policy_gradient:
        values["distillation/pg_clipfrac"] = clipped_M
    return _Distilled(loss_M, values)
