"""Losses of on-policy distillation: how far the student is from its teacher at the tokens that the student sampled.

Pure tensor functions. A mode is one of verl's estimators from the sampled token alone (`ESTIMATORS`), the forward KL
over the teacher's most likely tokens (`TOPK`), or a divergence over the whole vocabulary (`FULL`).

Shapes: M sampled tokens, U positions, K tokens of the teacher's top, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from rally.algos.losses import clipped_policy_loss, kl_estimate

ESTIMATORS = ("kl", "k1", "abs", "mse", "k2", "low_var_kl", "k3")
TOPK = "forward_kl_topk"
FULL = ("forward_kl_full", "reverse_kl_full", "jsd_full")


@dataclass(frozen=True, kw_only=True)
class DistillationSettings:
    """The loss between student and teacher, and how it enters the objective."""

    mode: str = "k3"
    topk: int = 32
    with_rewards: bool = True  # False: the policy loss, its entropy and its KL are left out
    coefficient: float = 1.0  # beside the policy loss
    max_loss: float | None = None  # bounds the loss of a token, on both sides
    min_logp: float | None = None  # forward_kl_topk: log-probabilities are raised to this
    policy_gradient: bool = False  # the negative loss is the advantage of its token
    low: float = 0.2  # the clip of that policy gradient
    high: float = 0.2
    dual: float = 3.0
    beta: float = 0.5  # jsd_full: the teacher's share of the mixture

    @property
    def reads_logits(self) -> bool:
        """Whether the loss needs more of the student than the log-probability of the sampled token."""
        return self.mode not in ESTIMATORS

    @property
    def chunks(self) -> int:
        """How often the divergence holds a chunk of the policy's logits in float32, in both passes. Measured."""
        if self.mode in FULL:
            return 8 if self.mode == "jsd_full" else 5
        return int(self.mode == TOPK)


class TopkLoss(NamedTuple):
    """The forward KL over the teacher's top K, the mass of both on these tokens, and the share of them that is also
    among the student's top K."""

    loss_U: Tensor
    student_mass_U: Tensor
    teacher_mass_U: Tensor
    overlap_U: Tensor


def topk_forward_kl(
    logits_UV: Tensor, teacher_ids_UK: Tensor, teacher_logp_UK: Tensor, floor: float | None = None
) -> TopkLoss:
    """sum p (log p - log q) over the teacher's top K. Neither side sums to 1 there, so the sum may be negative; it is
    then 0, as in verl."""
    logp_UK = logits_UV.gather(1, teacher_ids_UK) - torch.logsumexp(logits_UV, -1, keepdim=True)
    student_mass_U, teacher_mass_U = logp_UK.detach().exp().sum(-1), teacher_logp_UK.exp().sum(-1)
    if floor is not None:
        logp_UK, teacher_logp_UK = logp_UK.clamp_min(floor), teacher_logp_UK.clamp_min(floor)
    loss_U = (teacher_logp_UK.exp() * (teacher_logp_UK - logp_UK)).sum(-1).clamp_min(0.0)
    own_UK = logits_UV.detach().topk(teacher_ids_UK.shape[1]).indices
    overlap_U = torch.stack([(ids_U[:, None] == own_UK).any(-1) for ids_U in teacher_ids_UK.unbind(1)]).float().mean(0)
    return TopkLoss(loss_U, student_mass_U, teacher_mass_U, overlap_U)


def full_divergence(logits_UV: Tensor, teacher_logits_UV: Tensor, mode: str, beta: float = 0.5) -> Tensor:
    """The divergence [U] between student and teacher over the tokens that both have: forward_kl_full is
    KL(teacher || student), reverse_kl_full KL(student || teacher), jsd_full the Jensen-Shannon divergence of the
    mixture beta * teacher + (1 - beta) * student."""
    vocabulary = min(logits_UV.shape[1], teacher_logits_UV.shape[1])
    student, teacher = (torch.log_softmax(x[:, :vocabulary], -1) for x in (logits_UV, teacher_logits_UV))
    if mode == "forward_kl_full":
        return _kl(teacher, student)
    if mode == "reverse_kl_full":
        return _kl(student, teacher)
    if mode == "jsd_full":
        shares = torch.tensor([beta, 1 - beta], device=student.device).log()
        mixture = torch.logaddexp(teacher + shares[0], student + shares[1])
        return beta * _kl(teacher, mixture) + (1 - beta) * _kl(student, mixture)
    raise ValueError(f"unknown divergence {mode!r}; use {', '.join(FULL)}")


def _kl(logp_UV: Tensor, logq_UV: Tensor) -> Tensor:
    return (logp_UV.exp() * (logp_UV - logq_UV)).sum(-1)


def sampled_divergence(logp_M: Tensor, teacher_logp_M: Tensor, mode: str) -> Tensor:
    """An estimate of KL(student || teacher) from the sampled token alone."""
    assert mode in ESTIMATORS, f"{mode} needs more than the sampled token"
    return kl_estimate(logp_M, teacher_logp_M, mode)


class DistillationLoss(NamedTuple):
    """The loss of each token, and which tokens are clipped by the policy gradient."""

    loss_M: Tensor
    clipped_M: Tensor


def distillation_loss(
    divergence_M: Tensor, logp_M: Tensor, old_logp_M: Tensor, weights_M: Tensor, settings: DistillationSettings
) -> DistillationLoss:
    """The divergence of each token as a loss, or as the negative advantage of a clipped policy gradient. `weights_M`
    are the importance weights of the policy gradient."""
    if settings.max_loss is not None:
        divergence_M = divergence_M.clamp(-settings.max_loss, settings.max_loss)
    if not settings.policy_gradient:
        return DistillationLoss(divergence_M, torch.zeros_like(divergence_M, dtype=torch.bool))
    loss = clipped_policy_loss(
        logp_M, old_logp_M, -divergence_M.detach(), low=settings.low, high=settings.high, dual=settings.dual
    )
    return DistillationLoss(loss.loss_M * weights_M, loss.clipped_M)
