"""Group-relative advantages equal values computed by hand, and a group without signal gets exactly 0."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from rally.algos import advantages


def grpo(rewards: list[float], groups: list[int], **options: bool) -> list[float]:
    return advantages.grpo(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), **options).tolist()


def test_a_group_is_centred_and_divided_by_its_unbiased_deviation() -> None:
    # Rewards 1, 0, 0, 0: mean 1/4, squares (9 + 1 + 1 + 1)/16 = 3/4, over n - 1 = 3: variance 1/4, deviation 1/2.
    assert grpo([1, 0, 0, 0], [0] * 4) == pytest.approx([1.5, -0.5, -0.5, -0.5], abs=1e-5)


def test_without_the_division_only_the_mean_is_taken_off() -> None:
    assert grpo([1, 0, 0, 0], [0] * 4, by_std=False) == [0.75, -0.25, -0.25, -0.25]


def test_groups_do_not_see_each_other_and_may_be_interleaved() -> None:
    # Group 0 has rewards 2, 0 (deviation sqrt 2), group 1 has 10, 10, 13 (mean 11, deviation sqrt 3).
    together = grpo([2, 10, 0, 10, 13], [0, 1, 0, 1, 1])
    expected = [1 / math.sqrt(2), -1 / math.sqrt(3), -1 / math.sqrt(2), -1 / math.sqrt(3), 2 / math.sqrt(3)]
    assert together == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize("by_std", [True, False])
def test_a_group_of_one_keeps_its_reward(by_std: bool) -> None:
    assert grpo([0.5, 1, 0], [0, 1, 1], by_std=by_std)[0] == 0.5


@pytest.mark.parametrize("reward", [0.0, 1.2, 0.1, 1 / 3, -7.7, 1e9 + 0.1])
@pytest.mark.parametrize("by_std", [True, False])
def test_equal_rewards_that_binary_fractions_cannot_hold_give_exactly_zero(reward: float, by_std: bool) -> None:
    for size in (2, 3, 7, 8):
        assert grpo([reward] * size, [0] * size, by_std=by_std) == [0.0] * size


rewards_of_groups = st.lists(st.lists(st.floats(-100, 100, width=32), min_size=2, max_size=6), min_size=1, max_size=5)


@given(rewards_of_groups, st.floats(-50, 50, width=32))
def test_advantages_of_a_group_sum_to_zero_and_ignore_a_common_shift(groups: list[list[float]], shift: float) -> None:
    rewards = [r for group in groups for r in group]
    numbers = [i for i, group in enumerate(groups) for _ in group]
    plain = torch.tensor(grpo(rewards, numbers, by_std=False))
    shifted = torch.tensor(grpo([r + shift for r in rewards], numbers, by_std=False))
    assert torch.allclose(plain, shifted, atol=1e-4)
    for group in range(len(groups)):
        assert float(plain[torch.tensor(numbers) == group].sum()) == pytest.approx(0, abs=1e-3)


def test_the_statistics_are_those_of_each_episodes_own_group() -> None:
    found = advantages.group_statistics(torch.tensor([1.0, 5.0, 3.0]), torch.tensor([0, 1, 0]))
    assert found.mean_N.tolist() == [2, 5, 2]
    assert found.std_N.tolist() == pytest.approx([math.sqrt(2), 0, math.sqrt(2)])
    assert found.size_N.tolist() == [2, 1, 2]


def estimate(name: str, rewards: list[float], groups: list[int], tokens: list[int], by_std: bool = True) -> list[float]:
    function = advantages.ESTIMATORS[name]
    found = function(torch.tensor(rewards, dtype=torch.float64), torch.tensor(groups), torch.tensor(tokens), by_std)
    return found.tolist()


@pytest.mark.parametrize(
    ("name", "by_std", "expected"),
    [
        # Two groups: rewards 3, 1, 2 (mean 2, deviation 1) and 4, 4, each of other lengths.
        ("grpo", True, [1, -1, 0, 0, 0]),
        ("grpo_vectorized", True, [1, -1, 0, 0, 0]),
        ("grpo", False, [1, -1, 0, 0, 0]),
        ("rloo", True, [3 - 1.5, 1 - 2.5, 2 - 2, 0, 0]),  # less the mean of the other two
        ("rloo_vectorized", True, [1.5, -1.5, 0, 0, 0]),
        ("opo", True, [3 - 1.75, 1 - 1.75, 2 - 1.75, 0, 0]),  # the mean by tokens: (3*2 + 1*4 + 2*2) / 8 = 1.75
        ("gpg", True, [5 / 3, -5 / 3, 0, 0, 0]),  # three of five are in a group with a signal, the mean one too
        ("grpo_passk", True, [1, 0, 0, 0, 0]),  # 3 beats 2 by 1, deviation 1; the second group is tied
        ("grpo_passk", False, [1, 0, 0, 0, 0]),
        ("reinforce_plus_plus_baseline", True, [1, -1, 0, 0, 0]),
    ],
)
def test_each_estimator_by_hand(name: str, by_std: bool, expected: list[float]) -> None:
    found = estimate(name, [3, 1, 2, 4, 4], [0, 0, 0, 1, 1], [2, 4, 2, 5, 1], by_std)
    assert found == pytest.approx(expected, abs=1e-5)


def test_passk_divides_the_margin_by_the_deviation() -> None:
    # 5, 1, 0: mean 2, squares 9 + 1 + 4 = 14, variance 7; the margin is 4.
    assert estimate("grpo_passk", [5, 1, 0], [0, 0, 0], [1, 1, 1]) == pytest.approx([4 / math.sqrt(7), 0, 0], abs=1e-5)


@pytest.mark.parametrize("name", [*advantages.ESTIMATORS])
@pytest.mark.parametrize("reward", [0.1, 1 / 3, -7.7, 1e9 + 0.1])
def test_equal_rewards_teach_nothing_by_any_estimator(name: str, reward: float) -> None:
    assert estimate(name, [reward] * 7, [0] * 7, [1, 2, 3, 4, 5, 6, 7]) == [0.0] * 7


@pytest.mark.parametrize("name", ["rloo", "opo", "gpg", "grpo_passk", "reinforce_plus_plus_baseline"])
def test_a_group_of_one_has_nothing_to_learn_from(name: str) -> None:
    assert estimate(name, [5.0, 1.0, 2.0], [0, 1, 1], [1, 1, 1])[0] == 0


def test_whitening_makes_mean_zero_and_variance_one_over_tokens() -> None:
    # 1, 2, 3, 6: mean 3, squares 4 + 1 + 0 + 9 = 14, variance 14/3.
    found = advantages.whiten(torch.tensor([1.0, 2.0, 3.0, 6.0])).tolist()
    assert found == pytest.approx([x / math.sqrt(14 / 3) for x in (-2, -1, 0, 3)], abs=1e-6)
    assert advantages.whiten(torch.full((5,), 0.1)).tolist() == [0.0] * 5
    assert advantages.whiten(torch.tensor([3.0])).tolist() == [0.0]


def test_gpg_makes_up_for_groups_without_signal_wherever_zero_is() -> None:
    """Two groups right and wrong by half, one all right, one all wrong: half of the samples carry a signal."""
    rewards, groups = [1, 0, 1, 0, 1, 1, 0, 0], [0, 0, 1, 1, 2, 2, 3, 3]
    expected = [1, -1, 1, -1, 0, 0, 0, 0]  # 0.5 either way, times 8/4
    assert estimate("gpg", [float(r) for r in rewards], groups, [1] * 8) == expected
    # Counting rewards other than 0 would find 4 of 8 as well, but 8 of 8 where wrong is -1 and right is 1.
    assert estimate("gpg", [2.0 * r - 1 for r in rewards], groups, [1] * 8) == [2.0 * a for a in expected]
