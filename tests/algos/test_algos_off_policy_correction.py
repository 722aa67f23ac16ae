"""Off-policy correction: importance weights and rejection masks equal values computed by hand."""

import math

import pytest
import torch

from rally.algos.off_policy_correction import REJECTIONS, kept_tokens, of_mean_one, truncated_weights

# Ratios policy / sampler: row 0 has 0.5, 4 and 1; row 1 has 3.
LOGP = torch.tensor([0.5, 4.0, 1.0, 3.0]).log() - 2
SAMPLER = torch.full((4,), -2.0)
ROWS = torch.tensor([0, 0, 0, 1])


def test_weights_of_tokens_are_cut_off_above_only() -> None:
    assert truncated_weights(LOGP, SAMPLER, ROWS, "token", 2.0).tolist() == pytest.approx([0.5, 2, 1, 2])


def test_weights_may_be_brought_to_mean_one() -> None:
    tokens = of_mean_one(torch.tensor([0.5, 2.0, 1.0, 2.5]), ROWS, "token")
    assert tokens.tolist() == pytest.approx([1 / 3, 4 / 3, 2 / 3, 5 / 3])  # the mean is 1.5
    sequences = of_mean_one(torch.tensor([2.0, 2.0, 2.0, 3.0]), ROWS, "sequence")
    assert sequences.tolist() == pytest.approx([0.8, 0.8, 0.8, 1.2])  # a row counts once: the mean is 2.5


def test_weights_of_sequences_are_products() -> None:
    assert truncated_weights(LOGP, SAMPLER, ROWS, "sequence", 2.5).tolist() == pytest.approx([2, 2, 2, 2.5])


@pytest.mark.parametrize(
    ("test", "lowest", "highest", "kept"),
    [
        ("token_k1", 0.5, 2.0, [1, 0, 1, 0]),
        ("token_k1", 0.6, 3.5, [0, 0, 1, 1]),
        ("seq_sum_k1", 0.5, 2.1, [1, 1, 1, 0]),  # the product of row 0 is 2
        ("seq_mean_k1", 0.5, 1.2, [0, 0, 0, 0]),  # its geometric mean 2 ** (1/3) = 1.26
        ("seq_mean_k1", 0.5, 1.3, [1, 1, 1, 0]),
        ("seq_min_k1", 0.6, math.inf, [0, 0, 0, 1]),  # one token of row 0 has 0.5
        ("seq_min_k1", 0.4, math.inf, [1, 1, 1, 1]),
        ("token_k2", 0.0, 0.3, [1, 0, 1, 0]),  # halves of squared logs: 0.24, 0.96, 0, 0.60
        ("seq_sum_k2", 0.0, 1.0, [0, 0, 0, 1]),  # 1.20
        ("seq_mean_k2", 0.0, 0.5, [1, 1, 1, 0]),  # 0.40
        ("seq_max_k2", 0.0, 0.9, [0, 0, 0, 1]),
        ("token_k3", 0.0, 1.0, [1, 0, 1, 1]),  # ratio - 1 - log ratio: 0.19, 1.61, 0, 0.90
        ("seq_mean_k3", 0.0, 0.7, [1, 1, 1, 0]),  # 0.60
        ("seq_max_k3", 0.0, 1.0, [0, 0, 0, 1]),
    ],
)
def test_what_is_too_far_from_its_sampler_does_not_count(
    test: str, lowest: float, highest: float, kept: list[int]
) -> None:
    assert test in REJECTIONS
    assert kept_tokens(LOGP, SAMPLER, ROWS, test, lowest, highest).tolist() == [bool(k) for k in kept]


@pytest.mark.parametrize("test", REJECTIONS)
def test_on_policy_everything_counts(test: str) -> None:
    assert kept_tokens(SAMPLER, SAMPLER, ROWS, test, 0.99, 1.01).all()


def test_an_absurd_difference_stays_finite() -> None:
    far = torch.tensor([0.0, 0.0, 0.0, 0.0])
    weights = truncated_weights(far, torch.full((4,), -1e4), ROWS, "sequence", math.inf)
    assert torch.isfinite(weights).all()
