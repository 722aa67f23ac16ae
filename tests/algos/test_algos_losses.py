"""Every policy loss has the value and the gradient computed by hand."""

import math
from typing import Any

import pytest
import torch

from rally.algos.losses import SURROGATES, Sampled, SurrogateSettings, mark_tokens, policy_loss

E = math.exp


def objective(
    mode: str,
    ratios: list[float],
    advantages: list[float],
    rows: list[int],
    marked: list[bool] | None = None,
    **settings: Any,
) -> tuple[list[float], list[float]]:
    """Losses, and the gradient of their sum by the log-probabilities, where the old ones are all -1."""
    logp = (torch.tensor(ratios, dtype=torch.float64).log() - 1).requires_grad_()
    tokens = Sampled(
        logp,
        torch.full_like(logp, -1.0).detach(),
        torch.tensor(advantages, dtype=torch.float64),
        torch.tensor(rows),
        max(rows) + 1,
        torch.tensor(marked or [False] * len(ratios)),
    )
    loss_M = policy_loss(tokens, SurrogateSettings(mode=mode, **settings)).loss_M
    [gradient] = torch.autograd.grad(loss_M.sum(), logp)
    return loss_M.tolist(), gradient.tolist()


def near(values: list[float]) -> Any:
    return pytest.approx(values, abs=1e-9)


def test_gspo_takes_the_geometric_mean_of_a_row() -> None:
    # Row 0: ratios 2 and 1/2 have the mean 1, inside the clip. Row 1: 1.5 twice, held at 1.2. Row 2: the same for a bad
    # row is not clipped, because it must still fall.
    losses, gradient = objective("gspo", [2, 0.5, 1.5, 1.5, 1.5], [1, 1, 1, 1, -1], [0, 0, 1, 1, 2])
    assert losses == near([-1, -1, -1.2, -1.2, 1.5])
    assert gradient == near([-1, -1, 0, 0, 1.5])


@pytest.mark.parametrize("mode", ["geo_mean", "gmpo"])
def test_gmpo_clips_each_token_and_then_takes_the_mean(mode: str) -> None:
    # A good row with log-ratios 0.1 and 0.3, held at 0.2: the mean is 0.15, and the held token has no gradient. A bad
    # row with -0.1 and -0.3, held at -0.2.
    losses, gradient = objective(mode, [E(0.1), E(0.3), E(-0.1), E(-0.3)], [2, 2, -1, -1], [0, 0, 1, 1])
    assert losses == near([-2 * E(0.15), -2 * E(0.15), E(-0.15), E(-0.15)])
    assert gradient == near([-2 * E(0.15), 0, E(-0.15), 0])


def test_cispo_bounds_a_weight_and_drops_no_gradient() -> None:
    losses, gradient = objective("cispo", [2, 0.5, 1.1], [1, 1, -3], [0, 0, 0])
    assert gradient == near([-1.2, -0.8, 3.3])
    assert losses == near([-1.2 * (math.log(2) - 1), -0.8 * (math.log(0.5) - 1), 3.3 * (math.log(1.1) - 1)])


def test_sapo_is_the_policy_gradient_at_first_and_fades_out() -> None:
    losses, gradient = objective("sapo", [1, 1, 2], [2, -2, 1], [0, 0, 0], tau_positive=1.0, tau_negative=2.0)
    gate = 1 / (1 + E(-1))
    assert losses == near([-2 * 2, 2 * 1, -4 * gate])
    assert gradient == near([-2, 2, -4 * gate * (1 - gate) * 2])


def test_gpg_is_the_plain_policy_gradient() -> None:
    losses, gradient = objective("gpg", [3, 1], [2, -1], [0, 0])
    assert losses == near([-2 * (math.log(3) - 1), -1])
    assert gradient == near([-2, 1])


def test_clip_cov_takes_the_gradient_of_marked_tokens() -> None:
    losses, gradient = objective("clip_cov", [1.1, 1.1, 1.5], [2, 2, 2], [0, 0, 0], [False, True, False])
    assert losses == near([-2.2, 0, -2.4])
    assert gradient == near([-2.2, 0, 0])


def test_kl_cov_holds_marked_tokens_to_the_old_policy() -> None:
    losses, gradient = objective("kl_cov", [2, 2, 0.5], [1, 1, 1], [0, 0, 0], [False, True, True], marked_kl=0.3)
    assert losses == near([-2, -2 + 0.3 * math.log(2), -0.5 + 0.3 * math.log(2)])
    assert gradient == near([-2, -2 + 0.3, -0.5 - 0.3])


def test_tokens_are_marked_by_the_covariance_of_advantage_and_log_probability() -> None:
    # Means are 0, so the covariances are the products: 4, 1.5, -2, 0.5, 0, 0.
    advantages = torch.tensor([2.0, 1, -2, -1, 0, 0])
    logp = torch.tensor([2.0, 1.5, 1, -0.5, -2, -2])
    top = mark_tokens(logp, advantages, SurrogateSettings(mode="kl_cov", marked_share=0.34))
    assert top.tolist() == [True, True, False, False, False, False]
    settings = SurrogateSettings(mode="clip_cov", marked_share=0.9, covariance_low=1.0, covariance_high=3.0)
    assert mark_tokens(logp, advantages, settings).tolist() == [False, True, False, False, False, False]
    one = SurrogateSettings(mode="clip_cov", marked_share=0.2, covariance_low=-9, covariance_high=9)
    assert int(mark_tokens(logp, advantages, one).sum()) == 1


@pytest.mark.parametrize("mode", [*SURROGATES])
def test_on_policy_every_objective_is_the_policy_gradient(mode: str) -> None:
    """At a ratio of 1 its gradient is minus the advantage, and without advantage there is none."""
    _, gradient = objective(mode, [1, 1, 1], [2, 2, 2], [0, 0, 0])
    assert gradient == near([-2, -2, -2])
    assert objective(mode, [1, 1], [0, 0], [0, 0])[1] == near([0, 0])


@pytest.mark.parametrize("mode", [*SURROGATES])
def test_an_absurd_ratio_stays_finite(mode: str) -> None:
    losses, gradient = objective(mode, [1e300, 1e-300], [1, -1], [0, 1])
    assert all(map(math.isfinite, losses + gradient))


@pytest.mark.parametrize("mode", [*SURROGATES])
def test_a_row_does_not_see_its_neighbours(mode: str) -> None:
    together = objective(mode, [1.1, 0.7, 1.4], [1, 1, -2], [0, 0, 1])
    first, second = objective(mode, [1.1, 0.7], [1, 1], [0, 0]), objective(mode, [1.4], [-2], [0])
    assert together[0] == near(first[0] + second[0]) and together[1] == near(first[1] + second[1])
