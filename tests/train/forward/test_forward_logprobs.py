"""Log-probabilities and gradients equal an ordinary forward's: packed, split, chunked or checkpointed."""

import copy
import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from small_models import VOCABULARY, full_logprobs, make_model
from train_cases import (
    Gradients,
    KeepingPolicy,
    assert_equal,
    calm_model,
    difference,
    episode,
    segment,
    small_policy,
    uneven_episodes,
)
from transformers import PreTrainedModel

from rally.algos import losses
from rally.algos.losses import SurrogateSettings
from rally.algos.off_policy_correction import CorrectionSettings
from rally.engines.embedded import EngineCore
from rally.models import attention
from rally.train.batch import TrainBatch, build_batch
from rally.train.forward import logprobs
from rally.train.packing import Row, micro_batches, pack
from rally.train.reference import FrozenModel
from rally.train.update import MismatchError, UpdateSettings, update_policy
from rally.types import Episode, SamplingParams, Segment

MODES = ("token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "seq-mean-token-sum-norm")
CPU = torch.device("cpu")


def update_settings(**changes: object) -> UpdateSettings:
    return replace(UpdateSettings(mini_batch_groups=100, loss_scale=50.0), **changes)


def gradient(episodes: list[Episode], settings: UpdateSettings, *, checkpointing: bool = False) -> Gradients:
    policy = KeepingPolicy(calm_model(), checkpointing)
    update_policy(policy, build_batch(episodes), settings)
    [kept] = policy.kept
    return kept


def padded_gradient(episodes: list[Episode], settings: UpdateSettings) -> Gradients:
    """The reference: one ordinary padded forward over every segment, the loss written out token by token."""
    model, batch = calm_model(), build_batch(episodes)
    pairs = [(i, s) for i, e in enumerate(episodes) for s in e.segments]
    width = max(len(s.ids) for _, s in pairs)
    ids = torch.tensor([[*s.ids, *[0] * (width - len(s.ids))] for _, s in pairs])
    mask = torch.tensor([[1] * len(s.ids) + [0] * (width - len(s.ids)) for _, s in pairs])
    logp = torch.log_softmax(model(input_ids=ids, attention_mask=mask).logits / settings.temperature, -1)
    weights = losses.token_weights(batch.tokens_N, settings.aggregation, settings.loss_scale)
    total = torch.zeros(())
    for row, (i, s) in enumerate(pairs):
        for at, (token, sampled, old) in enumerate(
            zip(s.response_ids, s.response_mask, s.response_logprobs, strict=True), start=len(s.prompt_ids)
        ):
            if sampled:
                now, advantage = logp[row, at - 1, token], torch.tensor(batch.rows[row].advantages[0])
                ratio = torch.exp(now - old)
                worst = torch.maximum(-advantage * ratio, -advantage * ratio.clamp(0.8, 1.2))
                total = total + weights[i] * (torch.minimum(worst, -advantage * 3.0) if advantage < 0 else worst)
    total.backward()
    return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("family", ["qwen2", "llama"])
def test_packed_logprobs_equal_an_ordinary_forward_of_each_row(family: str) -> None:
    model = make_model(family)
    plain = copy.deepcopy(model)
    attention.install(model)
    rows = build_batch(uneven_episodes()).rows
    found = logprobs.token_logprobs(model, pack(rows, CPU), temperature=0.8).logp_M.detach()
    expected = [full_logprobs(plain, list(r.ids), 1, 0.8)[p - 1] for r in rows for p in r.sampled]
    assert float((found - torch.tensor(expected)).abs().max()) <= 1e-5


@settings(max_examples=15, deadline=None)
@given(st.lists(st.tuples(st.integers(1, 30), st.integers(1, 20)), min_size=1, max_size=6), st.integers(0, 9))
def test_a_row_does_not_see_its_neighbours(sizes: list[tuple[int, int]], seed: int) -> None:
    rng, model = random.Random(seed), make_model(seed=1)
    attention.install(model)
    rows = [Row.of(segment(rng, "s" * n, prompt), i) for i, (prompt, n) in enumerate(sizes)]
    together = logprobs.token_logprobs(model, pack(rows, CPU)).logp_M
    alone = torch.cat([logprobs.token_logprobs(model, pack([row], CPU)).logp_M for row in rows])
    assert float((together - alone).detach().abs().max()) <= 1e-5


@pytest.mark.parametrize("mode", MODES)
def test_the_gradient_equals_the_padded_reference(mode: losses.Aggregation) -> None:
    chosen = update_settings(aggregation=mode, temperature=0.9)
    expected = padded_gradient(uneven_episodes(), chosen)
    assert_equal(gradient(uneven_episodes(), chosen), expected)


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("cut", [{"max_tokens": 1}, {"max_tokens": 30}, {"max_rows": 2}])
def test_one_micro_batch_equals_many(mode: losses.Aggregation, cut: dict[str, int]) -> None:
    whole = gradient(uneven_episodes(), update_settings(aggregation=mode))
    parts = gradient(uneven_episodes(), update_settings(aggregation=mode, **cut))
    assert_equal(parts, whole)


def test_the_cut_was_real() -> None:
    rows = build_batch(uneven_episodes()).rows
    assert len(list(micro_batches(rows, 30))) > 3 and len(list(micro_batches(rows, 10**6, 2))) >= 4


def test_rows_without_advantage_are_left_out_and_nothing_changes() -> None:
    """An entropy term of weight 1e-30 keeps every row in; leaving the flat group out must give the same gradient."""
    kept = update_settings(entropy_coeff=1e-30)
    assert kept.needs_every_row and not update_settings().needs_every_row
    assert difference(gradient(uneven_episodes(), update_settings()), gradient(uneven_episodes(), kept)) <= 1e-7


def test_rows_without_advantage_count_in_the_denominator() -> None:
    """The flat group c has 7 of 57 sampled tokens: without it the mean is over 50, and the gradient larger by 57/50."""
    episodes = uneven_episodes()
    tokens = build_batch(episodes).tokens_N
    with_flat, without = gradient(episodes, update_settings()), gradient(episodes[:5], update_settings())
    factor = float(tokens.sum()) / float(tokens[:5].sum())
    assert factor > 1.1
    assert difference({n: g * factor for n, g in with_flat.items()}, without) <= 1e-6


def test_an_entropy_bonus_reaches_rows_without_advantage() -> None:
    flat = uneven_episodes()[5:]
    policy = KeepingPolicy(make_model())
    update_policy(policy, build_batch(flat), update_settings())
    assert policy.kept == []
    assert any(float(g.abs().max()) > 0 for g in gradient(flat, update_settings(entropy_coeff=0.1)).values())


def test_what_is_observed_after_the_last_sampled_token_changes_nothing() -> None:
    rng = random.Random(4)
    base = [episode("a0", "a", 1.0, segment(rng, "ssooss")), episode("a1", "a", 0.0, segment(rng, "sss"))]

    def with_tail(tail: list[int]) -> list[Episode]:
        return [replace(e, segments=tuple(s.append_observed(tail) for s in e.segments)) for e in base]

    plain = gradient(base, update_settings())
    for tail in ([1, 2, 3], [9] * 20):
        assert difference(plain, gradient(with_tail(tail), update_settings())) == 0


def test_an_observed_token_in_the_middle_is_context() -> None:
    """The counterpart of the test above: tokens observed before a sampled token do matter."""
    rng = random.Random(4)
    one = segment(rng, "ssooss")
    ids = list(one.response_ids)
    ids[2] = (ids[2] + 1) % VOCABULARY
    other, flat = replace(one, response_ids=tuple(ids)), episode("a1", "a", 0.0, segment(rng, "sss"))
    first, second = ([episode("a0", "a", 1.0, s), flat] for s in (one, other))
    assert difference(gradient(first, update_settings()), gradient(second, update_settings())) > 1e-5


def test_the_loss_reaches_exactly_the_positions_before_sampled_tokens() -> None:
    """By autograd, not by our own bookkeeping: which hidden states have a gradient."""
    rng, model = random.Random(2), make_model()
    patterns = ["s", "ooso", "ssoos"]  # by length, as they are packed
    segments = [segment(rng, pattern, prompt=4) for pattern in patterns]
    batch = build_batch([episode(f"a{i}", "a", float(i), s) for i, s in enumerate(segments)])
    batch = replace(batch, rows=[replace(row, advantages=(1.0,) * len(row.sampled)) for row in batch.rows])
    hidden: list[torch.Tensor] = []

    def keep(_module: object, _inputs: object, output: object) -> None:
        hidden.append(output.last_hidden_state)
        output.last_hidden_state.retain_grad()

    policy = KeepingPolicy(model)
    model.base_model.register_forward_hook(keep)
    update_policy(policy, batch, update_settings(surrogate=SurrogateSettings(low=1e9, high=1e9)))
    [states] = hidden
    reached = [i for i, g in enumerate(states.grad[0].abs().sum(-1).tolist()) if g > 0]
    expected, start = [], 0
    for s, pattern in zip(segments, patterns, strict=True):
        expected += [start + len(s.prompt_ids) + i - 1 for i, letter in enumerate(pattern) if letter == "s"]
        start += len(s.prompt_ids) + pattern.rindex("s")  # the last sampled token is not computed
    assert reached == expected


def test_gradient_checkpointing_changes_nothing() -> None:
    plain = gradient(uneven_episodes(), update_settings())
    assert difference(plain, gradient(uneven_episodes(), update_settings(), checkpointing=True)) <= 1e-7


def test_the_entropy_is_that_of_the_distribution() -> None:
    model = make_model()
    plain = copy.deepcopy(model)
    attention.install(model)
    row = Row.of(segment(random.Random(0), "s"), 0)
    found = logprobs.token_logprobs(model, pack([row], CPU), temperature=2.0).entropy_M
    with torch.no_grad():
        logits = plain(input_ids=torch.tensor([row.ids[:-1].tolist()])).logits[0, -1] / 2.0
    assert found.item() == pytest.approx(torch.distributions.Categorical(logits=logits).entropy().item(), abs=1e-5)


@pytest.mark.parametrize("mode", MODES)
def test_an_episode_of_several_segments_is_normalised_as_one(mode: losses.Aggregation) -> None:
    """The weight of each of its tokens comes from all its tokens, as the padded reference says."""
    rng = random.Random(8)
    episodes = [
        episode("a0", "a", 1.0, segment(rng, "ss"), segment(rng, "ssss", prompt=9), segment(rng, "s", prompt=2)),
        episode("a1", "a", 0.0, segment(rng, "sssoss")),
    ]
    batch = build_batch(episodes)
    assert batch.tokens_N.tolist() == [7, 5] and len(batch.rows) == 4
    chosen = update_settings(aggregation=mode)
    expected = padded_gradient(episodes, chosen)
    assert_equal(gradient(episodes, chosen), expected)


def sampled_by_engine(model: PreTrainedModel, temperature: float) -> list[Segment]:
    core = EngineCore(model, num_pages=200)
    rng = random.Random(3)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(n)] for n in (3, 20, 11)]
    requests = [core.add(p, SamplingParams(max_tokens=15, temperature=temperature, top_p=0.9, seed=1)) for p in prompts]
    while core.busy:
        core.step()
    return [Segment(prompt_ids=tuple(p)).append_sampled(r.result()) for p, r in zip(prompts, requests, strict=True)]


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
def test_engine_and_trainer_agree_on_the_policy_at_any_temperature(temperature: float) -> None:
    model = make_model()
    rows = [Row.of(s, i) for i, s in enumerate(sampled_by_engine(model, temperature))]
    packed = pack(rows, CPU)
    found = logprobs.token_logprobs(model, packed, temperature).logp_M
    assert float((found - packed.old_logp_M).detach().abs().max()) <= 1e-5
    wrong = logprobs.token_logprobs(model, packed, temperature + 0.2).logp_M
    assert float((wrong - packed.old_logp_M).detach().abs().max()) > 1e-2


def test_the_mismatch_of_an_update_is_zero_on_the_same_weights_and_seen_on_others() -> None:
    model = make_model()
    segments = sampled_by_engine(model, 1.0)
    batch = build_batch([episode(f"a{i}", "a", float(i), s) for i, s in enumerate(segments)])
    metrics = update_policy(KeepingPolicy(model), batch, update_settings())
    assert metrics["actor/rollout_mismatch_kl"] <= 1e-6 and metrics["actor/rollout_mismatch_max"] <= 1e-4
    assert metrics["actor/ppo_kl"] == pytest.approx(0, abs=1e-5) and metrics["actor/pg_clipfrac"] == 0
    assert metrics["actor/trained_tokens"] == sum(s.sampled for s in segments[::2]), "the middle one has no advantage"
    other = update_policy(KeepingPolicy(make_model(seed=5)), batch, update_settings())
    assert other["actor/rollout_mismatch_kl"] > 0.01
    apart, alike = "training/rollout_probs_diff_max", "training/rollout_actor_probs_pearson_corr"
    assert metrics[apart] <= 1e-5 < other[apart] and other[alike] < metrics[alike] == pytest.approx(1, abs=1e-4)


@pytest.mark.drill("security", "A rollout from zeroed weights", "The run stops with the numbers; nothing is trained")
@pytest.mark.parametrize("corrected", [False, True])
def test_a_rollout_from_other_weights_stops_the_update_before_its_step(corrected: bool) -> None:
    model = make_model()
    zeroed = make_model()
    with torch.no_grad():
        for parameter in zeroed.parameters():
            parameter.zero_()
    batches = [
        build_batch([episode(f"a{i}", "a", float(i), s) for i, s in enumerate(sampled_by_engine(source, 1.0))])
        for source in (model, zeroed)
    ]
    correction = CorrectionSettings(level="token") if corrected else CorrectionSettings()
    settings = replace(update_settings(), mismatch_limit=0.3, correction=correction)
    update_policy(KeepingPolicy(model), batches[0], settings)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with pytest.raises(
        MismatchError, match=r"of -4\.575 in the rollout and of -\d.* over rollout\.mismatch_limit=0\.3; "
    ):
        update_policy(KeepingPolicy(model), batches[1], settings)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    update_policy(KeepingPolicy(model), batches[1], replace(settings, mismatch_limit=None))


def batch_of_groups(count: int) -> TrainBatch:
    rng = random.Random(1)
    return build_batch([episode(f"{g}{k}", str(g), float(k), segment(rng, "ss")) for g in range(count) for k in (0, 1)])


def test_mini_batches_are_whole_groups_in_order() -> None:
    assert batch_of_groups(3).mini_batches(2, [2, 0, 1]) == [[4, 5, 0, 1], [2, 3]]
    policy = KeepingPolicy(make_model())
    update_policy(policy, batch_of_groups(5), update_settings(mini_batch_groups=2, epochs=2))
    assert len(policy.kept) == 6


def test_shuffled_mini_batches_depend_on_seed_and_step_alone() -> None:
    def first(seed: int | None, step: int) -> Gradients:
        policy = KeepingPolicy(make_model())
        update_policy(policy, batch_of_groups(6), update_settings(mini_batch_groups=1, shuffle_seed=seed), step=step)
        return policy.kept[0]

    assert difference(first(7, 3), first(7, 3)) == 0
    assert any(difference(first(7, 3), first(7, step)) > 0 for step in (4, 5, 6))


def test_a_reference_adds_its_kl_and_nothing_at_the_start() -> None:
    reference = FrozenModel(calm_model())
    chosen = update_settings(kl_coef=0.5)
    policy = KeepingPolicy(calm_model())
    metrics = update_policy(policy, build_batch(uneven_episodes()), chosen, reference=reference)
    assert metrics["actor/kl_loss"] == pytest.approx(0, abs=1e-9)
    assert difference(policy.kept[0], gradient(uneven_episodes(), update_settings())) <= 1e-6
    moved = KeepingPolicy(make_model(seed=3))
    metrics = update_policy(moved, build_batch(uneven_episodes()), chosen, reference=reference)
    assert metrics["actor/kl_loss"] > 0.01


def test_the_learning_rate_that_is_reported_is_the_one_that_was_used() -> None:
    policy = small_policy(make_model(), lr=1e-2, total=4, schedule="linear")
    batch = build_batch(uneven_episodes())
    rates = [update_policy(policy, batch, update_settings())["actor/lr"] for _ in range(4)]
    assert rates == pytest.approx([1e-2, 0.75e-2, 0.5e-2, 0.25e-2])


def test_unequal_segment_rows_belong_to_their_episode() -> None:
    rows = build_batch(uneven_episodes()).rows
    assert [row.episode for row in rows] == [0, 1, 2, 3, 3, 4, 5, 6]
    assert {*rows[3].advantages} == {*rows[4].advantages} and len({*rows[3].advantages}) == 1
