"""The critic reads the policy's histories and is trained only at sampled tokens; PPO runs, resumes bit for bit, and
deletes old critics as configured."""

import json
import random
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_models import FAMILIES, make_model
from test_train_trainer import NO_VALIDATION, actor, metrics_of
from train_cases import (
    Gradients,
    KeepingPolicy,
    Paper,
    difference,
    episode,
    observed_otherwise,
    run_config,
    same,
    segment,
    size,
    uneven_episodes,
    weights,
)
from transformers import AutoModel, PreTrainedModel

from rally.algos.credit_assignment import CreditSettings
from rally.algos.gae import value_loss
from rally.algos.losses import token_weights
from rally.models.load import load_model
from rally.runs.build.policy_and_critic import critic_of
from rally.runs.evaluate import evaluate
from rally.runs.train import train
from rally.train.batch import TrainBatch, rows_of
from rally.train.checkpoint.store import CheckpointError
from rally.train.critic import Critic, CriticSettings
from rally.train.packing import pack
from rally.train.reference import KlController
from rally.train.value_model import load_value_model, token_values, value_model_part, with_value_head

CPU = torch.device("cpu")
CREDITS = [CreditSettings(estimator=name, gamma=0.9, lam=0.8) for name in ("gae", "turn_gae")]
PPO = ("algorithm.adv_estimator=gae", "critic.optim.lr=0.001", *NO_VALIDATION)


def opinionated(family: str = "qwen2", seed: int = 0) -> PreTrainedModel:
    """A value model whose head is not zero."""
    body = make_model(family, seed).base_model
    head = {"weight": torch.randn(1, 96) / 10, "bias": torch.randn(1)}
    return with_value_head(body, head)


def critic_on(model: PreTrainedModel, **settings: Any) -> Critic:
    return Critic(KeepingPolicy(model), CriticSettings(mini_batch_groups=100, **settings))


def gradient(batch: TrainBatch, **settings: Any) -> Gradients:
    critic = critic_on(opinionated(), **settings)
    critic.update(batch)
    [kept] = critic.learner.kept  # type: ignore[attr-defined]
    return kept


def padded_values(model: PreTrainedModel, batch: TrainBatch) -> torch.Tensor:
    """The value before every sampled token, row by row, from one ordinary padded forward."""
    width = max(len(row.ids) for row in batch.rows)
    ids = torch.tensor([[*row.ids, *[0] * (width - len(row.ids))] for row in batch.rows])
    mask = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in batch.rows])
    values = model.get_submodule("value_head")(model(input_ids=ids, attention_mask=mask).last_hidden_state).squeeze(-1)
    return torch.stack([values[i, p - 1] for i, row in enumerate(batch.rows) for p in row.sampled])


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.mark.parametrize("family", FAMILIES)
def test_values_are_those_of_an_ordinary_forward(family: str) -> None:
    batch = critic_on(model := opinionated(family)).judge(uneven_episodes(), CREDITS[0], None).critic
    expected = padded_values(model, batch).detach()
    found = torch.tensor([v for row in batch.rows for v in row.values])
    assert float(expected.std()) > 0.01 and torch.allclose(found, expected, atol=1e-5)


def test_a_new_critic_expects_nothing() -> None:
    model = with_value_head(make_model().base_model)
    judgement = critic_on(model).judge(uneven_episodes(), CREDITS[0], None)
    assert judgement.metrics["critic/values/max"] == judgement.metrics["critic/values/min"] == 0
    assert judgement.metrics["critic/returns/max"] == 2, "so a return is what came"


@pytest.mark.parametrize("credit", CREDITS, ids=lambda credit: credit.estimator)
def test_the_value_gradient_is_that_of_a_padded_forward(credit: CreditSettings) -> None:
    batch = critic_on(model := opinionated()).judge(uneven_episodes(), credit, None).critic
    batch = replace(batch, rows=[replace(row, values=row.values + np.float32(0.3)) for row in batch.rows])
    torch.manual_seed(0)
    expected_model = opinionated()
    old, returns = (torch.tensor([x for r in batch.rows for x in getattr(r, n)]) for n in ("values", "returns"))
    weights_N = token_weights(batch.tokens_N, "seq-mean-token-mean")
    weights_D = weights_N[torch.tensor([row.episode for row in batch.rows for _ in row.sampled])]
    (value_loss(padded_values(expected_model, batch), old, returns, 0.2).loss_D * weights_D).sum().backward()
    expected = {n: p.grad for n, p in expected_model.named_parameters() if p.grad is not None}
    torch.manual_seed(0)
    options: dict[str, Any] = {"aggregation": "seq-mean-token-mean", "clip": 0.2}
    whole = gradient(batch, **options)
    assert difference(whole, expected) <= 5e-6 * size(expected)
    for cut in ({"max_tokens": 1}, {"max_tokens": 30}, {"max_rows": 2}):
        torch.manual_seed(0)
        assert difference(whole, gradient(batch, **options, **cut)) <= 1e-6 * size(whole)
    assert same(weights(model), weights(expected_model)), "judging changes nothing"


@pytest.mark.parametrize(("credit", "letters"), [(CREDITS[0], "sS"), (CREDITS[1], "S")])
def test_the_value_loss_reaches_exactly_the_positions_before_decisions(credit: CreditSettings, letters: str) -> None:
    """By autograd: which hidden states have a gradient. S is the first token of a turn, s another sampled one."""
    patterns = ["S", "ooSo", "SsooSs", "SoS"]
    segments = [segment(random.Random(i), pattern.lower(), prompt=4) for i, pattern in enumerate(patterns)]
    episodes = [episode(f"a{i}", "a", 1.0 + i, one) for i, one in enumerate(segments)]
    critic = critic_on(model := opinionated(), max_rows=1)
    batch = critic.judge(episodes, credit, None).critic
    hidden: dict[int, torch.Tensor] = {}

    def keep(_module: object, _args: object, options: dict[str, Any], output: Any) -> None:
        output.last_hidden_state.retain_grad()
        hidden[int(options["input_ids"][0, 0])] = output.last_hidden_state

    model.register_forward_hook(keep, with_kwargs=True)
    critic.update(batch)
    for one, pattern in zip(segments, patterns, strict=True):
        reached = hidden[one.ids[0]].grad[0].abs().sum(-1)  # type: ignore[index]
        places = [3 + i for i, letter in enumerate(pattern) if letter in letters]
        assert [i for i, g in enumerate(reached.tolist()) if g > 0] == places


@pytest.mark.parametrize("credit", CREDITS, ids=lambda credit: credit.estimator)
def test_with_the_same_values_nothing_observed_changes_an_advantage(credit: CreditSettings) -> None:
    episodes = uneven_episodes()
    others = [observed_otherwise(e, 5) for e in episodes]
    assert [s.ids for e in episodes for s in e.segments] != [s.ids for e in others for s in e.segments]
    critic = critic_on(with_value_head(make_model().base_model))  # its values are 0 everywhere
    first, second = (critic.judge(some, credit, None) for some in (episodes, others))
    assert [row.advantages.tolist() for row in first.policy.rows] == [r.advantages.tolist() for r in second.policy.rows]
    assert [row.returns.tolist() for row in first.critic.rows] == [row.returns.tolist() for row in second.critic.rows]
    assert first.critic.tokens_N.tolist() == second.critic.tokens_N.tolist()


def test_an_episode_is_one_chain_over_its_segments() -> None:
    rng = random.Random(0)
    two = episode("a", "a", 1.0, segment(rng, "ss"), segment(rng, "s"))
    critic = critic_on(with_value_head(make_model().base_model))
    rows = critic.judge([two], CreditSettings(estimator="gae", gamma=0.5), None).critic.rows
    assert [row.returns.tolist() for row in rows] == [[0.25, 0.5], [1.0]]


def test_a_critic_learns_what_to_expect() -> None:
    torch.manual_seed(1)
    model = with_value_head(make_model().base_model)
    critic = critic_on(model, epochs=25)
    learner = critic.learner
    for group in learner.optimizer.param_groups:
        group["lr"] = 1e-2
    episodes = uneven_episodes()
    before = critic.judge(episodes, CREDITS[0], None)
    learned = critic.update(before.critic)
    assert learned["critic/vf_loss"] > 0 and learned["critic/grad_norm"] > 0
    after = critic.judge(episodes, CREDITS[0], None)
    assert before.metrics["critic/vf_explained_var"] < 0.1 < 0.7 < after.metrics["critic/vf_explained_var"]


@pytest.mark.parametrize("family", FAMILIES)
def test_a_value_model_comes_back_from_its_folder(family: str, tmp_path: Path) -> None:
    model = opinionated(family)
    write, before = value_model_part(model), weights(model)
    with torch.no_grad():
        next(model.parameters()).add_(1.0)  # after the copy was made
    write(tmp_path)
    again = load_value_model(str(tmp_path))
    assert same(before, weights(again))
    with torch.no_grad():
        next(again.parameters()).add_(1.0)
    packed = pack(rows_of(uneven_episodes()), CPU)
    assert torch.equal(token_values(model, packed), token_values(again, packed))
    plain = AutoModel.from_pretrained(tmp_path)
    assert type(plain) is type(model) and plain.config._attn_implementation != "rally"


def test_a_critic_begins_as_the_policy(home: Path) -> None:
    model = load_value_model(str(home / "model"))
    policy = load_model(str(home / "model")).base_model
    ours = {name: value for name, value in weights(model).items() if not name.startswith("value_head")}
    assert same(ours, weights(policy)) and not model.get_submodule("value_head").weight.any()


def test_a_critic_recomputes_as_many_layers_as_its_own_key_says(home: Path, tmp_path: Path) -> None:
    def count(*keys: str) -> int | None:
        checkpointing = "actor_rollout_ref.model.enable_gradient_checkpointing=true"
        critic = critic_of(ppo_config(home, tmp_path, checkpointing, *keys), None, 1)
        assert critic is not None
        return None if critic.learner.recompute is None else critic.learner.recompute.count

    of_policy, own = "actor_rollout_ref.model.recompute_num_layers=1", "critic.model.recompute_num_layers=0"
    assert (count(), count(of_policy), count(own), count(of_policy, own)) == (None, 1, 0, 0)


def critic_weights(folder: Path, step: int) -> dict[str, torch.Tensor]:
    return weights(load_value_model(str(folder / "checkpoints" / f"global_step_{step}" / "critic")))


@pytest.fixture(scope="module")
def ppo(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three deterministic steps; the first trains only the critic; the KL coefficient adapts."""
    folder = tmp_path_factory.mktemp("ppo") / "whole"
    train(ppo_config(home, folder), Paper().console)
    return folder


def ppo_config(home: Path, folder: Path, *more: str) -> Any:
    return run_config(
        home,
        folder,
        *PPO,
        "actor_rollout_ref.rollout.deterministic=true",
        "trainer.critic_warmup=1",
        "trainer.max_critic_ckpt_to_keep=2",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl={type: adaptive, kl_coef: 0.01, target_kl: 0.001, horizon: 100}",
        *more,
    )


def test_the_metrics_of_a_critic_have_the_names_users_know(ppo: Path) -> None:
    names = ["vf_loss", "vf_clipfrac", "vpred_mean", "grad_norm", "lr", "vf_explained_var"]
    names += [f"{kind}/{what}" for kind in ("values", "returns") for what in ("mean", "max", "min")]
    for step in (1, 2, 3):
        metrics = metrics_of(ppo, step)
        wanted = [*(f"critic/{name}" for name in names), "timing_s/values", "timing_s/update_critic"]
        assert [name for name in wanted if name not in metrics] == []
        assert metrics["timing_s/update_actor"] > 0 and metrics["critic/grad_norm"] > 0
    assert metrics_of(ppo, 1)["critic/values/mean"] == 0 != metrics_of(ppo, 2)["critic/values/mean"]


def test_while_the_critic_warms_up_the_policy_stays(ppo: Path, home: Path) -> None:
    start = weights(load_model(str(home / "model")))
    assert same(actor(ppo, 1), start) and not same(actor(ppo, 2), start)
    assert "actor/pg_loss" not in metrics_of(ppo, 1) and "actor/pg_loss" in metrics_of(ppo, 2)
    assert not same(critic_weights(ppo, 2), critic_weights(ppo, 3))


def test_old_critics_go_and_their_checkpoints_stay_whole(ppo: Path, home: Path, tmp_path: Path) -> None:
    kept = sorted(path.parent.name for path in (ppo / "checkpoints").glob("*/critic"))
    assert kept == ["global_step_2", "global_step_3"] and actor(ppo, 1)
    config = ppo_config(
        home,
        tmp_path,
        "trainer.resume_mode=resume_path",
        f"trainer.resume_from_path={ppo / 'checkpoints' / 'global_step_1'}",
    )
    with pytest.raises(CheckpointError, match=r"global_step_1 holds no critic; resume from one that does, or start a"):
        train(config, Paper().console)


def test_a_resumed_run_ends_with_the_same_bits(ppo: Path, home: Path, tmp_path: Path) -> None:
    cut = Path(shutil.copytree(ppo, tmp_path / "cut"))
    shutil.rmtree(cut / "checkpoints" / "global_step_3")
    train(ppo_config(home, cut), Paper().console)
    assert same(actor(cut, 3), actor(ppo, 3)) and same(critic_weights(cut, 3), critic_weights(ppo, 3))
    ours, theirs = (metrics_of(folder, 3) for folder in (cut, ppo))
    # versions are counted from the start
    timed = ("timing_s/", "timing_per_token_ms/", "perf/", "tool/latency", "tool/queue", "engine/")
    assert {k: (ours[k], theirs[k]) for k in theirs if not k.startswith(timed) and ours[k] != theirs[k]} == {}


def test_the_kl_coefficient_moves_and_is_resumed(ppo: Path) -> None:
    first, second, third = (metrics_of(ppo, step)["actor/reward_kl_penalty_coeff"] for step in (1, 2, 3))
    assert first == 0.01
    # The policy is the reference in the first two steps: a KL of 0 is as far below the target as counts, 12 episodes.
    assert second == pytest.approx(0.01 * (1 - 0.2 * 12 / 100)) and third == pytest.approx(second**2 / first)


def test_a_run_over_turns(home: Path, tmp_path: Path) -> None:
    turns = ("algorithm.adv_estimator=turn_gae", "algorithm.lam=0.9", "trainer.total_training_steps=2")
    train(run_config(home, tmp_path, *PPO, *turns, "actor_rollout_ref.rollout.n=1"), Paper().console)
    assert metrics_of(tmp_path, 2)["critic/grad_norm"] > 0 and metrics_of(tmp_path, 2)["groups/live_share"] == 1


def test_an_evaluation_loads_no_critic(ppo: Path, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.runs.build.policy_and_critic.load_value_model", lambda *_: pytest.fail("loaded"))
    config = run_config(home, tmp_path, *PPO[:2], f"actor_rollout_ref.model.path={ppo}/checkpoints/global_step_3/actor")
    assert evaluate(config, Paper().console).metrics


def test_a_coefficient_far_from_its_target_moves_by_a_fifth_of_the_horizon() -> None:
    control = KlController(coefficient=1.0, target=0.1, horizon=100)
    control.update(10.0, 50)
    assert control.coefficient == pytest.approx(1.1)
    control.update(0.105, 50)  # 5 % over
    assert control.coefficient == pytest.approx(1.1 * 1.025)
    control.update(0.0, 50)
    assert control.coefficient == pytest.approx(1.1 * 1.025 * 0.9)


def test_a_fixed_coefficient_is_that_of_the_configuration(tmp_path: Path) -> None:
    KlController(coefficient=0.5, target=0.1).part()(tmp_path)
    fixed, adaptive = KlController(coefficient=0.2), KlController(coefficient=0.2, target=0.3)
    for control in (fixed, adaptive):
        control.update(9.0, 0)
        control.restore(json.loads((tmp_path / "reward_kl.json").read_text(encoding="utf-8")))
    assert (fixed.coefficient, adaptive.coefficient) == (0.2, 0.5)
