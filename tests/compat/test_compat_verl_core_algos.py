"""Losses and estimators written for verl give what Rally's own ones give, or are refused with a sentence."""

from pathlib import Path
from textwrap import dedent

import numpy as np
import pytest
import torch
from torch import Tensor
from train_cases import Paper, run_config

from rally.algos.credit_assignment import CreditSettings, EstimatorError, Scored, check_estimator, token_advantages
from rally.algos.losses import PolicyLossError, Sampled, SurrogateSettings, check_policy_loss, policy_loss
from rally.config import Config, load_config
from rally.importing import import_file
from rally.runs.build import models
from rally.runs.train import train
from rally.track import RunFolder

A, M = "actor_rollout_ref.actor", "actor_rollout_ref.model"
LOSS = """
import torch
import verl.utils.torch_functional as verl_F
from verl.trainer.ppo.core_algos import agg_loss, compute_policy_loss_vanilla, register_policy_loss
from verl.workers.config import ActorConfig


@register_policy_loss("clipped")
def clipped(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode="token-mean",
            config: ActorConfig | None = None, rollout_is_weights=None):
    assert rollout_is_weights is None and isinstance(config, ActorConfig)
    low = config.clip_ratio if config.clip_ratio_low is None else config.clip_ratio_low
    ratio = torch.exp(log_prob - old_log_prob)
    held = torch.clamp(ratio, 1 - low, 1 + config.get("clip_ratio_high", 0.2))
    losses = torch.maximum(-advantages * ratio, -advantages * held) * config.policy_loss.get("scale", 1.0)
    clipped = verl_F.masked_mean((held != ratio).float(), response_mask)
    loss = agg_loss(losses, response_mask, loss_agg_mode, **config.global_batch_info)
    return loss, {"actor/pg_clipfrac": clipped.item(), "mine/rows": float(len(losses))}


@register_policy_loss("older")
def older(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config):
    matrices = old_log_prob, log_prob, advantages, response_mask
    loss, metrics = compute_policy_loss_vanilla(*matrices, loss_agg_mode, config)
    return loss, torch.tensor(metrics["actor/pg_clipfrac"]), torch.tensor(0.0), torch.tensor(0.0)


@register_policy_loss("own_mean")
def own_mean(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **others):
    return verl_F.masked_mean(-advantages * log_prob, response_mask), {}


@register_policy_loss("scaled")
def scaled(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **others):
    return 2 * agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}


@register_policy_loss("by_sequence")
def by_sequence(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, **others):
    return agg_loss(-advantages * log_prob, response_mask, "seq-mean-token-mean"), {}


@register_policy_loss("greedy_needed")
def greedy_needed(old_log_prob, log_prob, advantages, response_mask, loss_agg_mode, config, greedy_log_prob):
    return agg_loss(-advantages * log_prob, response_mask, loss_agg_mode), {}
"""
ESTIMATOR = """
from collections import defaultdict

import numpy as np
import torch
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo.core_algos import compute_grpo_outcome_advantage, register_adv_est
from verl.utils import as_torch_index, group_mean_std


@register_adv_est("by_loop")
def by_loop(token_level_rewards, response_mask, index: np.ndarray, epsilon=1e-6, config: AlgoConfig = None, **others):
    scores, members = token_level_rewards.sum(dim=-1), defaultdict(list)
    for i in range(len(scores)):
        members[index[i]].append(scores[i].clone())
    for i in range(len(scores)):
        group = torch.stack(members[index[i]])
        scores[i] = (scores[i] - torch.mean(group)) / (torch.std(group) + epsilon)
    return scores.unsqueeze(-1) * response_mask, scores.unsqueeze(-1) * response_mask


@register_adv_est("by_group")
def by_group(token_level_rewards, response_mask, index, config=None):
    scores, groups = token_level_rewards.sum(-1), as_torch_index(index)
    mean, std, count = group_mean_std(scores, groups)
    advantages = ((scores - mean[groups]) / (std[groups] + config.get("epsilon", 1e-6)))[:, None] * response_mask
    return advantages, advantages


@register_adv_est("theirs")
def theirs(token_level_rewards, response_mask, index, config):
    return compute_grpo_outcome_advantage(token_level_rewards, response_mask, index, config=config)


@register_adv_est("discounting")
def discounting(token_level_rewards, response_mask, lam, gamma=0.5, **others):
    assert not {"gamma", "lam"} & set(others)
    return gamma * lam * response_mask, response_mask


@register_adv_est("critic_needed")
def critic_needed(token_level_rewards, response_mask, values, gamma, lam):
    return values, values
"""


@pytest.fixture(autouse=True)
def files(tmp_path: Path, own_objectives: None) -> None:
    for name, text in {"loss": LOSS, "estimator": ESTIMATOR}.items():
        path = tmp_path / f"my_{name}.py"
        path.write_text(dedent(text))
        import_file(path, "external_lib")


def of(mode: str, aggregation: str = "token-mean", **kwargs: float) -> SurrogateSettings:
    actor = Config().actor.model_dump(mode="json") | {"loss_agg_mode": aggregation}
    actor |= {"clip_ratio_low": 0.2, "clip_ratio_high": 0.2}
    return SurrogateSettings(mode=mode, keys=actor, kwargs=kwargs)


def gradient(settings: SurrogateSettings) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    row_M = torch.tensor([1, 0, 0, 1, 2, 0])  # tokens of rows may alternate
    old_M = -2 * torch.rand(6, generator=generator)
    logp_M = (old_M + 0.5 * torch.randn(6, generator=generator)).requires_grad_()
    made = policy_loss(Sampled(logp_M, old_M, torch.tensor([1.0, 2, 2, 1, -1, 2]), row_M, 3), settings)
    return torch.autograd.grad(made.loss_M.sum(), logp_M)[0]


@pytest.mark.parametrize("mode", ["clipped", "older"])
def test_a_loss_over_padded_matrices_is_that_of_its_tokens(mode: str) -> None:
    check_policy_loss(of(mode))
    assert torch.equal(gradient(of(mode)), gradient(SurrogateSettings()))
    assert gradient(SurrogateSettings()).count_nonzero() not in (0, 6), "some tokens are clipped"


def test_keys_of_a_users_own_are_in_the_section() -> None:
    assert torch.equal(gradient(of("clipped", scale=3.0)), 3 * gradient(SurrogateSettings()))


@pytest.mark.parametrize(
    ("mode", "problem"),
    [
        ("own_mean", "must return what agg_loss"),
        ("scaled", "must return what agg_loss"),
        ("by_sequence", "averages by seq-mean-token-mean; set actor_rollout_ref.actor.loss_agg_mode"),
        ("greedy_needed", "needs greedy_log_prob, which Rally does not compute"),
    ],
)
def test_a_loss_that_cannot_be_exact_is_refused(mode: str, problem: str) -> None:
    with pytest.raises(PolicyLossError, match=problem):
        check_policy_loss(of(mode))


@pytest.mark.parametrize("estimator", ["by_loop", "by_group", "theirs"])
def test_an_estimator_over_padded_matrices_is_that_of_its_tokens(estimator: str) -> None:
    keys = Config().algorithm.model_dump(mode="json")
    rewards_N = torch.tensor([1.0, 0.0, 0.5, 0.25, 1.0, 0.0], dtype=torch.float64)
    scored = Scored(rewards_N, torch.tensor([0, 0, 0, 1, 1, 1]), torch.tensor([3, 1, 0, 2, 2, 5]))
    found_M = token_advantages(scored, CreditSettings(estimator=estimator, keys=keys))
    expected_M = token_advantages(scored, CreditSettings(estimator="grpo"))
    assert np.allclose(found_M, expected_M, atol=1e-5) and found_M.any()


def test_a_default_of_an_estimator_is_kept_as_in_verl() -> None:
    scored = Scored(torch.tensor([1.0, 0.0]).double(), torch.tensor([0, 0]), torch.tensor([1, 2]))
    settings = CreditSettings(estimator="discounting", gamma=0.75, lam=0.5, keys={})
    assert token_advantages(scored, settings).tolist() == [0.25] * 3


def test_an_estimator_with_a_critic_is_refused() -> None:
    with pytest.raises(EstimatorError, match="critic_needed needs values, which Rally does not compute"):
        check_estimator(CreditSettings(estimator="critic_needed", keys=Config().algorithm.model_dump(mode="json")))


def test_a_run_trains_with_both(home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In equal steps, whatever registers the functions; keys beside those of Rally reach them with a note."""
    monkeypatch.setattr(models, "_imported", set())
    monkeypatch.chdir(tmp_path)
    common = ["trainer.total_training_steps=1", "data.val_files=null"]
    with pytest.warns(UserWarning, match=f"{A}.policy_loss.scale is no key of Rally; .*loss_kwargs.scale gives it"):
        ours = run_config(
            home,
            tmp_path / "ours",
            f"{M}.external_lib=[my_loss.py,my_estimator]",
            f"{A}.policy_loss.loss_mode=clipped",
            f"{A}.policy_loss.scale=1.0",
            "algorithm.adv_estimator=by_loop",
            *common,
        )
    train(ours, Paper().console)
    train(run_config(home, tmp_path / "plain", *common), Paper().console)
    [(_, found)], [(_, expected)] = (list(RunFolder(tmp_path / name).read_metrics()) for name in ("ours", "plain"))
    assert found["actor/grad_norm"] == pytest.approx(expected["actor/grad_norm"], rel=1e-4)
    assert found["actor/pg_loss"] == pytest.approx(expected["actor/pg_loss"], abs=1e-6)
    assert found["mine/rows"] == 12 and "mine/rows" not in expected


def test_unknown_names_are_refused_before_weights(home: Path, tmp_path: Path) -> None:
    with pytest.raises(
        ValueError, match=r"loss_mode=clipt is none of vanilla, .*; use one of them, or set .*external_lib"
    ):
        load_config(overrides=[f"{A}.policy_loss.loss_mode=clipt"])
    with pytest.raises(ValueError, match=r"loss_kwargs has no effect with .*=vanilla, which is Rally's own"):
        load_config(overrides=[f"{A}.policy_loss.loss_kwargs.tau=1"])
    for key, problem in (
        (f"{A}.policy_loss.loss_mode=clipt", "loss_mode=clipt was not registered by .*my_loss.py; decorate"),
        ("algorithm.adv_estimator=by_lop", "adv_estimator=by_lop was not registered by .*my_loss.py; decorate"),
    ):
        config = run_config(home, tmp_path / "run", f"{M}.external_lib={tmp_path / 'my_loss.py'}", key)
        with pytest.raises(ValueError, match=problem):
            train(config, Paper().console)
    config = run_config(home, tmp_path / "run", f"{M}.external_lib={tmp_path / 'nowhere.py'}")
    with pytest.raises(ValueError, match=r"external_lib=.*nowhere.py cannot be imported \(FileNotFoundError"):
        train(config, Paper().console)
