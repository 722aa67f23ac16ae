"""The engine's log-probabilities equal those of a full forward, with caching, chunked prefill and weight updates."""

import random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_models import FAMILIES, VOCABULARY, full_logprobs, make_model
from transformers import PreTrainedModel

from rally.engines import EngineError
from rally.engines.embedded import EngineCore, EngineSettings
from rally.engines.embedded.radix_cache import token_bytes
from rally.engines.embedded.settings import OptionNames
from rally.types import SamplingParams

TOLERANCE = 1e-5


@pytest.fixture(autouse=True, params=["gather", "paged"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Every test runs with plain torch and with the paged kernels (here their reference) and fused layers."""
    monkeypatch.setattr(EngineCore, "_paged", lambda *_: request.param == "paged")
    return str(request.param)


@pytest.fixture
def model() -> PreTrainedModel:
    return make_model()


def prompts(count: int, low: int, high: int, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(rng.randint(low, high))] for _ in range(count)]


def drain(core: EngineCore) -> None:
    while core.busy:
        core.step()


def check(core, request, reference=None, temperature=1.0):
    got = request.result()
    want = full_logprobs(reference or core.model, request.ids, request.prompt_len, temperature)
    assert len(got.ids) > 0
    assert max(abs(a - b) for a, b in zip(got.logprobs, want, strict=True)) <= TOLERANCE


@pytest.mark.parametrize(("family", "budget"), [*((family, 64) for family in FAMILIES), ("llama", 7), ("llama", 8192)])
def test_logprobs_equal_full_forward_with_chunked_prefill(family, budget):
    core = EngineCore(make_model(family), EngineSettings(max_num_batched_tokens=budget), num_pages=400)
    requests = [core.add(p, SamplingParams(max_tokens=12, seed=i)) for i, p in enumerate(prompts(9, 1, 90))]
    drain(core)
    for request in requests:
        check(core, request)
    assert core.pool.num_free + len(core.index) == core.pool.num_pages, "every page is free or cached"


def test_long_histories_use_views_and_agree(model, monkeypatch):
    monkeypatch.setattr("rally.engines.embedded.attention_torch.SHORT_HISTORY_BYTES", 0)
    core = EngineCore(model, num_pages=400)
    requests = [core.add(p, SamplingParams(max_tokens=20, seed=i)) for i, p in enumerate(prompts(6, 5, 200))]
    drain(core)
    for request in requests:
        check(core, request)


def test_second_turn_reuses_the_first(model):
    core = EngineCore(model, num_pages=200)
    first = core.add(prompts(1, 50, 50)[0], SamplingParams(max_tokens=30, seed=1))
    drain(core)
    follow = [*first.ids, *prompts(1, 9, 9, seed=5)[0]]
    second = core.add(follow, SamplingParams(max_tokens=10, seed=2))
    drain(core)
    assert second.cached_tokens == 79  # all of the first turn but its last token, whose KV was not computed yet
    check(core, second)


def test_a_group_computes_its_prompt_once(model):
    core = EngineCore(model, num_pages=400)
    prompt = prompts(1, 100, 100)[0]
    group = [core.add(prompt, SamplingParams(max_tokens=8, seed=i)) for i in range(8)]
    drain(core)
    assert sorted(r.cached_tokens for r in group) == [0] + [96] * 7
    assert len({tuple(r.ids) for r in group}) > 1, "different seeds sample different replies"
    for request in group:
        check(core, request)


def test_weight_update_never_serves_old_kv():
    """Fails if the prefix index ignores the weight version: the same prompt must be computed again."""
    core, prompt = EngineCore(make_model(seed=0), num_pages=200), prompts(1, 64, 64)[0]
    core.add(prompt, SamplingParams(max_tokens=4, seed=0))
    drain(core)
    core.model.load_state_dict(make_model(seed=1).state_dict())
    core.commit_weights()
    again = core.add(prompt, SamplingParams(max_tokens=4, seed=0))
    drain(core)
    assert again.cached_tokens == 0
    check(core, again)
    core.scheduler.version -= 1  # simulates an index that looks under the old version
    assert core.index.match(core.version, token_bytes(prompt)).pages == []


def _update_after(core, steps, other):
    for _ in range(steps):
        core.step()
    core.drain()
    core.model.load_state_dict(other.state_dict())
    return core.commit_weights()


def test_in_flight_abort_keeps_what_was_sampled():
    core, old = EngineCore(make_model(seed=0), EngineSettings(in_flight="abort"), num_pages=200), make_model(seed=0)
    request = core.add(prompts(1, 40, 40)[0], SamplingParams(max_tokens=20, seed=3))
    assert _update_after(core, 6, make_model(seed=1)) == [request]
    assert request.result().finish == "abort" and len(request.result().ids) == 6
    check(core, request, reference=old)
    assert core.pool.num_free == core.pool.num_pages


def test_in_flight_recompute_samples_the_rest_under_new_weights():
    core = EngineCore(make_model(seed=0), EngineSettings(in_flight="recompute"), num_pages=200)
    request = core.add(prompts(1, 40, 40)[0], SamplingParams(max_tokens=20, seed=3))
    _update_after(core, 6, make_model(seed=1))
    drain(core)
    result = request.result()
    assert [(s.version, s.start, s.end) for s in result.spans] == [(0, 0, 6), (1, 6, 20)]
    want = full_logprobs(core.model, request.ids, request.prompt_len)
    assert max(abs(a - b) for a, b in zip(result.logprobs[6:], want[6:], strict=True)) <= TOLERANCE


def test_in_flight_keep_records_versions_and_hides_mixed_kv():
    core = EngineCore(make_model(seed=0), EngineSettings(in_flight="keep"), num_pages=200)
    request = core.add(prompts(1, 40, 40)[0], SamplingParams(max_tokens=30, seed=3))
    _update_after(core, 6, make_model(seed=1))
    drain(core)
    assert [(s.version, s.start, s.end) for s in request.result().spans] == [(0, 0, 6), (1, 6, 30)]
    assert len(core.index) == 0, "KV of two versions must not be found by later requests"
    later = core.add(request.ids, SamplingParams(max_tokens=3, seed=4))
    drain(core)
    check(core, later)


def test_out_of_pages_preempts_and_recomputes(model):
    core = EngineCore(model, EngineSettings(page_size=4, max_model_len=64), num_pages=16)
    requests = [core.add(p, SamplingParams(max_tokens=40, seed=i)) for i, p in enumerate(prompts(4, 10, 20))]
    drain(core)
    for request in requests:
        assert len(request.result().ids) == 40
        check(core, request)
    assert core.pool.num_free + len(core.index) == 16


def test_growth_preempts_the_youngest(model):
    core = EngineCore(model, EngineSettings(page_size=4, max_model_len=64), num_pages=16)
    old = core.add(prompts(1, 10, 10)[0], SamplingParams(max_tokens=50, seed=0))
    for _ in range(3):
        core.step()
    core.pool.release(old.pages[5:])  # as if it had started with fewer pages than it may need
    del old.pages[5:]
    core.slots.set_pages(old)
    young = core.add(prompts(1, 12, 12, seed=2)[0], SamplingParams(max_tokens=30, seed=1))
    drain(core)
    assert core.scheduler.preemptions >= 1
    check(core, old)
    check(core, young)


def test_samples_do_not_depend_on_batch_mates(model):
    def run(companions: int) -> list[int]:
        core = EngineCore(model, num_pages=400)
        target = core.add(prompts(1, 30, 30)[0], SamplingParams(max_tokens=16, seed=42))
        for i, prompt in enumerate(prompts(companions, 5, 60, seed=9)):
            core.add(prompt, SamplingParams(max_tokens=16, seed=100 + i))
        drain(core)
        return target.ids

    assert run(0) == run(7)


def test_sampling_follows_the_distribution(model):
    """2,000 seeds of one request: observed frequencies match the model's probabilities, filters included."""
    core = EngineCore(model, EngineSettings(max_num_seqs=500), num_pages=4000)
    prompt = prompts(1, 12, 12)[0]
    params = [SamplingParams(max_tokens=1, seed=s, temperature=0.7, top_k=5) for s in range(2000)]
    requests = [core.add(prompt, p) for p in params]
    drain(core)
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([prompt])).logits[0, -1] / 0.7
    top = logits.topk(5)
    probs = torch.softmax(top.values, -1)
    for token, p in zip(top.indices.tolist(), probs.tolist(), strict=True):
        share = sum(r.ids[-1] == token for r in requests) / len(requests)
        assert abs(share - p) < 0.04
    assert {r.ids[-1] for r in requests} <= set(top.indices.tolist())
    one = requests[0]
    where = top.indices.tolist().index(one.ids[-1])
    assert one.sampling_logprobs[0] == pytest.approx(probs[where].log().item(), abs=1e-5)
    assert one.logprobs[0] == pytest.approx(torch.log_softmax(logits, -1)[one.ids[-1]].item(), abs=1e-5)


def test_greedy_stop_ids_and_stop_strings(model):
    plain = EngineCore(model, num_pages=100)
    prompt = prompts(1, 12, 12)[0]
    greedy = plain.add(prompt, SamplingParams(max_tokens=10, temperature=0))
    drain(plain)
    third = greedy.ids[len(prompt) + 2]
    first_seen = greedy.ids[len(prompt) :].index(third) + 1
    core = EngineCore(model, num_pages=100, eos_ids=[third], decode=lambda ids: "".join(f"<{i}>" for i in ids))
    runs = {
        "eos": core.add(prompt, SamplingParams(max_tokens=10, temperature=0)),
        "ignore": core.add(prompt, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True)),
        "string": core.add(prompt, SamplingParams(max_tokens=10, temperature=0, ignore_eos=True, stop=(f"<{third}>",))),
    }
    drain(core)
    assert runs["eos"].result().finish == "stop" and runs["eos"].sampled == first_seen
    assert runs["ignore"].result().finish == "length" and runs["ignore"].sampled == 10
    assert runs["string"].result().finish == "stop" and runs["string"].sampled == first_seen


@pytest.mark.parametrize(
    ("prompt_len", "max_tokens", "words"),
    [(0, 5, "empty prompt"), (64, 5, "leaves no room"), (60, 5, "at most 4 new tokens")],
)
def test_impossible_requests_are_refused_in_words(model, prompt_len, max_tokens, words):
    core = EngineCore(model, EngineSettings(max_model_len=64), num_pages=100)
    with pytest.raises(EngineError, match=words):
        core.add([1] * prompt_len, SamplingParams(max_tokens=max_tokens))


def test_a_request_larger_than_the_pool_is_refused(model):
    core = EngineCore(model, EngineSettings(max_model_len=512), num_pages=4)
    with pytest.raises(EngineError, match=r"can never fit .*\(rollout.gpu_memory_utilization\)"):
        core.add([1] * 60, SamplingParams(max_tokens=60))
    served = EngineCore(model, EngineSettings(option_names=OptionNames(memory="--memory")), num_pages=4)
    with pytest.raises(EngineError, match=r"can never fit .*\(--memory\)"):
        served.add([1] * 60, SamplingParams(max_tokens=60))


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shared=st.integers(0, 40),
    tails=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    budget=st.sampled_from([5, 33, 4096]),
    pages=st.sampled_from([14, 60]),
    update_at=st.integers(0, 12),
)
def test_any_mix_of_requests_agrees_with_the_full_forward(shared, tails, budget, pages, update_at):
    model = make_model(seed=0)
    sizes = EngineSettings(page_size=8, max_model_len=112, max_num_batched_tokens=budget, in_flight="recompute")
    core = EngineCore(model, sizes, num_pages=pages)
    rng = random.Random(shared)
    prefix = [rng.randrange(VOCABULARY) for _ in range(shared)]
    requests = [
        core.add(prefix + [rng.randrange(VOCABULARY) for _ in range(n)], SamplingParams(max_tokens=9, seed=n))
        for n in tails
    ]
    versions = {0: make_model(seed=0), 1: make_model(seed=7)}
    for _ in range(update_at):
        core.step()
    core.drain()
    core.model.load_state_dict(versions[1].state_dict())
    core.commit_weights()
    drain(core)
    for request in requests:
        result = request.result()
        for span in result.spans:
            want = full_logprobs(versions[span.version], request.ids, request.prompt_len)
            pairs = zip(result.logprobs[span.start : span.end], want[span.start : span.end], strict=True)
            assert max(abs(a - b) for a, b in pairs) <= TOLERANCE
    assert core.pool.num_free + len(core.index) == pages
