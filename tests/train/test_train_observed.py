"""Observed tokens between two turns never enter a loss: checked against values computed by hand, and by autograd.

Advantages and losses are computed as in a training step, from episodes with observed tokens in the middle.
"""

import itertools
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from train_cases import KeepingPolicy, calm_model, observed_otherwise, segment, told_episode, uneven_episodes
from transformers import PreTrainedModel

from rally.algos.advantages import ESTIMATORS
from rally.algos.credit_assignment import CreditSettings
from rally.algos.losses import SURROGATES, SurrogateSettings
from rally.train import update
from rally.train.batch import TrainBatch, build_batch
from rally.train.forward import logprobs as forward
from rally.train.forward.logprobs import TokenLogprobs, token_logprobs
from rally.train.packing import PackedRows, Row
from rally.train.update import UpdateSettings, update_policy
from rally.types import Episode

EVERY_ESTIMATOR = [*ESTIMATORS, "reinforce_plus_plus", "gigpo"]

# Two episodes of one group: rewards 1 and 0. The first has 2 and 1 tokens, and its first call earned 0.5; the second
# has 1, 1 and 2 tokens, and its second call earned 1. Both saw "x" after their first turn.
TOLD = [
    told_episode("a", 1.0, "ssoos", [0.5], ["x"]),
    told_episode("b", 0.0, "soosoooss", [None, 1.0], ["x", "y"]),
]
WHITE = math.sqrt(336 / 196 / 6)  # deviation of 1/2 three times and -1/2 four times: the mean is -1/14
RETURNS = math.sqrt(0.875 / 6)  # of 1/4, 1/2, 1 and 0 four times: the mean is 1/4
BY_HAND: dict[str, tuple[list[float], list[float]]] = {
    "grpo": ([0.5] * 3, [-0.5] * 4),
    "grpo_vectorized": ([0.5] * 3, [-0.5] * 4),
    "rloo": ([1.0] * 3, [-1.0] * 4),
    "rloo_vectorized": ([1.0] * 3, [-1.0] * 4),
    "opo": ([4 / 7] * 3, [-3 / 7] * 4),  # the mean by sampled tokens, 3 and 4; 5 and 9 if observed ones counted
    "gpg": ([0.5] * 3, [-0.5] * 4),
    "grpo_passk": ([1.0] * 3, [0.0] * 4),
    "reinforce_plus_plus_baseline": ([8 / 14 / WHITE] * 3, [-6 / 14 / WHITE] * 4),
    "reinforce_plus_plus": ([0.0, 0.25 / RETURNS, 0.75 / RETURNS], [-0.25 / RETURNS] * 4),
    # returns of turns: 1/2, 1 and 0, 0, 0; first turns differ by +-1/4, those after "x" by +-1/2, nobody else saw "y"
    "gigpo": ([0.5 + 0.25, 0.5 + 0.25, 0.5 + 0.5], [-0.5 - 0.25, -0.5 - 0.5, -0.5, -0.5]),
}


def test_every_estimator_has_a_hand_worked_example() -> None:
    assert set(BY_HAND) == set(EVERY_ESTIMATOR)


@pytest.mark.parametrize("estimator", [*BY_HAND])
def test_advantages_by_hand(estimator: str) -> None:
    rows = build_batch(TOLD, CreditSettings(estimator=estimator, by_std=False, gamma=0.5)).rows
    assert [row.sampled.tolist() for row in rows] == [[5, 6, 9], [5, 8, 12, 13]], "observed tokens are in the middle"
    for row, expected in zip(rows, BY_HAND[estimator], strict=True):
        assert row.advantages == pytest.approx(expected, abs=1e-6)


@pytest.mark.parametrize(
    ("turn_rewards", "expected"),
    [
        ("returns", ([0.3, 0.3, 0.3], [-0.2, 0.3, -0.7, -0.7])),  # 1, 1 and 0.5, 1, 0: the mean is 0.7
        ("turn_baseline", ([0.25, 0.25, 0], [-0.25, 0, 0, 0])),  # 1 and 0.5; 1 and 1; a third turn has no peer
    ],
)
def test_rewards_of_turns_by_hand(turn_rewards: Any, expected: tuple[list[float], list[float]]) -> None:
    rows = build_batch(TOLD, CreditSettings(by_std=False, gamma=0.5, turn_rewards=turn_rewards)).rows
    for row, values in zip(rows, expected, strict=True):
        assert row.advantages == pytest.approx(values, abs=1e-6)


# One row "ssoos": ratios 2, 1/2, 3/2, advantages 1, 1, -1, old log-probabilities -1, -1, -4. The clip is 0.2, every
# token weighs a third. By mode: losses and their slopes by the log-probability, of the three sampled tokens.
LN2, LN15, S = math.log(2), math.log(1.5), 1.5 ** (1 / 3)
G = math.exp((0.2 - LN2 + LN15) / 3)


def gate(x: float) -> float:
    return 1 / (1 + math.exp(-x))


GATES = (gate(1), gate(-0.5), gate(1.05 * 0.5))
LOSSES: dict[str, tuple[list[float], list[float]]] = {
    "vanilla": ([-1.2, -0.5, 1.5], [0, -0.5, 1.5]),
    "gspo": ([-S, -S, S], [-S, -S, S]),  # one ratio for the row: the cube root of 2 * 1/2 * 3/2
    "geo_mean": ([-G / 3] * 3, [0, -G / 3, -G / 3]),  # the first is held at exp(0.2); the mean advantage is 1/3
    "gmpo": ([-G / 3] * 3, [0, -G / 3, -G / 3]),
    "cispo": ([-1.2 * (LN2 - 1), -0.8 * (-LN2 - 1), 1.2 * (LN15 - 4)], [-1.2, -0.8, 1.2]),
    "sapo": (
        [-4 * GATES[0], -4 * GATES[1], 4 / 1.05 * GATES[2]],
        [s * 4 * g * (1 - g) * r for s, g, r in zip((-1, -1, 1), GATES, (2, 0.5, 1.5), strict=True)],
    ),
    "gpg": ([-(LN2 - 1), -(-LN2 - 1), LN15 - 4], [-1, -1, 1]),
    # The probability of the first rises by 0.37, with a KL of 0.30; the others move against their advantages.
    "dppo_tv": ([0, -0.5 * (-LN2 - 1), 1.5 * (LN15 - 4)], [0, -0.5, 1.5]),
    "dppo_kl": ([0, -0.5 * (-LN2 - 1), 1.5 * (LN15 - 4)], [0, -0.5, 1.5]),
    "dro": (
        [-(LN2 - 1) + 0.05 * LN2**2, LN2 + 1 + 0.05 * LN2**2, LN15 - 4 + 0.05 * LN15**2],
        [-1 + 0.1 * LN2, -1 - 0.1 * LN2, 1 + 0.1 * LN15],
    ),
    # covariances 2/3, 2/3, 8/3: the last token is the one that both treat apart
    "clip_cov": ([-1.2, -0.5, 0], [0, -0.5, 0]),
    "kl_cov": ([-2, -0.5, 1.5 + 0.1 * LN15], [-2, -0.5, 1.5 + 0.1]),
}


def test_every_loss_has_a_hand_worked_example() -> None:
    assert set(LOSSES) == set(SURROGATES)


@pytest.mark.parametrize("mode", [*LOSSES])
def test_losses_by_hand(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The log-probabilities of observed tokens are NaN here, so any use of one would show."""
    old = [-1.0, -1.0, -4.0]
    one = Row.of(segment(random.Random(0), "ssoos"), 0)
    row = replace(one, logprobs=tuple(old), advantages=(1.0, 1.0, -1.0))
    sampled = [0, 1, 4]
    logp_T = torch.full((5,), math.nan)
    logp_T[sampled] = torch.tensor(old) + torch.tensor([2, 0.5, 1.5]).log()
    logp_T.requires_grad_()
    monkeypatch.setattr(update, "_logprobs", lambda *_: TokenLogprobs(logp_T[sampled], torch.zeros(3)))
    batch = TrainBatch(
        rows=[row], rewards_N=torch.ones(1), groups_N=torch.zeros(1, dtype=torch.long), tokens_N=torch.tensor([3])
    )
    chosen = SurrogateSettings(mode=mode, marked_share=0.34)
    metrics = update_policy(KeepingPolicy(calm_model()), batch, UpdateSettings(mini_batch_groups=1, surrogate=chosen))
    values, slopes = LOSSES[mode]
    assert metrics["actor/pg_loss"] == pytest.approx(sum(values) / 3, abs=1e-6)
    assert logp_T.grad is not None
    first, second, last = (slope / 3 for slope in slopes)
    assert logp_T.grad.tolist() == pytest.approx([first, second, 0, 0, last], abs=1e-6)


class Reached:
    """Replaces the hidden states: those that predict a sampled token depend only on that token, all others on their
    position. Keeps the gradient of each."""

    def __init__(self) -> None:
        self.hidden_TC: list[Tensor] = []
        self.packed: list[PackedRows] = []

    def __call__(self, model: PreTrainedModel, packed: PackedRows, *rest: Any, **options: Any) -> TokenLogprobs:
        hidden_TC = torch.randn(len(packed.ids_T), model.config.hidden_size)
        for m, name in enumerate(packed.old_logp_M.tolist()):  # random, so all tokens differ
            generator = torch.Generator().manual_seed(hash(name) & (2**63 - 1))
            hidden_TC[packed.predict_U[packed.pair_M[m]]] = torch.randn(hidden_TC.shape[1], generator=generator)
        self.hidden_TC.append(hidden_TC.requires_grad_())
        self.packed.append(packed)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(forward, "hidden_states", lambda *_: hidden_TC)
            return token_logprobs(model, packed, *rest, **options)

    def by_token(self) -> dict[float, Tensor]:
        """The gradient that each sampled token sent back; nothing else may have received any."""
        found = {}
        for hidden_TC, packed in zip(self.hidden_TC, self.packed, strict=True):
            assert hidden_TC.grad is not None
            predict_M = packed.predict_U[packed.pair_M]
            found |= {name: hidden_TC.grad[at] for name, at in zip(packed.old_logp_M.tolist(), predict_M, strict=True)}
            others = torch.ones(len(hidden_TC), dtype=torch.bool).index_fill(0, predict_M, False)
            assert not hidden_TC.grad[others].any(), "a token that was not sampled, or its place, reached the loss"
        return found


def sent_back(
    monkeypatch: pytest.MonkeyPatch, policy: KeepingPolicy, batch: TrainBatch, mode: str
) -> dict[float, Tensor]:
    reached = Reached()
    monkeypatch.setattr(update, "token_logprobs", reached)
    wide = SurrogateSettings(mode=mode, low=5.0, high=5.0, dual=50.0, marked_share=0.1, covariance_low=0.0)
    torch.manual_seed(0)  # clip_cov samples tokens
    update_policy(
        policy,
        batch,
        UpdateSettings(mini_batch_groups=100, surrogate=wide, aggregation="seq-mean-token-mean", entropy_coeff=0.01),
    )
    return reached.by_token()


def settings_of(estimator: str) -> list[CreditSettings]:
    ways = ("trajectory", "returns", "turn_baseline")
    return [CreditSettings(estimator=estimator, turn_rewards=way, gamma=0.9) for way in ways]  # type: ignore[arg-type]


EPISODES = [*uneven_episodes(), *TOLD]


def otherwise(seed: int) -> list[Episode]:
    changed = [replace(observed_otherwise(e, seed), turns=()) for e in EPISODES]
    lengths = [[len(s.ids) for s in e.segments] for e in EPISODES], [[len(s.ids) for s in e.segments] for e in changed]
    assert lengths[0] != lengths[1], "the number of observed tokens is another"
    return changed


@pytest.mark.parametrize("estimator", EVERY_ESTIMATOR)
def test_no_advantage_and_no_weight_depends_on_what_was_observed(estimator: str) -> None:
    plain = [replace(e, turns=()) for e in EPISODES]
    for credit, seed in itertools.product(settings_of(estimator), range(3)):
        first, second = build_batch(plain, credit), build_batch(otherwise(seed), credit)
        assert [row.advantages.tolist() for row in first.rows] == [row.advantages.tolist() for row in second.rows]
        assert first.tokens_N.tolist() == second.tokens_N.tolist(), "what weighs the tokens"


@pytest.mark.parametrize("mode", [*SURROGATES])
def test_no_gradient_goes_through_what_was_observed(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """For every estimator, only positions that predict sampled tokens receive a gradient from the head, and it does
    not depend on the content or number of observed tokens between them."""
    policy = KeepingPolicy(calm_model())
    plain, changed = [replace(e, turns=()) for e in EPISODES], otherwise(0)
    for estimator in EVERY_ESTIMATOR:
        credit = CreditSettings(estimator=estimator, gamma=0.9)
        first = sent_back(monkeypatch, policy, build_batch(plain, credit), mode)
        second = sent_back(monkeypatch, policy, build_batch(changed, credit), mode)
        assert first.keys() == second.keys() and any(gradient.any() for gradient in first.values())
        for name, gradient in first.items():
            assert torch.allclose(gradient, second[name], rtol=1e-5, atol=1e-9), (estimator, name)
