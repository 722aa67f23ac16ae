"""Credit assignment: every estimator gives each token the value computed by hand.

Two episodes of one group. The first has turns of 2 and 1 sampled tokens; its first turn earned 0.5, the episode 1. The
second has turns of 1, 1 and 2 tokens; its second turn earned 1, the episode 0. Observed tokens between turns are not
counted.
"""

import math
from typing import Any

import pytest
import torch

from rally.algos.advantages import discounted, gae, whiten
from rally.algos.credit_assignment import CreditSettings, Scored, Turns, token_advantages, turn_returns

SCORED = Scored(
    rewards_N=torch.tensor([1.0, 0.0], dtype=torch.float64),
    groups_N=torch.tensor([0, 0]),
    tokens_N=torch.tensor([3, 4]),
    turns=Turns(
        episode_K=torch.tensor([0, 0, 1, 1, 1]),
        tokens_K=torch.tensor([2, 1, 1, 1, 2]),
        rewards_K=torch.tensor([0.5, 0.0, 0.0, 1.0, 0.0], dtype=torch.float64),
        states_K=torch.tensor([0, 7, 0, 7, 8]),
    ),
)


def found(scored: Scored = SCORED, **settings: Any) -> list[float]:
    return token_advantages(scored, CreditSettings(**{"by_std": False, "gamma": 0.5, **settings})).tolist()


def test_over_whole_episodes_every_token_gets_the_number_of_its_episode() -> None:
    assert found() == [0.5] * 3 + [-0.5] * 4
    assert found(estimator="rloo") == [1.0] * 3 + [-1.0] * 4


def test_returns_over_turns() -> None:
    # First: 1, and 0.5 + 0.5 * 1 before it. Second: 0, then 1 + 0.5 * 0, then 0 + 0.5 * 1.
    assert turn_returns(SCORED, CreditSettings(turn_rewards="returns", gamma=0.5)).tolist() == [1, 1, 0.5, 1, 0]
    assert turn_returns(SCORED, CreditSettings(gamma=0.5)).tolist() == [0.5, 1, 0, 0, 0], "turns' own rewards are out"


def test_turns_against_all_turns_of_their_group() -> None:
    # The returns 1, 1, 0.5, 1, 0 have the mean 0.7.
    expected = [0.3, 0.3, 0.3, -0.2, 0.3, -0.7, -0.7]
    assert found(turn_rewards="returns") == pytest.approx(expected)


def test_turns_against_turns_of_the_same_number() -> None:
    # First turns: 1 and 0.5. Second: 1 and 1. The third turn has no peer.
    assert found(turn_rewards="turn_baseline") == [0.25, 0.25, 0, -0.25, 0, 0, 0]


def test_a_group_does_not_see_the_turns_of_another() -> None:
    apart = SCORED._replace(groups_N=torch.tensor([0, 1]))
    assert found(apart, turn_rewards="turn_baseline") == [0] * 7
    # Each alone: 1, 1 has the mean 1; 0.5, 1, 0 has the mean 0.5.
    assert found(apart, turn_rewards="returns") == pytest.approx([0, 0, 0, 0, 0.5, -0.5, -0.5])


def test_gigpo_adds_what_a_turn_did_better_in_the_same_state() -> None:
    # Returns of the outcome alone: 0.5, 1 and 0, 0, 0. State 0: +-0.25, state 7: +-0.5, state 8 has no peer.
    expected = [0.5 + 0.5, 0.5 + 0.5, 0.5 + 1, -0.5 - 0.5, -0.5 - 1, -0.5, -0.5]
    assert found(estimator="gigpo", step_weight=2.0) == pytest.approx(expected)
    assert found(estimator="gigpo", step_weight=0.0) == [0.5] * 3 + [-0.5] * 4


def test_reinforce_plus_plus_discounts_from_sampled_token_to_sampled_token() -> None:
    outcome = torch.tensor([0.25, 0.5, 1, 0, 0, 0, 0])
    assert found(estimator="reinforce_plus_plus") == pytest.approx(whiten(outcome).tolist())
    # With turns' own: the first episode earns 0, 0.5, 1, the second 0, 1, 0, 0.
    both = torch.tensor([0.5, 1, 1, 0.5, 1, 0, 0])
    expected = whiten(both).tolist()
    assert found(estimator="reinforce_plus_plus", turn_rewards="returns") == pytest.approx(expected)


def test_reinforce_plus_plus_baseline_is_whitened_over_tokens() -> None:
    expected = whiten(torch.tensor([0.5] * 3 + [-0.5] * 4)).tolist()
    assert found(estimator="reinforce_plus_plus_baseline") == pytest.approx(expected)
    # Mean (1.5 - 2) / 7 = -1/14; squares 3 * (8/14)^2 + 4 * (6/14)^2 = 336/196, over 6.
    assert expected[0] == pytest.approx((8 / 14) / math.sqrt(336 / 196 / 6), rel=1e-5)


def test_a_penalty_on_tokens_is_taken_off_what_they_belong_to() -> None:
    penalties = torch.tensor([0.0, 0, -0.5, 0, -0.25, 0, 0])
    charged = SCORED._replace(token_rewards_M=penalties)
    # Episodes: 0.5 and -0.25, of which the mean is 0.125.
    assert found(charged) == [0.375] * 3 + [-0.375] * 4
    # Turns: the second of the first episode 0.5, so the first 0.75; the second of the second 0.75, so the first 0.375.
    settings = CreditSettings(turn_rewards="returns", gamma=0.5)
    assert turn_returns(charged, settings).tolist() == [0.75, 0.5, 0.375, 0.75, 0]


def test_an_episode_that_sampled_nothing_still_counts_as_a_peer() -> None:
    silent = SCORED._replace(tokens_N=torch.tensor([3, 0]))
    assert found(silent) == [0.5] * 3


def test_discounting_stops_at_the_end_of_an_episode() -> None:
    values = torch.tensor([1.0, 0, 4, 8, 2])
    assert discounted(values, torch.tensor([3, 0, 2]), 0.5).tolist() == [2, 2, 4, 9, 2]
    assert discounted(values, torch.tensor([3, 0, 2]), 0.0).tolist() == values.tolist()


def test_gae_by_hand() -> None:
    # Surprises: 0 + .9*.2 - .5 = -.32, 0 + .9*.4 - .2 = .16, 1 - .4 = .6; each takes .45 of what follows it.
    first, values = [-0.32 + 0.45 * (0.16 + 0.45 * 0.6), 0.16 + 0.45 * 0.6, 0.6], [0.5, 0.2, 0.4]
    result = gae(
        torch.tensor([0.0, 0, 1, 2]), torch.tensor([*values, 0.5]), torch.tensor([3, 0, 1]), gamma=0.9, lam=0.5
    )
    assert result.advantages_M.tolist() == pytest.approx([*first, 1.5])
    assert result.returns_M.tolist() == pytest.approx([a + v for a, v in zip(first, values, strict=True)] + [2.0])


def test_gae_with_lambda_one_is_the_return_less_the_value() -> None:
    rewards, values = torch.rand(9, dtype=torch.float64), torch.rand(9, dtype=torch.float64)
    lengths = torch.tensor([4, 5])
    result = gae(rewards, values, lengths, gamma=0.8, lam=1.0)
    assert torch.allclose(result.advantages_M.double(), discounted(rewards, lengths, 0.8) - values, atol=1e-6)


def test_remax_is_what_comes_less_what_the_greedy_episode_earned() -> None:
    # The greedy episode of the prompt earned 0.25.
    scored = SCORED._replace(turns=None, baselines_N=torch.tensor([0.25, 0.25], dtype=torch.float64))
    assert found(scored, estimator="remax", gamma=1.0) == [0.75] * 3 + [-0.25] * 4
    # A KL of 0.125 at the first token of the first episode and of 0.5 at its last: 1 - 0.5 comes from the second on.
    taxed = scored._replace(token_rewards_M=torch.tensor([-0.125, 0, -0.5, 0, 0, 0, 0]))
    assert found(taxed, estimator="remax", gamma=1.0) == [0.125, 0.25, 0.25] + [-0.25] * 4
    alone = scored._replace(baselines_N=scored.rewards_N)
    assert found(alone, estimator="remax", gamma=1.0) == [0] * 7, "as good as the greedy one: nothing to learn"


def test_gdpo_compares_each_component_by_itself() -> None:
    """Added up first, 3 + 0 and 2 + 1 would be equal; by itself each component is worth one deviation."""
    scored = Scored(
        rewards_N=torch.zeros(4),
        groups_N=torch.tensor([0, 0, 1, 1]),
        tokens_N=torch.tensor([1, 1, 1, 1]),
        components_NC=torch.tensor([[3.0, 0.0], [2.0, 1.0], [30.0, 1.0], [20.0, 0.0]], dtype=torch.float64),
    )
    # Group 0: 1/sqrt(2) - 1/sqrt(2) and the negative; group 1: 2/sqrt(2) and -2/sqrt(2). Whitened: variance 4/3.
    side = math.sqrt(2) / math.sqrt(4 / 3)
    assert found(scored, estimator="gdpo", by_std=True) == pytest.approx([0, 0, side, -side], abs=1e-5)
    # Not scaled: 0.5 - 0.5 and 5 + 0.5; the variance over the four is 2 * 5.5**2 / 3.
    side = 5.5 / math.sqrt(2 * 5.5**2 / 3)
    assert found(scored, estimator="gdpo", by_std=False) == pytest.approx([0, 0, side, -side], abs=1e-5)
