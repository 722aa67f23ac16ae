"""The optimal token baseline and PF-PPO compute what a plain loop over episodes and tokens does."""

import random
from pathlib import Path

import pytest
import torch
from train_cases import Paper, calm_model, episode, run_config, segment, small_policy, uneven_episodes

from rally.algos.advantages import optimal_token_baseline, pf_ppo_weights
from rally.algos.credit_assignment import CreditSettings
from rally.config import ConfigError
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.batch import CreditError, build_batch, resampled, rows_of
from rally.train.update import UpdateSettings, token_energies


def plain_baseline(
    returns: list[list[float]], energies: list[list[float]], groups: list[int], epsilon: float = 1e-8
) -> list[float]:
    """Token by token, from the definition: sum(G W) / sum(W) over the episodes of the group that reach the place."""
    result = []
    for own, group in zip(returns, groups, strict=True):
        peers = [i for i, other in enumerate(groups) if other == group]
        for t, g in enumerate(own):
            there = [i for i in peers if len(returns[i]) > t]
            weights = {i: sum(energies[i][: t + 1]) for i in there}
            total = sum(weights.values()) + epsilon
            baseline = sum(returns[i][t] * weights[i] for i in there) / total if len(there) > 1 else 0.0
            result.append(g - baseline)
    return result


def test_the_baseline_of_a_place_is_the_weighted_mean_of_the_group() -> None:
    rng = random.Random(1)
    lengths, groups = [3, 5, 5, 1, 4, 2], [0, 0, 0, 1, 2, 2]
    returns = [[rng.uniform(-1, 1) for _ in range(n)] for n in lengths]
    energies = [[rng.uniform(0, 1.5) for _ in range(n)] for n in lengths]
    flat = [torch.tensor([x for row in rows for x in row]) for rows in (returns, energies)]
    found = optimal_token_baseline(*flat, torch.tensor(lengths), torch.tensor(groups))
    assert found.tolist() == pytest.approx(plain_baseline(returns, energies, groups), abs=1e-6)


def test_advantages_from_the_policys_own_probabilities() -> None:
    episodes = uneven_episodes()
    policy, settings = small_policy(calm_model()), UpdateSettings(mini_batch_groups=9, temperature=0.7, max_tokens=50)
    rows, model, energies = rows_of(episodes), calm_model(), [[] for _ in episodes]
    for row in rows:
        p = torch.softmax(model(torch.tensor([row.ids])).logits[0].detach() / 0.7, -1)
        for at in row.sampled:
            energies[row.episode].append(float(1 - 2 * p[at - 1, row.ids[at]] + p[at - 1].square().sum()))
    found = token_energies(policy, rows, settings)
    assert found.tolist() == pytest.approx([x for one in energies for x in one], abs=1e-5)
    batch = build_batch(episodes, CreditSettings(estimator="tir_optimal_token_baseline"), None, found)
    returns = [[float(e.reward or 0)] * len(one) for e, one in zip(episodes, energies, strict=True)]
    expected = plain_baseline(returns, energies, batch.groups_N.tolist())
    assert batch.advantages_M.tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(CreditError, match=r"set algorithm.adv_estimator=tir_optimal_token_baseline"):
        build_batch(episodes, CreditSettings(estimator="optimal_token_baseline"), None, found)


def test_pf_ppo_draws_by_the_rewards() -> None:
    rewards = torch.tensor([-2.0, 0.0, 1.0, 3.0])
    for method, expected in (("pow", [4, 0, 1, 9]), ("max_min", [1, 0, 0, 1]), ("max_random", [0.1, 0.1, 0.1, 0.4])):
        assert pf_ppo_weights(rewards, method, 2.0).tolist() == pytest.approx(expected, abs=1e-7)
    rng = random.Random(0)
    parts = [episode(f"e{i}", f"g{i // 2}", float(i), segment(rng, "s" * (i + 1))) for i in range(4)]
    batch = build_batch(parts)
    drawn = resampled(batch, [3, 0, 3, 3], 2)
    assert [row.episode for row in drawn.rows] == [0, 1, 2, 3] and drawn.groups_N.tolist() == [0, 0, 1, 1]
    assert [row.ids for row in drawn.rows] == [batch.rows[i].ids for i in (3, 0, 3, 3)]
    assert drawn.rewards_N.tolist() == [3.0, 0.0, 3.0, 3.0] and drawn.tokens_N.tolist() == [4, 1, 4, 4]


def grad_norm(home: Path, out: Path, paper: Paper, *keys: str) -> float:
    train(run_config(home, out, *keys, "trainer.total_training_steps=1"), paper.console)
    [row] = [row.metrics for row in RunFolder(out).read_metrics() if row.step]
    return row["actor/grad_norm"]


def test_a_run_trains_with_them(home: Path, tmp_path: Path, paper: Paper) -> None:
    keys = [
        "algorithm.adv_estimator=tir_optimal_token_baseline",
        "actor_rollout_ref.actor.calculate_sum_pi_squared=true",
    ]
    assert grad_norm(home, tmp_path / "baseline", paper, *keys) > 0
    keys = ["algorithm.adv_estimator=gae", "algorithm.use_pf_ppo=true", "algorithm.pf_ppo.reweight_method=max_random"]
    first, again = (grad_norm(home, tmp_path / name, paper, *keys) for name in ("a", "b"))
    assert (
        first
        == pytest.approx(again, rel=1e-4)
        != pytest.approx(grad_norm(home, tmp_path / "all", paper, keys[0]), rel=1e-4)
    )


@pytest.mark.parametrize(
    ("keys", "message"),
    [
        (["algorithm.use_pf_ppo=true"], "has no effect with grpo; set algorithm.adv_estimator=gae"),
        (["algorithm.adv_estimator=gae", "algorithm.pf_ppo.weight_pow=3"], "without algorithm.use_pf_ppo=true"),
        (
            ["algorithm.adv_estimator=optimal_token_baseline", "algorithm.rollout_correction.rollout_is=token"],
            "rollout_is is not supported with optimal_token_baseline",
        ),
    ],
)
def test_what_does_not_go_together_is_refused(home: Path, tmp_path: Path, keys: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        run_config(home, tmp_path, *keys)
