"""The losses of distillation equal their definitions over the whole vocabulary, in value and gradient."""

import math

import pytest
import torch
from torch import Tensor

from rally.algos.distillation import (
    ESTIMATORS,
    DistillationSettings,
    distillation_loss,
    full_divergence,
    sampled_divergence,
    topk_forward_kl,
)

U, V = 7, 13


@pytest.fixture
def student() -> Tensor:
    return torch.randn(U, V, generator=torch.Generator().manual_seed(0), dtype=torch.float64).requires_grad_()


@pytest.fixture
def teacher() -> Tensor:
    return 2 * torch.randn(U, V, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def dense(mode: str, student: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """The divergences from probabilities, written out."""
    q, p = student.softmax(-1), teacher.softmax(-1)
    if mode == "forward_kl_full":
        return (p * (p / q).log()).sum(-1)
    if mode == "reverse_kl_full":
        return (q * (q / p).log()).sum(-1)
    m = beta * p + (1 - beta) * q
    return beta * (p * (p / m).log()).sum(-1) + (1 - beta) * (q * (q / m).log()).sum(-1)


@pytest.mark.parametrize("mode", ["forward_kl_full", "reverse_kl_full", "jsd_full"])
def test_divergences_over_the_vocabulary_have_the_value_and_gradient_of_their_definition(
    mode: str, student: Tensor, teacher: Tensor
) -> None:
    found, expected = full_divergence(student, teacher, mode, beta=0.3), dense(mode, student, teacher, 0.3)
    assert torch.allclose(found, expected)
    (gradient,), (right,) = (torch.autograd.grad(x.sum(), student) for x in (found, expected))
    assert torch.allclose(gradient, right) and float(right.abs().max()) > 1e-3


def test_a_teacher_with_a_larger_vocabulary_is_compared_on_the_common_tokens(student: Tensor, teacher: Tensor) -> None:
    wider = torch.cat([teacher, torch.full((U, 3), 50.0, dtype=torch.float64)], 1)
    assert torch.allclose(
        full_divergence(student, wider, "reverse_kl_full"), full_divergence(student, teacher, "reverse_kl_full")
    )


def test_the_top_of_all_tokens_is_the_whole_forward_kl(student: Tensor, teacher: Tensor) -> None:
    logp, ids = teacher.log_softmax(-1).topk(V)
    found = topk_forward_kl(student, ids, logp)
    expected = dense("forward_kl_full", student, teacher, 0.5)
    assert torch.allclose(found.loss_U, expected)
    (gradient,), (right,) = (torch.autograd.grad(x.sum(), student) for x in (found.loss_U, expected))
    assert torch.allclose(gradient, right)
    for mass in (found.student_mass_U, found.teacher_mass_U, found.overlap_U):
        assert torch.allclose(mass.double(), torch.ones(U, dtype=torch.float64))


def test_the_top_tokens_are_the_teachers(student: Tensor, teacher: Tensor) -> None:
    logp, ids = teacher.log_softmax(-1).topk(3)
    found = topk_forward_kl(student, ids, logp, floor=-2.0)
    own = student.detach().log_softmax(-1)
    for u in range(U):
        expected = 0.0
        for k in range(3):
            p, q = max(float(logp[u, k]), -2.0), max(float(own[u, ids[u, k]]), -2.0)
            expected += math.exp(p) * (p - q)
        assert float(found.loss_U[u].detach()) == pytest.approx(max(0.0, expected))
        assert float(found.teacher_mass_U[u]) == pytest.approx(float(logp[u].exp().sum()))
        top = set(own[u].topk(3).indices.tolist())
        assert float(found.overlap_U[u]) == pytest.approx(len(top & set(ids[u].tolist())) / 3)


@pytest.mark.parametrize("mode", ["k1", "k3"])
def test_unbiased_estimators_average_to_the_reverse_kl(mode: str, student: Tensor, teacher: Tensor) -> None:
    teacher = student.detach() + 0.3 * teacher  # the bound of 10 on k3 is not reached
    logq, logp = student.detach().log_softmax(-1), teacher.log_softmax(-1)
    mean = (logq.exp() * sampled_divergence(logq, logp, mode)).sum(-1)  # over every token that could be sampled
    assert torch.allclose(mean, dense("reverse_kl_full", student, teacher, 0.5), atol=1e-3)


def test_every_estimator_of_verl_is_zero_where_both_agree() -> None:
    logp = torch.tensor([-0.1, -3.0])
    for mode in ESTIMATORS:
        assert torch.equal(sampled_divergence(logp, logp, mode), torch.zeros(2))


def test_the_bound_holds_on_both_sides_and_the_policy_gradient_uses_the_negative_loss() -> None:
    divergence = torch.tensor([5.0, -5.0, 0.5])
    logp = torch.tensor([-1.0, -1.0, -1.0], requires_grad=True)
    ones = torch.ones(3)
    plain = distillation_loss(divergence, logp, logp.detach(), ones, DistillationSettings(max_loss=2.0))
    assert plain.loss_M.tolist() == [2.0, -2.0, 0.5]
    weights = torch.tensor([1.0, 1.0, 0.0])
    pg = DistillationSettings(mode="k1", max_loss=2.0, policy_gradient=True)
    distillation_loss(divergence, logp, logp.detach(), weights, pg).loss_M.sum().backward()
    assert logp.grad is not None
    assert logp.grad.tolist() == [2.0, -2.0, 0.0]  # the advantages, negated, times the weights
