"""Rollout and training of a mixture-of-experts model use the same experts, and so agree on log-probabilities."""

import base64
import io
import json
import random
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.architectures import small_model, words
from rally.distributed.message_encoding import rows_of_arrays, rows_to_arrays
from rally.engines.base import EngineError, ReplicaGone
from rally.engines.embedded import EngineCore, EngineSettings
from rally.engines.remote.rally_api import Rally
from rally.engines.remote.server_api import GenerationRequest, Launch
from rally.engines.remote.sglang_api import Sglang
from rally.engines.remote.vllm_api import Vllm
from rally.models import attention
from rally.models.forward_variables import checkpoint_contexts
from rally.models.routing import ExpertRouter, Routing, RoutingError, fitting, load_metrics, routed, routers_of
from rally.track.run_folder.episode_json import episode_from_json, episode_to_json
from rally.train.batch import TrainBatch
from rally.train.forward.fused_layers import choose_training_forward
from rally.train.forward.logprobs import token_logprobs
from rally.train.forward.router_replay import fitted_row, recorded_rows
from rally.train.micro_batches import MicroBatchLimits
from rally.train.packing import Row, micro_batches, pack, route_array, shared_tokens
from rally.train.policy import OptimizerSettings, Policy
from rally.train.update import UpdateSettings, update_policy
from rally.types import Episode, Generation, Routes, SamplingParams, Segment, StopReason, Task

WIDE = MicroBatchLimits(10_000)
CPU = torch.device("cpu")


def moe(name: str = "qwen3_moe") -> PreTrainedModel:
    model = small_model(name)
    attention.install(model)
    return model


def routes_of(numbers: np.ndarray[Any, Any]) -> Routes:
    return Routes(numbers.astype("<i2").tobytes(), *numbers.shape[1:])


def other_experts(model: PreTrainedModel, ids: list[int], noise: float, seed: int) -> Tensor:
    """What the routers would choose if their logits had noise, as in another engine."""
    generator, routers = torch.Generator().manual_seed(seed), [m for m in model.modules() if hasattr(m, "rally_router")]
    before = [router.weight.detach().clone() for router in routers]
    with torch.no_grad():
        for router in routers:
            router.weight.add_(noise * torch.randn(router.weight.shape, generator=generator))
        with routed(routing := Routing(record=True)):
            model(input_ids=torch.tensor([ids[:-1]]), use_cache=False)
        for router, weight in zip(routers, before, strict=True):
            router.weight.copy_(weight)
    return routing.recorded(len(ids) - 1)


def rollout(model: PreTrainedModel, noise: float = 0.02, count: int = 4) -> TrainBatch:
    """Rows of two groups whose tokens were sampled with experts that the trainer would not choose."""
    rows = []
    for number in range(count):
        prompt = words(number // 2, 12)
        ids = prompt + words(100 + number, 20 + number)
        routes = other_experts(model, ids, noise, seed=number // 2)  # a prompt has the same experts in its group
        with torch.no_grad(), routed(Routing(replay_TLk=routes)):
            logp = model(input_ids=torch.tensor([ids[:-1]]), use_cache=False).logits[0].log_softmax(-1)
        generation = Generation(
            ids=tuple(ids[12:]),
            logprobs=tuple(float(logp[at - 1, ids[at]]) for at in range(12, len(ids))),
            finish="stop",
            routes=routes_of(routes.numpy()),
        )
        row = Row.of(Segment(prompt_ids=tuple(prompt)).append_sampled(generation), number)
        rows.append(replace(row, advantages=(1.0 if number % 2 else -1.0,) * len(row.sampled)))
    return TrainBatch(
        rows=rows,
        rewards_N=torch.tensor([0.0, 1.0] * (count // 2)),
        groups_N=torch.arange(count) // 2,
        tokens_N=torch.tensor([len(row.sampled) for row in rows]),
    )


def settings(mode: Any, **more: Any) -> UpdateSettings:
    return UpdateSettings(mini_batch_groups=2, router_replay=mode, **more)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_replay_removes_the_mismatch_of_other_experts(checkpointing: bool) -> None:
    found = {}
    for mode in ("disabled", "R2", "R3"):
        model = moe()
        policy = Policy(model, OptimizerSettings(lr=1e-9), 1, gradient_checkpointing=checkpointing)
        found[mode] = update_policy(policy, rollout(model), settings(mode))
    assert found["disabled"]["actor/rollout_mismatch_max"] > 0.01
    assert found["R2"]["actor/rollout_mismatch_max"] == pytest.approx(found["disabled"]["actor/rollout_mismatch_max"])
    assert found["R3"]["actor/rollout_mismatch_max"] < 1e-5
    assert 0 < found["R3"]["actor/router_replay_changed"] < 0.5
    assert found["R2"]["actor/router_replay_changed"] == 0
    assert "actor/router_replay_changed" not in found["disabled"]
    for metrics in found.values():
        assert 1 <= metrics["actor/moe_load_max_ratio"] <= 4 and 0 < metrics["actor/moe_load_entropy"] <= 1


def test_replayed_gradients_are_those_of_the_same_experts() -> None:
    """Packed with shared prompts and recomputed in the backward pass, against one row at a time."""
    model = moe()
    batch = rollout(model)
    (rows,) = micro_batches(batch.rows, 10_000)
    packed = pack(rows, CPU)
    assert len(packed.ids_T) < sum(len(row.inputs) for row in rows), "the prompts are shared"
    model.gradient_checkpointing_enable(
        gradient_checkpointing_kwargs={"use_reentrant": False, "context_fn": checkpoint_contexts}
    )
    model.train()
    routing = Routing(replay_TLk=packed.routes_TLk)
    token_logprobs(model, packed, routing=routing).logp_M.sum().backward()
    assert sum(int(count.sum()) for count in routing.counts.values()) == 2 * 2 * len(packed.ids_T), "counted once"
    ours = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    model.eval()
    model.zero_grad()
    for row in rows:
        assert row.routes is not None
        replay = torch.from_numpy(route_array(row.routes).astype(np.int64))
        with routed(Routing(replay_TLk=replay)):
            logp = model(input_ids=torch.tensor([row.ids[:-1].tolist()]), use_cache=False).logits[0].log_softmax(-1)
        torch.stack([logp[at - 1, row.ids[at]] for at in row.sampled]).sum().backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(ours[name], parameter.grad, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("forward", ["packed", "masked", "unpacked"])
def test_recorded_routes_belong_to_their_tokens(forward: Any) -> None:
    """However rows are computed, a row's routes are those of its own forward."""
    model = moe()
    choose_training_forward(model, forward)
    rows = [replace(row, routes=None) for row in rollout(model).rows]
    if forward == "masked":
        model.set_attn_implementation("sdpa")
    for row, found in zip(rows, recorded_rows(model, rows, WIDE), strict=True):
        with torch.no_grad(), routed(alone := Routing(record=True)):
            model(input_ids=torch.tensor([row.inputs.tolist()]), use_cache=False)
        assert found.routes is not None
        assert (route_array(found.routes) == alone.recorded(len(row.inputs)).numpy()).all()


def test_prefixes_with_other_experts_are_computed_apart() -> None:
    ids = tuple(words(1, 20))
    numbers = np.random.default_rng(0).integers(0, 4, (19, 2, 2))
    changed = numbers.copy()
    changed[7] = (changed[7] + 1) % 4
    a, b, c = (
        Row(ids=(*ids[:-1], last), sampled=(19,), logprobs=(0.0,), episode=0, routes=routes)
        for last, routes in ((1, routes_of(numbers)), (2, routes_of(changed)), (3, None))
    )
    assert (shared_tokens(a, a), shared_tokens(a, b), shared_tokens(a, c)) == (19, 7, 19)
    packed = pack([a, b], CPU)
    assert len(packed.ids_T) == 19 + 12 and packed.routes_TLk is not None
    for row, path in zip((numbers, changed), packed.paths, strict=True):
        assert (packed.routes_TLk[path].numpy() == row).all()


def test_rows_keep_their_routes_on_the_way_to_other_ranks_and_to_disk() -> None:
    rows = [*rollout(moe()).rows[:2], Row(ids=(1, 2), sampled=(1,), logprobs=(0.0,), episode=2)]
    assert [row.routes for row in rows_of_arrays(rows_to_arrays(rows))] == [row.routes for row in rows]
    routes = routes_of(np.arange(12).reshape(3, 2, 2))
    segment = Segment(prompt_ids=(1, 2)).append_sampled(
        Generation(ids=(3, 4), logprobs=(0.0, 0.0), finish="stop", routes=routes)
    )
    assert segment.append_observed((5,)).routes == routes
    task = Task(id="t", prompt=({"role": "user", "content": "x"},), data_source="d")
    one = Episode(id="e", group="g", task=task, segments=(segment,), stop_reason=StopReason.STOP, reward=0.0)
    assert episode_from_json(episode_to_json(one)) == one


def test_servers_count_layers_without_a_router() -> None:
    routers = [ExpertRouter(1, 4, 2), ExpertRouter(3, 4, 2)]
    numbers = np.arange(3 * 4 * 2).reshape(3, 4, 2)
    assert (fitting(numbers, routers, 4) == numbers[:, [1, 3]]).all()
    assert fitting(numbers[:, :2], routers, 4).shape == (3, 2, 2)
    with pytest.raises(RoutingError, match="3 layers with 2 experts a token"):
        fitting(numbers[:, :3], routers, 4)
    row = Row(ids=(1, 2, 3), sampled=(2,), logprobs=(0.0,), episode=0, routes=routes_of(numbers))
    assert fitted_row(row, routers, 4).routes == routes_of(numbers[:2, [1, 3]])


@pytest.mark.drill(
    "reliability",
    "Router replay of episodes whose rollout returned no expert choices, or of a dense model",
    "One sentence before the first update; nothing is trained",
)
def test_missing_routes_are_an_error() -> None:
    model = moe()
    batch = rollout(model)
    rows = [batch.rows[0], *(replace(row, routes=None) for row in batch.rows[1:])]
    with pytest.raises(RoutingError, match="no expert choices for 3 of 4 rows"):
        update_policy(Policy(model, OptimizerSettings(), 1), replace(batch, rows=rows), settings("R3"))
    dense = small_model("llama")
    attention.install(dense)
    with pytest.raises(RoutingError, match="LlamaForCausalLM has no routers"):
        update_policy(Policy(dense, OptimizerSettings(), 1), batch, settings("R2"))


@pytest.mark.parametrize("name", ["gpt_oss", "deepseek_v2", "glm4_moe", "kimi_linear", "longcat_flash", "llama4_text"])
def test_families_replay_what_they_recorded(name: str) -> None:
    """Bit for bit, and the chosen experts are those given even where the router would choose others."""
    model, ids = moe(name), torch.tensor([words(1, 30)])
    expected = model(input_ids=ids, use_cache=False).logits
    with routed(first := Routing(record=True)):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    recorded = first.recorded(30)
    with routed(Routing(replay_TLk=recorded)):
        assert torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    experts = routers_of(model)[0].experts
    moved = ((recorded.long() + 1) % experts).to(torch.int16)
    with routed(again := Routing(replay_TLk=moved, record=True)):
        assert not torch.equal(model(input_ids=ids, use_cache=False).logits, expected)
    assert torch.equal(again.recorded(30), moved)


def test_load_metrics_tell_even_from_collapsed() -> None:
    even, collapsed = torch.full((8,), 5), torch.tensor([40, *[0] * 7])
    assert load_metrics({0: even})["actor/moe_load_max_ratio"] == 1
    assert load_metrics({0: even})["actor/moe_load_entropy"] == pytest.approx(1)
    both = load_metrics({0: even, 1: collapsed})
    assert both["actor/moe_load_max_ratio/worst_layer"] == 8 and both["actor/moe_load_max_ratio"] == 4.5
    assert both["actor/moe_load_entropy"] == pytest.approx(0.5)


def request(experts: int | None = 2) -> GenerationRequest:
    return GenerationRequest(
        id="r",
        prompt_ids=(1, 2, 3),
        params=SamplingParams(),
        before=1,
        after=1,
        salt="s",
        route_experts=experts,
    )


def vllm_answer(routes: np.ndarray[Any, Any] | None) -> dict[str, Any]:
    buffer = io.BytesIO()
    if routes is not None:
        np.save(buffer, routes)
    content = [{"logprob": -0.5}, {"logprob": -0.5}]
    choice = {"token_ids": [7, 8], "finish_reason": "stop", "logprobs": {"content": content}}
    return {"choices": [{**choice, "routed_experts": base64.b64encode(buffer.getvalue()).decode() or None}]}


def sglang_answer(routes: np.ndarray[Any, Any] | None) -> dict[str, Any]:
    text = None if routes is None else base64.b64encode(routes.astype("<i4").tobytes()).decode()
    meta = {"output_token_logprobs": [[-0.5, 7, None], [-0.5, 8, None]], "finish_reason": {"type": "stop"}}
    return {"output_ids": [7, 8], "meta_info": {**meta, "routed_experts": text}}


@pytest.mark.parametrize(("api", "answer"), [(Vllm(), vllm_answer), (Sglang(), sglang_answer)])
def test_servers_return_routes(api: Any, answer: Any) -> None:
    numbers = np.random.default_rng(0).integers(0, 128, (4, 3, 2)).astype(np.uint8)
    assert api.generation(answer(numbers), request()).routes == routes_of(numbers)
    assert api.generation(answer(None), request(None)).routes is None
    with pytest.raises(ReplicaGone, match="--enable-return-routed-experts"):
        api.generation(answer(None), request())
    with pytest.raises(ReplicaGone, match=r"4 tokens|cannot be read"):
        api.generation(answer(numbers[:3]), request())
    with pytest.raises(ReplicaGone, match="not numbers of experts"):
        api.generation(answer(numbers.astype(np.int32) * 1000 + 40000), request())
    damaged = answer(numbers)
    for place in (damaged.get("choices", [{}])[0], damaged.get("meta_info", {})):
        if "routed_experts" in place:
            place["routed_experts"] = "ÄÄ" + place["routed_experts"][5:]
    with pytest.raises(ReplicaGone, match="cannot be read"):
        api.generation(damaged, request())


def test_sglang_is_asked_for_routes() -> None:
    assert Sglang().generate(request()).body["return_routed_experts"] is True  # type: ignore[index]
    assert "return_routed_experts" not in (Sglang().generate(request(None)).body or {})


def test_random_routes_survive_packing(seeds: int = 6) -> None:
    """Rows with arbitrary common prefixes, some of whose routes differ."""
    for seed in range(seeds):
        rng, base = random.Random(seed), words(seed, 30)
        rows = []
        for number in range(8):
            ids = tuple(base[: rng.randint(1, 30)] + words(1000 * seed + number, rng.randint(2, 9)))
            numbers = np.arange(len(ids) - 1)[:, None, None] * np.ones((1, 3, 2), np.int64) % 100
            if rng.random() < 0.5:
                numbers[rng.randrange(len(numbers)) :] += rng.randint(1, 3)
            last = len(ids) - 1
            rows.append(Row(ids=ids, sampled=(last,), logprobs=(0.0,), episode=number, routes=routes_of(numbers)))
        (batch,) = micro_batches(rows, 10_000)
        packed = pack(batch, CPU)
        assert packed.routes_TLk is not None
        for row, path in zip(batch, packed.paths, strict=True):
            assert row.routes is not None
            assert packed.ids_T[path].tolist() == row.inputs.tolist()
            assert (packed.routes_TLk[path].numpy() == route_array(row.routes)).all()


def test_servers_are_launched_with_the_flag(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("vllm_api", "sglang_api"):
        monkeypatch.setattr(f"rally.engines.remote.{module}.probe_package", lambda *_: "False")
    launch = Launch(
        python="python",
        folder="m",
        port=1,
        dtype="bfloat16",
        max_model_len=10,
        max_num_seqs=1,
        max_num_batched_tokens=10,
        memory_share=0.5,
        extra={},
    )
    assert "--image-processor" not in Rally().command(launch)
    shown = Rally().command(replace(launch, images="m", extra={"mm_processor_kwargs": {"max_pixels": 9}}))
    assert shown[shown.index("--image-processor") + 1] == "m"
    assert json.loads(shown[shown.index("--mm-processor-kwargs") + 1]) == {"max_pixels": 9}
    for api, flag in (
        (Vllm(), "--enable-return-routed-experts"),
        (Sglang(), "--enable-return-routed-experts"),
        (Rally(), "--return-routes"),
    ):
        assert flag not in api.command(launch)
        assert flag in api.command(replace(launch, routes=True))


@pytest.mark.parametrize("backend", ["gather", "paged"])
@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss"])
def test_the_embedded_engine_returns_the_experts_of_every_token(name: str, backend: str) -> None:
    """Cached prefixes and later turns included; the training forward chooses the same ones for the same weights."""
    model = moe(name)
    settings = EngineSettings(max_model_len=200, backend=backend, return_routes=True)  # type: ignore[arg-type]
    core = EngineCore(model, settings, num_pages=200)
    done = []
    prompts = [words(1, 60), words(1, 60), words(2, 40)]
    for _ in range(2):
        turn = [core.add(p, SamplingParams(max_tokens=9, seed=i, ignore_eos=True)) for i, p in enumerate(prompts)]
        while core.busy:
            core.step()
        prompts = [[*request.ids, *words(3, 7)] for request in turn]
        done += turn
    assert sum(request.cached_tokens > 0 for request in done) >= 4
    for request in done:
        with torch.no_grad(), routed(routing := Routing(record=True)):
            model(input_ids=torch.tensor([request.ids[:-1]]), use_cache=False)
        assert request.routes is not None
        ours, theirs = route_array(request.routes), routing.recorded(len(request.ids) - 1).numpy()
        assert (np.sort(ours, -1) == np.sort(theirs, -1)).all()
        segment = Segment(prompt_ids=tuple(request.ids[: request.prompt_len])).append_sampled(request.result())
        assert segment.routes == request.routes


def test_a_model_without_routers_cannot_return_experts() -> None:
    with pytest.raises(EngineError, match="no routers whose choices can be replayed"):
        EngineCore(moe("llama"), EngineSettings(max_model_len=64, return_routes=True), num_pages=50)
