"""Every method trains on exactly the sampled tokens: packed or padded, split or whole, with any observed tokens
between."""

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from train_cases import (
    Gradients,
    KeepingPolicy,
    Paper,
    assert_equal,
    calm_model,
    difference,
    episode,
    run_config,
    segment,
    size,
    told_episode,
    uneven_episodes,
)
from transformers import PreTrainedModel

from rally.algos import credit_assignment, losses
from rally.algos import losses as surrogates
from rally.algos.credit_assignment import CreditSettings
from rally.algos.losses import SURROGATES, Sampled, SurrogateSettings, policy_loss
from rally.algos.off_policy_correction import CorrectionSettings
from rally.models import attention
from rally.rewards.shaping import ON_TURNS
from rally.runs.train import train
from rally.track import RunFolder
from rally.train.batch import TrainBatch, TurnRewardError, batch_of, build_batch, rows_of, scored_of, turns_of_episodes
from rally.train.forward.logprobs import token_logprobs
from rally.train.loss_inputs import corrected_rows, kl_rewards, marked_rows, over_rows
from rally.train.micro_batches import MicroBatchLimits
from rally.train.update import UpdateSettings, update_policy

CREDITS = [
    CreditSettings(),
    CreditSettings(estimator="reinforce_plus_plus", gamma=0.9),
    CreditSettings(turn_rewards="returns", gamma=0.7),
    CreditSettings(estimator="gigpo", gamma=0.7),
]
CPU = torch.device("cpu")


def settings_of(mode: str, **changes: Any) -> UpdateSettings:
    wide = SurrogateSettings(mode=mode, marked_share=0.1, covariance_low=0.0, covariance_high=9.0)
    return replace(UpdateSettings(mini_batch_groups=100, surrogate=wide, aggregation="seq-mean-token-mean"), **changes)


def gradient(batch: TrainBatch, settings: UpdateSettings) -> Gradients:
    policy = KeepingPolicy(calm_model())
    torch.manual_seed(0)  # clip_cov samples tokens
    update_policy(policy, batch, settings)
    [kept] = policy.kept
    return kept


def padded_logprobs(model: PreTrainedModel, batch: TrainBatch, temperature: float) -> torch.Tensor:
    """Of every sampled token, row by row, from one ordinary padded forward."""
    width = max(len(row.ids) for row in batch.rows)
    ids = torch.tensor([[*row.ids, *[0] * (width - len(row.ids))] for row in batch.rows])
    mask = torch.tensor([[1] * len(row.ids) + [0] * (width - len(row.ids)) for row in batch.rows])
    logp = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits / temperature, -1)
    return torch.stack([logp[i, p - 1, row.ids[p]] for i, row in enumerate(batch.rows) for p in row.sampled])


def padded_gradient(batch: TrainBatch, settings: UpdateSettings) -> Gradients:
    model = calm_model()
    torch.manual_seed(0)
    rows = marked_rows(batch.rows, settings.surrogate) if settings.surrogate.marks_tokens else batch.rows
    tokens = Sampled(
        padded_logprobs(model, batch, settings.temperature),
        torch.tensor([p for row in rows for p in row.logprobs]),
        batch.advantages_M,
        torch.tensor([i for i, row in enumerate(rows) for _ in row.sampled]),
        len(rows),
        torch.tensor([m for row in rows for m in (row.marked if len(row.marked) else (False,) * len(row.sampled))]),
    )
    weights_N = losses.token_weights(batch.tokens_N, settings.aggregation, settings.loss_scale)
    weights_M = weights_N[torch.tensor([row.episode for row in rows for _ in row.sampled])]
    (policy_loss(tokens, settings.surrogate).loss_M * weights_M).sum().backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("mode", [*SURROGATES])
def test_packed_equals_padded(mode: str) -> None:
    batch, settings = build_batch(uneven_episodes(), CREDITS[2]), settings_of(mode, temperature=0.9)
    expected = padded_gradient(batch, settings)
    assert_equal(gradient(batch, settings), expected)


@pytest.mark.parametrize("mode", [*SURROGATES])
@pytest.mark.parametrize("cut", [{"max_tokens": 1}, {"max_tokens": 30}, {"max_rows": 2}])
def test_one_micro_batch_equals_many(mode: str, cut: dict[str, int]) -> None:
    batch = build_batch(uneven_episodes())
    whole = gradient(batch, settings_of(mode))
    assert_equal(gradient(batch, settings_of(mode, **cut)), whole)


@pytest.mark.parametrize("mode", [*SURROGATES])
def test_the_loss_reaches_exactly_the_positions_before_sampled_tokens(mode: str) -> None:
    """By autograd: which hidden states have a gradient."""
    rng, model = random.Random(2), calm_model()
    patterns = ["s", "ooso", "ssoos"]  # by length, as they are packed
    segments = [segment(rng, pattern, prompt=4) for pattern in patterns]
    batch = build_batch([episode(f"a{i}", "a", float(i), s) for i, s in enumerate(segments)])
    batch = replace(batch, rows=[replace(row, advantages=(1.0,) * len(row.sampled)) for row in batch.rows])
    hidden: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: Any) -> None:
        hidden.append(output.last_hidden_state)
        output.last_hidden_state.retain_grad()

    policy = KeepingPolicy(model)
    model.base_model.register_forward_hook(keep)
    update_policy(policy, batch, settings_of(mode, surrogate=SurrogateSettings(mode=mode, low=1e9, high=1e9)))
    reached = [i for i, g in enumerate(hidden[-1].grad[0].abs().sum(-1).tolist()) if g > 0]
    expected, start = [], 0
    for s, pattern in zip(segments, patterns, strict=True):
        expected += [start + len(s.prompt_ids) + i - 1 for i, letter in enumerate(pattern) if letter == "s"]
        start += len(s.prompt_ids) + pattern.rindex("s")
    assert reached == expected


def test_tool_rewards_land_on_the_turn_that_called() -> None:
    """The example of tests/algos/test_algos_credit_assignment.py with observed tokens between the turns."""
    episodes = [
        told_episode("a", 1.0, "ssoos", [0.5], ["x"]),
        told_episode("b", 0.0, "soosoooss", [None, 1.0], ["x", "y"]),
    ]
    turns = turns_of_episodes(episodes)
    assert turns.episode_K.tolist() == [0, 0, 1, 1, 1] and turns.tokens_K.tolist() == [2, 1, 1, 1, 2]
    assert turns.rewards_K.tolist() == [0.5, 0, 0, 1, 0]
    assert turns.states_K.tolist() == [0, 1, 0, 1, 2]
    credit_assignment = CreditSettings(turn_rewards="returns", gamma=0.5, by_std=False)
    rows = build_batch(episodes, credit_assignment).rows
    assert rows[0].advantages == pytest.approx([0.3, 0.3, 0.3])
    assert rows[1].advantages == pytest.approx([-0.2, 0.3, -0.7, -0.7])
    assert (
        build_batch(episodes).rows[1].advantages.tolist()
        == build_batch(episodes, CreditSettings(gamma=0.1)).rows[1].advantages.tolist()
    )


def test_rewards_that_a_loop_of_ones_own_gives_its_turns() -> None:
    plain = episode("a", "g", 1.0, segment(random.Random(0), "ssoos"), extra={"turn_rewards": [0.25, 2]})
    assert turns_of_episodes([plain]).rewards_K.tolist() == [0.25, 2.0]
    with pytest.raises(TurnRewardError, match="returned 1 turn_rewards for an episode of 2 assistant turns; return"):
        turns_of_episodes([replace(plain, extra={"turn_rewards": [1.0]})])


def test_a_batch_in_which_turns_differ_has_a_signal_though_outcomes_are_equal() -> None:
    episodes = [told_episode("a", 1.0, "ssoos", [0.5], ["x"]), told_episode("b", 1.0, "sos", [0.0], ["x"])]
    assert build_batch(episodes).live_share == 0
    assert build_batch(episodes, CreditSettings(turn_rewards="returns")).live_share == 1


def on_other_weights(seed: int = 5) -> TrainBatch:
    """Rows whose recorded log-probabilities are those of another policy."""
    sampler, batch = calm_model(seed=seed), build_batch(uneven_episodes())
    with torch.no_grad():
        parts = padded_logprobs(sampler, batch, 1.0).split([len(row.sampled) for row in batch.rows])
    return replace(
        batch, rows=[replace(row, logprobs=tuple(p.tolist())) for row, p in zip(batch.rows, parts, strict=True)]
    )


def test_correction_weighs_by_the_trainers_own_old_policy() -> None:
    """On the first mini-batch the ratio is then 1, so the gradient is that of weight times advantage times log-prob."""
    batch = on_other_weights()
    chosen = CorrectionSettings(level="token", threshold=1.5)
    settings = settings_of("vanilla", correction=chosen)
    model = calm_model()
    logp_M = padded_logprobs(model, batch, 1.0)
    recorded_M = torch.tensor([p for row in batch.rows for p in row.logprobs])
    weights_M = torch.exp(logp_M.detach() - recorded_M).clamp(max=1.5)
    counts_N = losses.token_weights(batch.tokens_N, settings.aggregation)
    counts_M = counts_N[torch.tensor([row.episode for row in batch.rows for _ in row.sampled])]
    (-logp_M * batch.advantages_M * weights_M * counts_M).sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_equal(gradient(batch, settings), expected)
    metrics = update_policy(KeepingPolicy(calm_model()), batch, settings)
    assert metrics["rollout_corr/rollout_is_mean"] == pytest.approx(float(weights_M.mean()), rel=1e-4)
    assert metrics["rollout_corr/rollout_is_max"] == pytest.approx(1.5)
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-6) and metrics["actor/rollout_mismatch_kl"] > 0.01


def test_reinforce_in_bypass_mode_is_the_gradient_of_weight_times_advantage_times_log_prob() -> None:
    batch = on_other_weights()
    chosen = CorrectionSettings(level="sequence", threshold=1.5, normalize=True, bypass=True)
    settings = settings_of("gpg", correction=chosen)
    model = calm_model()
    logp_M = padded_logprobs(model, batch, 1.0)
    sizes = [len(row.sampled) for row in batch.rows]
    ratios_R = [
        torch.exp(p.detach().sum() - sum(row.logprobs)).clamp(max=1.5)
        for p, row in zip(logp_M.split(sizes), batch.rows, strict=True)
    ]
    mean = sum(ratios_R) / len(ratios_R)
    weights_M = torch.cat([(ratio / mean).expand(size) for ratio, size in zip(ratios_R, sizes, strict=True)])
    counts_N = losses.token_weights(batch.tokens_N, settings.aggregation)
    counts_M = counts_N[torch.tensor([row.episode for row in batch.rows for _ in row.sampled])]
    (-logp_M * batch.advantages_M * weights_M * counts_M).sum().backward()
    expected = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    assert_equal(gradient(batch, settings), expected, tolerance=1e-5)  # the ratio of a sequence is a float32 sum
    assert_equal(gradient(batch, replace(settings, max_rows=2)), expected, tolerance=1e-5)


def test_bypass_mode_rejects_by_the_policy_of_each_mini_batch_and_keeps_the_samplers_ratio() -> None:
    batch, model = on_other_weights(), calm_model()
    chosen = CorrectionSettings(rejections=(("token_k1", 0.9, 1.1),), bypass=True)
    settings = settings_of("vanilla", correction=chosen)
    with torch.no_grad():
        logp_M = padded_logprobs(model, batch, 1.0)
    rows, _ = corrected_rows(batch.rows, logp_M, chosen)
    assert [row.logprobs.tolist() for row in rows] == [row.logprobs.tolist() for row in batch.rows]
    assert_equal(gradient(batch, settings), gradient(replace(batch, rows=rows), settings_of("vanilla")))
    step = replace(settings, mini_batch_groups=1)
    metrics = update_policy(KeepingPolicy(calm_model()), batch, step)
    assert 0 < metrics["rollout_corr/rollout_rs_masked_fraction"] < 1 and abs(metrics["actor/ppo_kl"]) > 1e-3


@pytest.mark.parametrize("cut", [{"max_tokens": 1}, {"max_rows": 2}])
def test_correction_is_the_same_however_the_batch_is_cut(cut: dict[str, int]) -> None:
    chosen = CorrectionSettings(level="sequence", threshold=2.0, rejections=(("token_k1", 0.5, 2.0),))
    whole = gradient(on_other_weights(), settings_of("gspo", correction=chosen))
    parts = gradient(on_other_weights(), settings_of("gspo", correction=chosen, **cut))
    assert_equal(parts, whole)


def test_rejected_tokens_have_no_policy_gradient_and_are_counted() -> None:
    batch = on_other_weights()
    logp_M = torch.tensor([p for row in batch.rows for p in row.logprobs])
    logp_M[0] += 1.0
    chosen = CorrectionSettings(rejections=(("token_k1", 0.5, 2.0),))
    rows, metrics = corrected_rows(batch.rows, logp_M, chosen)
    assert rows[0].weights[:2].tolist() == [0.0, 1.0] and rows[0].logprobs[0] == pytest.approx(float(logp_M[0]))
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 / len(logp_M))


def test_correction_leaves_an_engine_that_samples_the_policy_alone() -> None:
    batch = on_other_weights(seed=0)
    plain = gradient(batch, settings_of("vanilla"))
    corrected = gradient(batch, settings_of("vanilla", correction=CorrectionSettings(level="token")))
    assert difference(plain, corrected) <= 1e-5 * size(plain)


def test_the_kl_in_the_reward_is_that_of_each_token_to_the_reference() -> None:
    reference, episodes = calm_model(seed=3), uneven_episodes()
    expected_M = padded_logprobs(reference, build_batch(episodes), 1.0).detach()
    attention.install(reference)
    rows = rows_of(episodes)
    found_M = over_rows(rows, lambda packed: token_logprobs(reference, packed).logp_M, CPU, MicroBatchLimits(30))
    assert torch.allclose(found_M, expected_M, atol=1e-5)
    recorded_M = torch.tensor([p for row in rows for p in row.logprobs])
    penalties_M = kl_rewards(rows, found_M, "kl", 0.1)
    assert torch.allclose(penalties_M, -0.1 * (recorded_M - expected_M), atol=1e-5)
    flat = build_batch(episodes, None, penalties_M)
    assert flat.live_share == 1, "groups with equal rewards still differ in their KL"


def test_the_keys_reach_the_run(home: Path, tmp_path: Path) -> None:
    config = run_config(
        home,
        tmp_path / "run",
        "algorithm={adv_estimator: rloo, turn_rewards: turn_baseline, gamma: 0.9}",
        "algorithm.use_kl_in_reward=true",
        "algorithm.kl_ctrl.kl_coef=0.5",
        "algorithm.rollout_correction={rollout_is: token, rollout_rs: seq_mean_k3, rollout_rs_threshold: 0.1}",
        "actor_rollout_ref.actor.policy_loss={loss_mode: kl_cov, kl_cov_ratio: 0.1}",
        "actor_rollout_ref.actor.optim.lr=0.01",
        "trainer.total_training_steps=2",
        "data.val_files=null",
    )
    train(config, Paper().console)
    first, second = [row.metrics for row in RunFolder(tmp_path / "run").read_metrics() if row.step]
    assert first["actor/reward_kl_penalty"] == pytest.approx(0, abs=1e-4), "the first step is the reference itself"
    assert abs(second["actor/reward_kl_penalty"]) > 1e-3 and second["actor/reward_kl_penalty_coeff"] == 0.5
    assert first["rollout_corr/rollout_is_mean"] == pytest.approx(1, abs=1e-3)
    assert first["rollout_corr/rollout_rs_masked_fraction"] == 0
    assert second["engine/weight_version"] == first["engine/weight_version"] + 1
    assert 0.05 < second["actor/pg_clipfrac"] < 0.15, "kl_cov marks a tenth of the tokens"


def test_what_is_recorded_on_turns_and_in_the_reward_counts_once() -> None:
    """Shaping adds to the reward and to the turn; an estimator that adds up turns must not take both."""
    made = [replace(e, reward=1.0 + 0.5 * i, group="g") for i, e in enumerate(uneven_episodes()[:2])]
    shaped = [replace(e, reward_info={ON_TURNS: 0.5 * i}) for i, e in enumerate(made)]
    assert build_batch(shaped).rewards_N.tolist() == [1.0, 1.5]
    assert build_batch(shaped, CreditSettings(turn_rewards="returns")).rewards_N.tolist() == [1.0, 1.0]


class LookedUp(dict[str, Any]):
    """A registry that supports only lookup by name."""

    def refuse(self, *_: object) -> Any:
        raise AssertionError("a step went through all methods there are")

    __iter__ = __len__ = keys = values = items = refuse


def test_a_step_looks_its_method_up_and_goes_through_no_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    """So the time of an update does not grow with the number of methods."""
    monkeypatch.setattr(credit_assignment, "ESTIMATORS", LookedUp(credit_assignment.ESTIMATORS))
    monkeypatch.setattr(surrogates, "SURROGATES", LookedUp(surrogates.SURROGATES))
    with pytest.raises(AssertionError, match="went through all methods"):
        list(surrogates.SURROGATES)
    for mode in ("vanilla", "clip_cov"):
        batch = build_batch(uneven_episodes(), CreditSettings(estimator="rloo", turn_rewards="returns"))
        assert update_policy(KeepingPolicy(calm_model()), batch, settings_of(mode))["actor/grad_norm"] > 0


@pytest.mark.parametrize("wrong", ["a row without any", "one too many"])
def test_rows_are_given_as_many_advantages_as_they_sampled_tokens(wrong: str) -> None:
    episodes = uneven_episodes()
    rows = rows_of(episodes)
    sampled = sum(len(row.sampled) for row in rows)
    given = sampled + 1 if wrong == "one too many" else sampled - len(rows[-1].sampled)
    with pytest.raises(AssertionError, match="one advantage for each sampled token"):
        batch_of(rows, scored_of(episodes, CreditSettings()), torch.ones(given))
