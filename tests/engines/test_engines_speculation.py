"""Speculative decoding samples the same tokens in fewer steps, and leaves no trace of wrong drafts."""

import random

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from small_models import VOCABULARY, full_logprobs, make_model
from transformers import PreTrainedModel

from benchmarks.architectures import small_model
from rally.engines import EngineError
from rally.engines.embedded import EngineCore, EngineSettings, NgramSpeculation
from rally.engines.embedded.memory_plan import step_bytes
from rally.engines.embedded.scheduler import ngram_drafts
from rally.types import SamplingParams

TOLERANCE = 1e-4  # the logits are twelve times as large as those of other tests
LOOKUP = NgramSpeculation(prompt_lookup_min=1)
ON, OFF = EngineSettings(max_model_len=256, speculation=LOOKUP), EngineSettings(max_model_len=256)


@pytest.fixture(autouse=True, params=["gather", "paged"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(EngineCore, "_paged", lambda *_: request.param == "paged")
    return str(request.param)


def repetitive_model(seed: int = 0) -> PreTrainedModel:
    """A model that prefers few tokens, so that its samples repeat themselves, but not always."""
    model = make_model(seed=seed)
    with torch.no_grad():
        model.get_output_embeddings().weight.mul_(12)
    return model


def prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCABULARY) for _ in range(length)]


MIXED = [
    SamplingParams(max_tokens=60, temperature=0.0),
    SamplingParams(max_tokens=60, seed=1),
    SamplingParams(max_tokens=47, seed=2, temperature=0.7),
    SamplingParams(max_tokens=60, seed=3, top_p=0.8, top_k=5),
    SamplingParams(max_tokens=60, seed=4, min_p=0.1),
    SamplingParams(max_tokens=1, seed=5),
    SamplingParams(max_tokens=2, seed=6),
]


def run(core: EngineCore, wanted: list[SamplingParams] = MIXED) -> list:
    requests = [core.add(prompt(10 + 7 * i, seed=i), params) for i, params in enumerate(wanted)]
    while core.busy:
        core.step()
    assert core.pool.num_free + len(core.index) == core.pool.num_pages, "every page is free or cached"
    return requests


def check(core: EngineCore, request) -> None:
    want = full_logprobs(core.model, request.ids, request.prompt_len, request.params.temperature or 1.0)
    assert max(abs(a - b) for a, b in zip(request.result().logprobs, want, strict=True)) <= TOLERANCE


def test_the_same_tokens_in_fewer_steps():
    model = repetitive_model()
    plain, drafting = EngineCore(model, OFF, num_pages=200), EngineCore(model, ON, num_pages=200)
    expected, requests = run(plain), run(drafting)
    for got, want in zip(requests, expected, strict=True):
        assert got.ids == want.ids
        assert got.finish == want.finish
        assert np.allclose(got.sampling_logprobs, want.sampling_logprobs, atol=TOLERANCE)
        check(drafting, got)
    assert 0 < drafting.accepted_tokens < drafting.drafted_tokens, "some drafts are right and some are not"
    assert drafting.steps < plain.steps


def test_what_ends_a_request_ends_it_within_right_drafts():
    """Stop tokens, stop strings and the limit are found token by token; what was drafted behind them is dropped."""
    model = repetitive_model()
    greedy = SamplingParams(max_tokens=60, temperature=0.0)
    whole = run(EngineCore(model, OFF, num_pages=200), [greedy])[0]
    sampled = whole.ids[whole.prompt_len :]
    for at in range(20, 40):
        stop = sampled[at]
        if stop in sampled[:at]:
            continue
        wanted = [SamplingParams(max_tokens=60, temperature=0.0, stop_ids=(stop,))]
        core = EngineCore(model, ON, num_pages=200)
        request = run(core, wanted)[0]
        assert (request.ids, request.finish) == (whole.ids[: whole.prompt_len + at + 1], "stop")
    for length in range(20, 30):
        core = EngineCore(model, ON, num_pages=200)
        request = run(core, [SamplingParams(max_tokens=length, temperature=0.0)])[0]
        assert (request.ids, request.finish) == (whole.ids[: whole.prompt_len + length], "length")
    assert core.accepted_tokens
    core = EngineCore(model, ON, num_pages=200, decode=lambda ids: "".join(f"<{token}>" for token in ids))
    text = "".join(f"<{token}>" for token in sampled[24:26])
    request = run(core, [SamplingParams(max_tokens=60, temperature=0.0, stop=(text,))])[0]
    first = next(i for i in range(2, 61) if text in "".join(f"<{token}>" for token in sampled[:i]))
    assert (request.ids, request.finish) == (whole.ids[: whole.prompt_len + first], "stop")
    assert len(request.logprobs) == first


def test_the_next_turn_reuses_right_drafts_and_no_wrong_ones():
    core = EngineCore(repetitive_model(), ON, num_pages=200)
    first = run(core, [SamplingParams(max_tokens=50, seed=3)])[0]
    assert 0 < core.accepted_tokens < core.drafted_tokens
    second = core.add([*first.ids, *prompt(5, seed=9)], SamplingParams(max_tokens=10, seed=4))
    while core.busy:
        core.step()
    assert second.cached_tokens == len(first.ids) - 1
    check(core, second)


def test_drafts_preempt_nobody():
    """Pages for drafts are taken only if they are free."""
    model = repetitive_model()
    wanted = [SamplingParams(max_tokens=60, seed=i, temperature=0.0) for i in range(6)]
    settings = EngineSettings(max_model_len=128, max_num_seqs=6, speculation=LOOKUP)
    plain = EngineSettings(max_model_len=128, max_num_seqs=6)
    expected = run(EngineCore(model, plain, num_pages=24), wanted)
    core = EngineCore(model, settings, num_pages=24)
    assert [r.ids for r in run(core, wanted)] == [r.ids for r in expected]
    assert core.accepted_tokens


@pytest.mark.parametrize("budget", [6, 9])
def test_a_small_budget_of_tokens(budget):
    model = repetitive_model()
    settings = EngineSettings(max_model_len=256, max_num_batched_tokens=budget, speculation=LOOKUP)
    limited, expected = run(EngineCore(model, settings, num_pages=200)), run(EngineCore(model, OFF, num_pages=200))
    assert [r.ids for r in limited] == [r.ids for r in expected]


def test_many_requests_are_not_drafted_for():
    settings = EngineSettings(max_model_len=256, speculation=NgramSpeculation(disable_by_batch_size=2))
    model = repetitive_model()
    core = EngineCore(model, settings, num_pages=200)
    requests = [core.add(prompt(10, seed=i), SamplingParams(max_tokens=30 + 20 * i, temperature=0.0)) for i in range(4)]
    while len(core.scheduler.running) > 2 or core.scheduler.waiting:
        core.step()
    assert core.drafted_tokens == 0
    while core.busy:
        core.step()
    assert core.accepted_tokens, "the last two are"
    for request in requests:
        check(core, request)


def test_new_requests_join_while_drafts_are_in_flight():
    """With a runner that works ahead, a step with drafts is read back before the next one is planned."""
    model = repetitive_model()
    alone = NgramSpeculation(prompt_lookup_min=1, disable_by_batch_size=1)
    settings = EngineSettings(max_model_len=256, speculation=alone)
    core = EngineCore(model, settings, num_pages=200)
    requests = [core.add(prompt(10), SamplingParams(max_tokens=60, temperature=0.0))]
    while not core.accepted_tokens:
        core.step()
    requests += [core.add(prompt(20, seed=i), SamplingParams(max_tokens=40, seed=i)) for i in range(3)]
    while core.busy:
        core.step()
    for request in requests:
        check(core, request)


def test_many_requests_are_admitted_in_a_step_with_drafts():
    """The buffers of a step have room for the tokens of the drafts and of all that were just admitted."""
    few = NgramSpeculation(prompt_lookup_min=1, disable_by_batch_size=4)
    settings = EngineSettings(max_model_len=256, max_num_seqs=16, speculation=few)
    core = EngineCore(repetitive_model(), settings, num_pages=300)
    greedy = SamplingParams(max_tokens=150, temperature=0.0)
    requests = [core.add(prompt(20, seed=i), greedy) for i in range(4)]
    for _ in range(80):
        core.step()
    before = core.drafted_tokens
    requests += [core.add(prompt(20, seed=10 + i), SamplingParams(max_tokens=5, seed=i)) for i in range(12)]
    core.step()
    assert core.drafted_tokens - before + 4 + 12 > max(16, 4 * (1 + few.num_speculative_tokens))
    while core.busy:
        core.step()
    for request in requests:
        check(core, request)


def test_a_preemption_that_leaves_few_requests_drafts_nothing_yet():
    """Whether drafts are sought is decided before a step is planned, when the last one may not be read back."""
    model = repetitive_model()
    wanted = [SamplingParams(max_tokens=60, temperature=0.0) for _ in range(6)]
    lookup = NgramSpeculation(prompt_lookup_min=1, disable_by_batch_size=5)
    settings = EngineSettings(max_model_len=128, max_num_seqs=6, speculation=lookup)
    core = EngineCore(model, settings, num_pages=24)
    expected = run(EngineCore(model, EngineSettings(max_model_len=128), num_pages=200), wanted)
    assert [r.ids for r in run(core, wanted)] == [r.ids for r in expected]
    assert core.accepted_tokens


@pytest.mark.parametrize("policy", ["keep", "recompute"])
def test_new_weights_in_mid_request(policy):
    settings = EngineSettings(max_model_len=256, speculation=LOOKUP, in_flight=policy)
    core = EngineCore(repetitive_model(), settings, num_pages=200)
    request = core.add(prompt(20), SamplingParams(max_tokens=80, temperature=0.0))
    while core.accepted_tokens < 5:
        core.step()
    core.drain()
    core.model.load_state_dict(repetitive_model(seed=1).state_dict())
    core.commit_weights()
    before = request.spans[0].end
    while core.busy:
        core.step()
    assert [(span.version, span.start, span.end) for span in request.spans] == [(0, 0, before), (1, before, 80)]
    if policy == "recompute":
        want = full_logprobs(core.model, request.ids, request.prompt_len + before, 1.0)
        got = request.result().logprobs[before:]
        assert max(abs(a - b) for a, b in zip(got, want, strict=True)) <= TOLERANCE


def test_states_cannot_be_taken_back():
    with pytest.raises(EngineError, match=r"hold state.*leave rollout\.speculative_config out"):
        EngineCore(small_model("lfm2"), ON, num_pages=100)


def test_the_memory_plan_counts_the_logits_of_drafts():
    config = make_model().config
    few = EngineSettings(max_num_seqs=8, speculation=NgramSpeculation(num_speculative_tokens=3))
    assert few.max_sampled_rows == 32
    extra = step_bytes(config, few, 4) - step_bytes(config, EngineSettings(max_num_seqs=8), 4)
    assert extra == 2 * 4 * 24 * config.vocab_size
    many = EngineSettings(max_num_seqs=100, speculation=NgramSpeculation(disable_by_batch_size=10))
    assert many.max_sampled_rows == 10 * 5 + 90


TOKENS = st.lists(st.integers(0, 3) | st.sampled_from([256, 65536, 16777216, -1]), min_size=1, max_size=40)


@given(TOKENS, st.integers(1, 6), st.integers(1, 3), st.integers(0, 3))
def test_drafts_are_what_followed_the_last_occurrence(history, most, shortest, more):
    """Against a plain search. Ids whose bytes contain each other's must not be found within a token."""
    longest = shortest + more
    want: list[int] = []
    for length in range(longest, shortest - 1, -1):
        starts = [i for i in range(len(history) - length) if history[i : i + length] == history[-length:]]
        if starts and length < len(history):
            want = history[starts[-1] + length :][:most]
            break
    lookup = NgramSpeculation(prompt_lookup_max=longest, prompt_lookup_min=shortest)
    assert ngram_drafts(np.array(history, np.int32), most, lookup) == (want if min(want, default=0) >= 0 else [])
