"""Policy losses equal values computed by hand, and a token's weight does not depend on the split into micro-batches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rally.algos import losses


def clipped(ratio: float, advantage: float, dual: float = 3.0) -> tuple[float, float, bool, bool]:
    """Loss, its gradient by the log-probability, and what was clipped, of one token; clip 0.2 low and 0.3 high."""
    logp = torch.tensor([math.log(ratio)], dtype=torch.float64, requires_grad=True)
    old, advantages = torch.zeros(1, dtype=torch.float64), torch.tensor([advantage], dtype=torch.float64)
    found = losses.clipped_policy_loss(logp, old, advantages, low=0.2, high=0.3, dual=dual)
    [gradient] = torch.autograd.grad(found.loss_M.sum(), logp)
    return found.loss_M.item(), gradient.item(), bool(found.clipped_M), bool(found.clipped_lower_M)


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "gradient", "held", "held_lower"),
    [
        (1.0, 2.0, -2.0, -2.0, False, False),  # on policy: the plain policy gradient
        (1.1, 2.0, -2.2, -2.2, False, False),  # inside the clip
        (1.5, 2.0, -2.6, 0.0, True, False),  # a good token raised enough: held at 1.3
        (0.5, 2.0, -1.0, -1.0, False, False),  # a good token that fell is still raised
        (0.9, -2.0, 1.8, 1.8, False, False),  # inside the clip
        (0.5, -2.0, 1.6, 0.0, True, False),  # a bad token lowered enough: held at 0.8
        (1.5, -2.0, 3.0, 3.0, False, False),  # a bad token that rose is still lowered
        (5.0, -2.0, 6.0, 0.0, False, True),  # but not without bound: the dual clip holds at 3 times the advantage
        (5.0, 2.0, -2.6, 0.0, True, False),  # the dual clip is for negative advantages alone
    ],
)
def test_the_clipped_objective(
    ratio: float, advantage: float, loss: float, gradient: float, held: bool, held_lower: bool
) -> None:
    found = clipped(ratio, advantage)
    assert found[:2] == pytest.approx((loss, gradient))
    assert found[2:] == (held, held_lower)


def test_the_dual_clip_is_where_it_is_asked_to_be() -> None:
    assert clipped(5.0, -2.0, dual=10.0)[:2] == pytest.approx((10.0, 10.0))


def test_a_token_without_advantage_has_no_gradient() -> None:
    assert clipped(1.1, 0.0)[1] == 0


def test_an_absurd_ratio_stays_finite() -> None:
    found = losses.clipped_policy_loss(torch.tensor([0.0]), torch.tensor([-1e4]), torch.ones(1), low=0.2, high=0.2)
    assert torch.isfinite(found.loss_M).all()


@pytest.mark.parametrize(
    ("kind", "value", "slope"),
    [
        ("k1", 0.5, 1.0),
        ("kl", 0.5, 1.0),
        ("abs", 0.5, 1.0),
        ("k2", 0.125, 0.5),
        ("mse", 0.125, 0.5),
        ("k3", math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5)),
        ("low_var_kl", math.exp(-0.5) + 0.5 - 1, 1 - math.exp(-0.5)),
        ("k1+", 0.5, 0.5),
        ("k3+", math.exp(-0.5) + 0.5 - 1, 0.5),
    ],
)
def test_each_kl_estimate_for_a_log_ratio_of_one_half(kind: str, value: float, slope: float) -> None:
    logp = torch.tensor([-1.0], dtype=torch.float64, requires_grad=True)
    found = losses.kl_estimate(logp, torch.tensor([-1.5], dtype=torch.float64), kind)
    assert found.item() == pytest.approx(value)
    assert torch.autograd.grad(found.sum(), logp)[0].item() == pytest.approx(slope)


def test_k3_is_the_kl_on_average_and_never_negative() -> None:
    policy, reference = torch.tensor([0.7, 0.2, 0.1]), torch.tensor([0.4, 0.4, 0.2])
    exact = (policy * (policy / reference).log()).sum()
    estimates = losses.kl_estimate(policy.log(), reference.log(), "k3")
    assert (estimates >= 0).all()
    assert (policy * estimates).sum().item() == pytest.approx(exact.item(), rel=1e-5)


def test_an_unknown_kl_estimate_is_named() -> None:
    with pytest.raises(ValueError, match="unknown KL estimator 'k4'; use k1"):
        losses.kl_estimate(torch.zeros(1), torch.zeros(1), "k4")


@pytest.mark.parametrize(
    ("mode", "weights"),
    [
        ("token-mean", [1 / 6, 1 / 6, 1 / 6]),
        ("seq-mean-token-sum", [1 / 3, 1 / 3, 1 / 3]),
        ("seq-mean-token-mean", [1 / 3, 1 / 6, 1 / 9]),
        ("seq-mean-token-sum-norm", [1 / 30, 1 / 30, 1 / 30]),
    ],
)
def test_the_weight_of_a_token_in_episodes_of_one_two_and_three(mode: losses.Aggregation, weights: list[float]) -> None:
    assert losses.token_weights(torch.tensor([1, 2, 3]), mode, 10.0).tolist() == pytest.approx(weights)


lengths = st.lists(st.integers(1, 500), min_size=1, max_size=20)


@given(lengths, st.sampled_from(["token-mean", "seq-mean-token-mean"]))
def test_where_the_loss_is_a_mean_all_weights_sum_to_one(tokens: list[int], mode: losses.Aggregation) -> None:
    counts = torch.tensor(tokens)
    assert float((losses.token_weights(counts, mode) * counts).sum()) == pytest.approx(1, rel=1e-5)


@given(lengths, st.sampled_from(["seq-mean-token-sum", "seq-mean-token-sum-norm"]), st.integers(1, 1000))
def test_where_tokens_are_summed_the_weights_sum_to_the_mean_length(
    tokens: list[int], mode: losses.Aggregation, scale: int
) -> None:
    counts, divisor = torch.tensor(tokens), scale if mode == "seq-mean-token-sum-norm" else 1
    total = float((losses.token_weights(counts, mode, scale) * counts).sum())
    assert total == pytest.approx(sum(tokens) / len(tokens) / divisor, rel=1e-5)


@given(
    lengths,
    st.integers(0, 20),
    st.sampled_from(["token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm"]),
)
def test_a_loss_is_the_same_number_however_its_episodes_are_split(
    tokens: list[int], at: int, mode: losses.Aggregation
) -> None:
    counts = torch.tensor(tokens)
    generator = torch.Generator().manual_seed(sum(tokens))
    loss_M = torch.randn(sum(tokens), generator=generator, dtype=torch.float64)
    weight_M = losses.token_weights(counts, mode, 7.0).double().repeat_interleave(counts)
    spec = {  # the definition: means and sums over whole episodes
        "token-mean": lambda parts: loss_M.mean(),
        "seq-mean-token-sum": lambda parts: sum(p.sum() for p in parts) / len(parts),
        "seq-mean-token-mean": lambda parts: sum(p.mean() for p in parts) / len(parts),
        "seq-mean-token-sum-norm": lambda parts: sum(p.sum() / 7.0 for p in parts) / len(parts),
    }[mode](loss_M.split(tokens))
    cut = sum(tokens[:at])
    first, second = (loss_M * weight_M)[:cut].sum(), (loss_M * weight_M)[cut:].sum()
    assert (first + second).item() == pytest.approx(float(spec), rel=1e-4, abs=1e-5)


def test_an_episode_without_tokens_is_no_division_by_zero() -> None:
    for mode in ("token-mean", "seq-mean-token-mean"):
        assert torch.isfinite(losses.token_weights(torch.tensor([0, 0]), mode)).all()


def test_an_unknown_aggregation_is_named() -> None:
    with pytest.raises(ValueError, match="unknown loss_agg_mode 'median'"):
        losses.token_weights(torch.ones(1), "median")  # type: ignore[arg-type]
