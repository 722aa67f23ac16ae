"""GAE: advantages and value targets equal those computed by hand, over tokens and over turns.

Two episodes. The first has turns of 2 and 1 sampled tokens; its first turn earned 0.5, the episode 1. The second has
one turn of 2 tokens and earned 2. Observed tokens between turns are not counted.
"""

import math
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rally.algos.advantages import discounted, whiten
from rally.algos.credit_assignment import CreditSettings, Scored, Turns
from rally.algos.gae import GaeResult, advantages_and_returns, decisions, explained_variance, value_loss

SCORED = Scored(
    rewards_N=torch.tensor([1.0, 2.0], dtype=torch.float64),
    groups_N=torch.tensor([0, 1]),
    tokens_N=torch.tensor([3, 2]),
    turns=Turns(
        episode_K=torch.tensor([0, 0, 1]),
        tokens_K=torch.tensor([2, 1, 2]),
        rewards_K=torch.tensor([0.5, 0.0, 0.0], dtype=torch.float64),
        states_K=torch.tensor([0, 1, 0]),
    ),
)


def credit(**settings: Any) -> CreditSettings:
    return CreditSettings(**{"estimator": "gae", "gamma": 0.9, "lam": 0.5, **settings})


def found(values: list[float], scored: Scored = SCORED, **settings: Any) -> GaeResult:
    chosen = credit(**settings)
    return advantages_and_returns(decisions(scored, chosen), torch.tensor(values), chosen)


VALUES = [0.5, 0.2, 0.4, 0.5, 1.0]


def test_gae_over_sampled_tokens_bridges_what_was_observed() -> None:
    # Surprises of the first: .9*.2 - .5 = -.32, .9*.4 - .2 = .16 (a tool spoke between it and the next), 1 - .4 = .6.
    # Of the second: .9*1 - .5 = .4, 2 - 1 = 1. Each takes .45 of what follows it.
    expected = [-0.32 + 0.45 * (0.16 + 0.45 * 0.6), 0.16 + 0.45 * 0.6, 0.6, 0.4 + 0.45, 1.0]
    result = found(VALUES)
    assert result.advantages_M.tolist() == pytest.approx(whiten(torch.tensor(expected)).tolist(), abs=1e-6)
    assert result.returns_D.tolist() == pytest.approx([a + v for a, v in zip(expected, VALUES, strict=True)])


def test_a_turns_own_reward_is_earned_by_its_last_token() -> None:
    # The second token earned .5: its surprise is .5 + .16 = .66.
    second = 0.66 + 0.45 * 0.6
    result = found(VALUES, turn_rewards="returns")
    assert result.returns_D.tolist()[:3] == pytest.approx([-0.32 + 0.45 * second + 0.5, second + 0.2, 1.0])


def test_a_penalty_is_paid_by_the_token_that_earned_it() -> None:
    charged = SCORED._replace(token_rewards_M=torch.tensor([0.0, -0.1, 0.0, 0.0, 0.0]))
    # Lambda and gamma 1: returns are sums of what follows, whatever the values are.
    assert found(VALUES, charged, gamma=1.0, lam=1.0).returns_D.tolist() == pytest.approx([0.9, 0.9, 1, 2, 2])


def test_gae_over_turns() -> None:
    """A value for each turn; lambda and gamma count turns, not tokens."""
    chosen = credit(estimator="turn_gae")
    made = decisions(SCORED, chosen)
    assert made.first_D.tolist() == [0, 2, 3] and made.lengths_N.tolist() == [2, 1]
    assert made.rewards_D.tolist() == [0, 1, 2]
    # First: .9*.2 - .5 = -.32 and 1 - .2 = .8. Second: 2 - .4 = 1.6.
    result = advantages_and_returns(made, torch.tensor([0.5, 0.2, 0.4]), chosen)
    first = -0.32 + 0.45 * 0.8
    assert result.returns_D.tolist() == pytest.approx([first + 0.5, 1.0, 2.0])
    over_tokens = whiten(torch.tensor([first, first, 0.8, 1.6, 1.6]))
    assert result.advantages_M.tolist() == pytest.approx(over_tokens.tolist(), abs=1e-6)


def test_a_turn_earns_its_own_reward_and_what_its_tokens_pay() -> None:
    charged = SCORED._replace(token_rewards_M=torch.tensor([-0.1, -0.2, 0.0, 0.0, -0.3]))
    made = decisions(charged, credit(estimator="turn_gae", turn_rewards="returns"))
    assert made.rewards_D.tolist() == pytest.approx([0.2, 1, 1.7])


def test_a_turn_in_which_nothing_was_sampled_is_no_decision() -> None:
    turns = Turns(
        episode_K=torch.tensor([0, 0, 0, 1]),
        tokens_K=torch.tensor([2, 0, 1, 2]),
        rewards_K=torch.zeros(4, dtype=torch.float64),
        states_K=torch.zeros(4, dtype=torch.long),
    )
    made = decisions(SCORED._replace(turns=turns), credit(estimator="turn_gae"))
    assert made.first_D.tolist() == [0, 2, 3] and made.lengths_N.tolist() == [2, 1]


def test_an_episode_that_sampled_nothing_has_no_decision() -> None:
    silent = SCORED._replace(tokens_N=torch.tensor([3, 0]), turns=None)
    assert decisions(silent, credit()).rewards_D.tolist() == [0, 0, 1]


numbers = st.floats(-3, 3, allow_nan=False, width=32)


@given(data=st.data(), lengths=st.lists(st.integers(0, 4), min_size=1, max_size=4), gamma=st.floats(0, 1))
def test_turns_of_one_token_are_tokens(data: st.DataObject, lengths: list[int], gamma: float) -> None:
    tokens_N = torch.tensor(lengths)
    count = sum(lengths)
    scored = Scored(
        rewards_N=torch.tensor(data.draw(st.lists(numbers, min_size=len(lengths), max_size=len(lengths)))),
        groups_N=torch.zeros(len(lengths), dtype=torch.long),
        tokens_N=tokens_N,
        turns=Turns(
            episode_K=torch.arange(len(lengths)).repeat_interleave(tokens_N),
            tokens_K=torch.ones(count, dtype=torch.long),
            rewards_K=torch.zeros(count, dtype=torch.float64),
            states_K=torch.zeros(count, dtype=torch.long),
        ),
    )
    values = data.draw(st.lists(numbers, min_size=count, max_size=count))
    by_token = found(values, scored, gamma=gamma)
    by_turn = found(values, scored, gamma=gamma, estimator="turn_gae")
    assert torch.equal(by_token.advantages_M, by_turn.advantages_M)
    assert torch.equal(by_token.returns_D, by_turn.returns_D)
    everything = found(values, scored, gamma=gamma, lam=1.0).returns_D
    rewards_M = decisions(scored, credit()).rewards_D
    assert torch.allclose(everything.double(), discounted(rewards_M, tokens_N, gamma), atol=1e-5)


def test_the_value_loss_by_hand() -> None:
    # Old 0, clip .5. A value of .2 is free; 2 towards a return of 3 is held at .5; 2 towards -1 is worse free.
    values = torch.tensor([0.2, 2.0, 2.0], requires_grad=True)
    loss, clipped = value_loss(values, torch.zeros(3), torch.tensor([1.0, 3.0, -1.0]), 0.5)
    assert loss.tolist() == pytest.approx([0.5 * 0.8**2, 0.5 * 2.5**2, 0.5 * 3**2])
    assert clipped.tolist() == [False, True, False]
    [gradient] = torch.autograd.grad(loss.sum(), values)
    assert gradient.tolist() == pytest.approx([-0.8, 0, 3]), "what is held back has no gradient"


def test_explained_variance() -> None:
    returns = torch.tensor([0.0, 1.0, 2.0, 5.0])
    assert explained_variance(returns + 7, returns) == pytest.approx(1, abs=1e-5)
    assert explained_variance(torch.zeros(4), returns) == pytest.approx(0, abs=1e-5)
    assert explained_variance(-returns, returns) == pytest.approx(-3, abs=1e-4)
    assert math.isfinite(explained_variance(torch.ones(2), torch.ones(2)))
