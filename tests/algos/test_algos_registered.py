"""Losses and estimators of a user's module are tried before training, and refused if they cannot be trained with."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from rally.algos import credit_assignment, losses
from rally.algos.credit_assignment import (
    CreditSettings,
    EstimatorError,
    Scored,
    check_estimator,
    register_adv_estimator,
    register_token_estimator,
    token_advantages,
)
from rally.algos.losses import (
    PolicyLoss,
    PolicyLossError,
    Sampled,
    SurrogateSettings,
    check_policy_loss,
    policy_loss,
    register_policy_loss,
)
from rally.config.actor import LOSS_MODES
from rally.config.algorithm import ESTIMATORS as ESTIMATOR_NAMES

MINE = SurrogateSettings(mode="mine")
pytestmark = pytest.mark.usefixtures("own_objectives")


def test_the_configuration_knows_the_names_of_all_functions() -> None:
    assert set(LOSS_MODES) == losses.BUILT_IN
    assert set(ESTIMATOR_NAMES) == credit_assignment.BUILT_IN


def test_a_registered_loss_gets_the_tokens_and_its_arguments() -> None:
    @register_policy_loss("mine")
    def mine(tokens: Sampled, settings: SurrogateSettings, *, tau: float) -> Tensor:
        return -tokens.advantages_M * tau * tokens.logp_M

    settings = SurrogateSettings(mode="mine", kwargs={"tau": 3.0})
    check_policy_loss(settings)
    logp = torch.tensor([-1.0, -2.0])
    tokens = Sampled(logp, logp, torch.tensor([1.0, -1.0]), torch.tensor([0, 1]), 2)
    made = policy_loss(tokens, settings)
    assert made.loss_M.tolist() == [3.0, -6.0] and not made.clipped_M.any()
    assert settings.needs_every_row, "what it does without an advantage is not known"
    assert not SurrogateSettings(mode="gspo").needs_every_row


def at_rows(tokens: Sampled) -> Tensor:
    return tokens.advantages_M - tokens.advantages_M.mean()


def changing(tokens: Sampled, settings: Any) -> Tensor:
    return -tokens.advantages_M.mul_(2.0) * tokens.logp_M


def sometimes(tokens: Sampled, settings: Any) -> PolicyLoss:
    loss_M = -tokens.advantages_M * tokens.logp_M
    values = {"falling": loss_M} if (tokens.advantages_M < 0).any() else {}
    return PolicyLoss(loss_M, *[torch.zeros_like(loss_M)] * 2, values)


UNUSABLE: list[tuple[str, Callable[[Sampled, Any], Any]]] = [
    ("other numbers beside other rows", lambda tokens, _: -at_rows(tokens) * tokens.logp_M),
    ("other numbers beside other rows", lambda tokens, _: -tokens.logp_M / len(tokens.logp_M)),
    ("does not depend on tokens.logp_M", lambda tokens, _: -tokens.advantages_M),
    ("does not depend on tokens.logp_M", lambda tokens, _: -tokens.logp_M.detach()),
    ("use no random numbers", lambda tokens, _: -tokens.logp_M * (torch.rand_like(tokens.logp_M) < 0.5)),
    ("has a gradient of 0 at each", lambda tokens, _: -tokens.advantages_M * tokens.logp_M * 0),
    ("gives falling for some tokens only", sometimes),
    ("changes the tensors that it gets", changing),
    ("returns a tuple; return one tensor or a PolicyLoss", lambda tokens, _: (tokens.logp_M, {})),
    ("clipped_M as NoneType for 8", lambda tokens, _: PolicyLoss(tokens.logp_M, None, None)),  # type: ignore[arg-type]
    ("not finite", lambda tokens, _: -tokens.logp_M / 0),
    (r"the loss as \[\] for 8 tokens", lambda tokens, _: -tokens.logp_M.mean()),
    ("the loss as float for 8", lambda tokens, _: PolicyLoss(0.5, *[tokens.logp_M] * 2)),  # type: ignore[arg-type]
    ("reports entropy, a metric of Rally's", lambda t, _: PolicyLoss(*[t.logp_M] * 3, {"entropy": t.logp_M})),
    ("extra as float for 8", lambda tokens, _: PolicyLoss(*[tokens.logp_M] * 3, {"extra": 1.0})),  # type: ignore[dict-item]
    ("fails on made-up tokens: KeyError: 'x'", lambda tokens, _: {}["x"]),
    ("fails on made-up tokens: AttributeError", lambda tokens, _: tokens.entropy_M),  # type: ignore[attr-defined]
]


@pytest.mark.parametrize(("problem", "function"), UNUSABLE)
def test_a_loss_that_cannot_be_trained_with_is_refused(problem: str, function: Callable[..., Any]) -> None:
    register_policy_loss("mine")(function)
    with pytest.raises(PolicyLossError, match=problem):
        check_policy_loss(MINE)


def test_trying_a_loss_leaves_the_random_numbers_of_the_run() -> None:
    register_policy_loss("mine")(lambda tokens, settings: -tokens.advantages_M * tokens.logp_M)
    torch.manual_seed(5)
    expected = torch.rand(3)
    torch.manual_seed(5)
    check_policy_loss(MINE)
    assert torch.equal(torch.rand(3), expected)


def test_names_of_rally_cannot_be_taken() -> None:
    with pytest.raises(PolicyLossError, match="vanilla is a policy loss of Rally"):
        register_policy_loss("vanilla")(lambda tokens, settings: tokens.logp_M)
    for register in (register_adv_estimator, register_token_estimator):
        with pytest.raises(EstimatorError, match="grpo is an advantage estimator of Rally"):
            register("grpo")(lambda *args: torch.zeros(1))


def scored() -> Scored:
    return Scored(torch.tensor([1.0, 0.0, 4.0], dtype=torch.float64), torch.tensor([0, 0, 0]), torch.tensor([2, 1, 0]))


def test_a_registered_estimator_compares_samples_or_tokens() -> None:
    @register_adv_estimator("mine")
    def mine(rewards_N: Tensor, groups_N: Tensor, tokens_N: Tensor, by_std: bool, *, scale: float) -> Tensor:
        return scale * (rewards_N - rewards_N.median())

    settings = CreditSettings(estimator="mine", kwargs={"scale": 2.0})
    check_estimator(settings)
    assert token_advantages(scored(), settings).tolist() == [0.0, 0.0, -2.0]

    @register_token_estimator("mine")  # a module that is edited and imported again
    def of_tokens(scored: Scored, settings: CreditSettings) -> Tensor:
        return torch.arange(int(scored.tokens_N.sum())).double()

    assert token_advantages(scored(), CreditSettings(estimator="mine")).tolist() == [0.0, 1.0, 2.0]


@pytest.mark.parametrize(
    ("problem", "function"),
    [
        (r"returned \[1\] for 4 samples", lambda *args: torch.zeros(1)),
        ("returned float for 4 samples", lambda *args: 0.5),
        ("not finite", lambda rewards, *args: rewards / 0),
        ("fails on made-up episodes: ZeroDivisionError", lambda *args: 1 // 0),
    ],
)
def test_an_estimator_that_cannot_be_trained_with_is_refused(problem: str, function: Callable[..., Any]) -> None:
    register_adv_estimator("mine")(function)
    with pytest.raises(EstimatorError, match=problem):
        check_estimator(CreditSettings(estimator="mine"))
