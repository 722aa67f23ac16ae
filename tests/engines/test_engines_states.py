"""Models with states: every log-probability equals the full forward's, and prefixes are reused from snapshots."""

import copy
import random

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from transformers import PreTrainedModel

from benchmarks.architectures import VOCABULARY, small_model
from rally.engines.embedded import EngineCore, EngineSettings
from rally.engines.embedded.kv_cache import PagePool
from rally.engines.embedded.radix_cache import RadixCache, token_bytes
from rally.engines.embedded.state_cache import StateStore
from rally.types import SamplingParams

TOLERANCE = 2e-5
MODELS = {name: small_model(name) for name in ("qwen3_5_text", "lfm2", "falcon_h1", "mamba2")}
REFERENCES = {name: copy.deepcopy(model) for name, model in MODELS.items()}


@pytest.fixture(autouse=True, params=["gather", "paged"])
def backend(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setattr(EngineCore, "_paged", lambda *_: request.param == "paged")
    return str(request.param)


def ids(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(length)]


def drain(core: EngineCore) -> None:
    while core.busy:
        core.step()


def params(tokens: int, seed: int = 0) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, seed=seed, ignore_eos=True)


@torch.no_grad()
def error(model: PreTrainedModel, request) -> float:
    """Of the engine, against one plain forward over the whole history."""
    logits = model(input_ids=torch.tensor([request.ids]), use_cache=False).logits[0].float()
    logp = torch.log_softmax(logits, -1)
    want = [logp[i - 1, request.ids[i]].item() for i in range(request.prompt_len, len(request.ids))]
    return max(abs(a - b) for a, b in zip(request.result().logprobs, want, strict=True))


@pytest.mark.parametrize("name", MODELS)
def test_a_group_computes_its_prompt_once(name):
    core = EngineCore(MODELS[name], EngineSettings(max_model_len=256, max_num_seqs=8), num_pages=400)
    group = [core.add(ids(100), params(8, i)) for i in range(6)]
    drain(core)
    assert sorted(r.cached_tokens for r in group) == [0] + [96] * 5
    assert max(error(REFERENCES[name], request) for request in group) <= TOLERANCE


@pytest.mark.parametrize("name", MODELS)
def test_the_next_turn_begins_where_the_last_one_ended(name, backend):
    core = EngineCore(MODELS[name], EngineSettings(max_model_len=256, max_num_seqs=8), num_pages=400)
    first = core.add(ids(50), params(30, 1))
    drain(core)
    second = core.add([*first.ids, *ids(9, 5)], params(10, 2))
    drain(core)
    third = core.add([*second.ids, *ids(9, 6)], params(10, 3))
    drain(core)
    ends = (len(first.ids), len(second.ids))  # one token less if the last one was not computed ahead
    assert (second.cached_tokens, third.cached_tokens) in (ends, tuple(end - 1 for end in ends))
    assert max(error(REFERENCES[name], r) for r in (first, second, third)) <= TOLERANCE


def test_histories_that_branch_share_a_snapshot_from_the_third_on():
    core = EngineCore(MODELS["lfm2"], EngineSettings(max_model_len=256, max_num_seqs=8), num_pages=400)
    requests = [core.add([*ids(120), *ids(20, 1 + i)], params(6, i)) for i in range(5)]
    drain(core)
    assert sorted(r.cached_tokens for r in requests) == [0, 0, 112, 112, 112]
    assert max(error(REFERENCES["lfm2"], request) for request in requests) <= TOLERANCE


def test_a_branch_from_inside_a_turn_is_computed_from_an_earlier_snapshot():
    core = EngineCore(MODELS["qwen3_5_text"], EngineSettings(max_model_len=256, max_num_seqs=8), num_pages=400)
    first = core.add(ids(50), params(30, 1))
    drain(core)
    other = core.add([*first.ids[:70], *ids(9, 5)], params(10, 2))
    drain(core)
    assert other.cached_tokens == 48
    assert error(REFERENCES["qwen3_5_text"], other) <= TOLERANCE


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example("mamba2", 38, [21], 5, 14, 0, 0)  # the last request has pages beside cached ones with the same tokens
@given(
    name=st.sampled_from(["lfm2", "mamba2"]),
    shared=st.integers(0, 40),
    tails=st.lists(st.integers(1, 30), min_size=1, max_size=6),
    budget=st.sampled_from([5, 33, 4096]),
    pages=st.sampled_from([14, 60]),
    snapshots=st.sampled_from([0, 1, 20]),
    update_at=st.integers(0, 12),
)
def test_any_mix_of_requests_agrees_with_the_full_forward(name, shared, tails, budget, pages, snapshots, update_at):
    model, old = copy.deepcopy(REFERENCES[name]), REFERENCES[name]
    new = copy.deepcopy(old)
    with torch.no_grad():
        for parameter in new.parameters():
            parameter.mul_(1.1)
    sizes = EngineSettings(page_size=8, max_model_len=112, max_num_batched_tokens=budget, in_flight="recompute")
    core = EngineCore(model, sizes, num_pages=pages)
    assert core.states is not None
    core.states.snapshots = snapshots
    core.states.clear()
    prefix = ids(shared, shared)
    requests = [core.add(prefix + ids(n, n), params(9, n)) for n in tails]
    for _ in range(update_at):
        core.step()
    core.drain()
    model.load_state_dict(new.state_dict())
    core.commit_weights()
    drain(core)
    follow = [core.add([*request.ids, *ids(3, 9)], params(4, 1)) for request in requests if len(request.ids) < 80]
    drain(core)
    for request in [*requests, *follow]:
        result = request.result()
        for span in result.spans:
            reference = new if span.version else old
            with torch.no_grad():
                logits = reference(input_ids=torch.tensor([request.ids]), use_cache=False).logits[0].float()
            logp = torch.log_softmax(logits, -1)
            for i in range(span.start, span.end):
                at = request.prompt_len + i
                assert abs(result.logprobs[i] - logp[at - 1, request.ids[at]].item()) <= TOLERANCE
    assert core.pool.num_free + len(core.index) == pages
    held = len(core.index._snapshots)
    assert core.states.num_free + held == snapshots, "every snapshot is free or held by the radix cache"


def test_states_kept_over_an_update_are_not_found_by_others():
    core = EngineCore(MODELS["lfm2"], EngineSettings(max_model_len=256, in_flight="keep"), num_pages=400)
    request = core.add(ids(40), params(20, 1))
    for _ in range(6):
        core.step()
    core.drain()
    core.commit_weights()
    drain(core)
    assert core.states is not None and core.states.num_free == core.states.snapshots
    again = core.add(request.ids, params(3, 2))
    drain(core)
    assert again.cached_tokens == 0


def test_a_turn_that_ends_before_a_step_without_work_is_saved():
    core = EngineCore(MODELS["lfm2"], EngineSettings(max_model_len=256, max_num_seqs=2), num_pages=400)
    core.add(ids(20, 8), params(12, 1))
    first = core.add(ids(20), params(11, 2))
    while first.finish is None:
        core.step()  # the last token of the other one is in flight, so that the next plan is empty
    drain(core)
    second = core.add([*first.ids, *ids(5, 3)], params(4, 3))
    drain(core)
    assert second.cached_tokens >= len(first.ids) - 1
    assert error(REFERENCES["lfm2"], second) <= TOLERANCE


def test_no_row_is_saved_twice_in_a_step():
    """Of several requests that end with the same history, one keeps its snapshot; the row that the others took is
    free again, and no save into it may be left."""
    core = EngineCore(MODELS["lfm2"], EngineSettings(max_model_len=256, max_num_seqs=8), num_pages=400)
    plans, launch = [], core.runner.launch
    core.runner.launch = lambda plan: plans.append(plan) or launch(plan)  # type: ignore[method-assign]
    equal = [core.add(ids(20), params(9, 1)) for _ in range(4)]
    drain(core)
    again = core.add([*equal[0].ids, *ids(3, 5)], params(4, 3))
    drain(core)
    assert len({tuple(request.ids) for request in equal}) == 1
    saved = [[row for _, row in plan.saves] for plan in plans]
    assert sum(map(len, saved)) == 1 and again.cached_tokens >= len(equal[0].ids) - 1
    assert error(REFERENCES["lfm2"], again) <= TOLERANCE


def test_snapshots_end_with_their_node_and_the_least_used_makes_room():
    pool = PagePool(8)
    states = StateStore({"s": (torch.Size([2]), torch.float32)}, slots=1, snapshots=2, device=torch.device("cpu"))
    cache = RadixCache(pool, 4, states)
    histories = [list(range(10 * i, 10 * i + 6)) for i in range(3)]
    for history in histories:
        pages = pool.allocate(2)
        assert pages is not None
        cache.insert(0, token_bytes(history), pages)
        row = cache.take_state()
        assert row is not None
        cache.hold_state(0, token_bytes(history), row)
        pool.release(pages)
    assert [cache.match_state(0, token_bytes([*history, 99])).tokens for history in histories] == [0, 6, 6]
    assert cache.match_state(0, token_bytes(histories[1][:5])).tokens == 0, "a snapshot is no shorter prefix"
    cache.evict(8)
    assert states.num_free == 2 and len(cache) == 0
