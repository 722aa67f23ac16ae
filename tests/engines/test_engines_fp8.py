"""Rollouts in FP8: what is recorded is what the FP8 model computes, through caches, updates, adapters and drafts."""

import asyncio
import itertools
import random

import pytest
import torch
from small_models import FAMILIES, VOCABULARY, make_model
from torch import Tensor
from transformers import PreTrainedModel

from benchmarks.architectures import small_model
from rally.engines import EmbeddedEngine
from rally.engines.base import EngineError
from rally.engines.embedded import EngineCore, EngineSettings, NgramSpeculation
from rally.engines.embedded.cuda_runner import CudaRunner
from rally.engines.embedded.engine import MirroredEngine
from rally.engines.embedded.memory_plan import plan_memory, plan_words
from rally.engines.embedded.request_slots import Request
from rally.models.fp8 import Fp8Linears, forward_in_fp8
from rally.models.lora import LoraSettings, add_adapters
from rally.train.startup_check import StartupCheckError, check_rollout
from rally.types import SamplingParams

gpu = pytest.mark.gpu
needs_fp8_gpu = pytest.mark.skipif(
    not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a CUDA device of compute capability 8.9",
)


def settings(**more: object) -> EngineSettings:
    sizes = {"max_num_batched_tokens": 64, "max_num_seqs": 8, "max_model_len": 256, "quantization": "fp8"}
    return EngineSettings(**{**sizes, **more})  # type: ignore[arg-type]


def sampled(core: EngineCore, prompts: list[list[int]]) -> list[Request]:
    requests = [
        core.add(prompt, SamplingParams(max_tokens=16, seed=i, temperature=0.8)) for i, prompt in enumerate(prompts)
    ]
    while core.busy:
        core.step()
    return requests


def prompts(count: int = 6, seed: int = 0) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(VOCABULARY) for _ in range(20 + 5 * i)] for i in range(count)]


@torch.no_grad()
def differences(model: PreTrainedModel, requests: list[Request], linears: Fp8Linears | None) -> Tensor:
    """How far what was recorded is from one forward of the module over each history, in FP8 with `linears`."""
    parts = []
    for request in requests:
        ids = torch.tensor([request.ids], device=model.device)
        with forward_in_fp8(linears):
            logits = model(input_ids=ids, use_cache=False).logits[0].float() / 0.8
        logp = torch.log_softmax(logits, -1)[request.prompt_len - 1 : -1]
        recorded = torch.tensor(request.result().logprobs, device=model.device)
        parts.append((logp.gather(1, ids[0, request.prompt_len :, None])[:, 0] - recorded).abs())
    return torch.cat(parts).cpu()


def assert_in_fp8(model: PreTrainedModel, requests: list[Request], linears: Fp8Linears) -> None:
    """Equal up to rounding, but for the few tokens where that moves an input to the next number of 8 bits."""
    off = differences(model, requests, linears)
    assert (off < 1e-4).float().mean() > 0.5 and off.mean() < 0.02
    assert differences(model, requests, None).mean() > 4 * off.mean() + 0.01, "FP8 makes a difference"


@pytest.mark.parametrize("backend", ["gather", "paged"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_fp8_model_is_sampled_and_recorded(family: str, backend: str) -> None:
    model = make_model(family)
    core = EngineCore(model, settings(backend=backend), num_pages=100)
    assert core.fp8 is not None
    assert not isinstance(core.runner, CudaRunner) or core.runner.fused is not None
    first = sampled(core, prompts())
    assert_in_fp8(model, first, core.fp8)
    second = sampled(core, [[*request.ids, 5, 6, 7] for request in first])
    assert all(request.cached_tokens > request.prompt_len // 2 for request in second)
    assert_in_fp8(model, second, core.fp8)


def test_other_families_run_through_their_modules() -> None:
    model = small_model("olmo2")
    core = EngineCore(model, settings(backend="paged"), num_pages=100)
    assert isinstance(core.runner, CudaRunner) and core.runner.fused is None
    assert_in_fp8(model, sampled(core, prompts()), core.fp8)


@pytest.mark.parametrize("more", [{"backend": "gather"}, {"backend": "paged"}, {"backend": "paged", "eager": True}])
def test_adapters_are_added_in_their_own_precision(more: dict[str, object]) -> None:
    model = make_model("llama")
    add_adapters(model, LoraSettings(rank=4, alpha=32), "base")
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    core = EngineCore(model.eval(), settings(**more), num_pages=100)
    assert_in_fp8(model, sampled(core, prompts()), core.fp8)


@pytest.mark.parametrize("in_flight", ["keep", "recompute", "abort"])
@pytest.mark.parametrize("backend", ["gather", "paged"])
def test_an_update_reaches_the_copies(backend: str, in_flight: str) -> None:
    model = make_model("qwen3")
    core = EngineCore(model, settings(backend=backend, in_flight=in_flight), num_pages=100)
    running = [core.add(prompt, SamplingParams(max_tokens=30, seed=i)) for i, prompt in enumerate(prompts(2))]
    for _ in range(8):
        core.step()
    core.drain()
    places = [copy.data_FC.data_ptr() for _, copy in core.fp8._copies.values()]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    core.commit_weights()
    assert places == [copy.data_FC.data_ptr() for _, copy in core.fp8._copies.values()]
    assert core.fp8.largest_error().relative < 0.05
    while core.busy:
        core.step()
    assert {request.finish for request in running} == {"abort" if in_flight == "abort" else "length"}
    assert_in_fp8(model, sampled(core, prompts(seed=1)), core.fp8)


def test_a_mirrored_engine_samples_from_copies_of_its_own() -> None:
    model = make_model("llama")
    engine = MirroredEngine(model, settings())
    linears = engine.core.fp8
    before = linears.copy_of(next(iter(engine.core.model.model.layers)).mlp.up_proj.weight).data_FC.clone()
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(torch.linspace(1, 2, 96))
    mine = engine.core.model.model.layers[0].mlp.up_proj.weight
    assert torch.equal(linears.copy_of(mine).data_FC.float(), before.float())
    asyncio.run(engine.publish())
    assert not torch.equal(linears.copy_of(mine).data_FC.float(), before.float())
    assert linears.largest_error().relative < 0.05
    asyncio.run(engine.close())


def test_drafts_are_accepted_as_the_fp8_model_samples() -> None:
    model = make_model("llama")
    core = EngineCore(model, settings(speculation=NgramSpeculation(prompt_lookup_min=1)), num_pages=100)
    requests = sampled(core, [[1, 2, 3, 4] * 8 for _ in range(4)])
    assert core.drafted_tokens > 0
    off = differences(model, requests, core.fp8)
    assert off.mean() < 0.03 < differences(model, requests, None).mean()


def test_prompts_are_scored_in_fp8() -> None:
    model = make_model("llama")
    engine = EmbeddedEngine(model, settings(), num_pages=50)
    ids = prompts(1)[0]
    found = asyncio.run(engine.prompt_logprobs(ids, 1))
    asyncio.run(engine.close())
    for linears, same in ((engine.core.fp8, True), (None, False)):
        with torch.no_grad(), forward_in_fp8(linears):
            logp = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0], -1)
        own = logp[:-1].gather(1, torch.tensor(ids)[1:, None])[:, 0]
        assert ((own - torch.tensor(found.logprobs)).abs().mean() < 1e-3) == same


def test_the_plan_counts_the_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    model, sizes = make_model("llama"), settings(backend="paged")
    copies = 3 * (96 * 96 * 5 + 2 * 96 * 32 + 4 * (96 * 5 + 2 * 32))
    plain = plan_memory(model, settings(backend="paged", quantization=None))
    free = 2 * (plain.step_bytes + plain.kv_bytes)
    monkeypatch.setattr("rally.engines.embedded.memory_plan.free_bytes", lambda device: free)
    plan = plan_memory(model, sizes)
    page = plain.kv_bytes // plain.pages
    assert plan.fp8_bytes == copies and plain.pages - plan.pages == -(-copies // page)
    assert "0.00 GiB for FP8 weights" in plan_words(plan, sizes)


@pytest.mark.parametrize(
    ("name", "more", "sentence"),
    [
        (
            "qwen2",
            {"deterministic": True},
            "fp8 and rollout.deterministic=true exclude each other",
        ),
        ("falcon_h1", {}, "rollout.quantization=fp8 does not support FalconH1ForCausalLM, which has layers that hold"),
        ("qwen3_moe", {}, "rollout.quantization=fp8 does not support qwen3_moe, which has experts"),
    ],
)
def test_what_the_engine_cannot_do_in_fp8_is_refused(name: str, more: dict[str, object], sentence: str) -> None:
    with pytest.raises((EngineError, RuntimeError, ValueError), match=sentence):
        EngineCore(small_model(name), settings(**more), num_pages=50)


def checked(engine: EmbeddedEngine, model: PreTrainedModel) -> str:
    try:
        found = asyncio.run(check_rollout(engine, model, prompts(2), SamplingParams(max_tokens=4)))
    finally:
        asyncio.run(engine.close())
    return str(found)


@pytest.mark.parametrize("backend", ["gather", "paged"])
def test_the_check_at_the_start_measures_the_difference(backend: str) -> None:
    model = make_model("qwen2")
    engine = EmbeddedEngine(model, settings(backend=backend), num_pages=100)
    text = checked(engine, model)
    assert text.startswith("the rollout in FP8 differs by at most") and ", k3 " in text
    assert "its layers alone differ by at most 3" in text or "its layers alone differ by at most 4" in text
    assert engine.core.fp8.active


def test_the_check_at_the_start_finds_a_layer_of_other_weights() -> None:
    model = make_model("qwen2")
    engine = EmbeddedEngine(model, settings(), num_pages=100)
    _, copy = engine.core.fp8._copies["layers.1.self_attn.o_proj"]
    copy.scale_F.copy_(copy.scale_F.roll(1) * 1.2)
    with pytest.raises(StartupCheckError, match=r"layers.1.self_attn.o_proj is not computed correctly in FP8.* by \d"):
        checked(engine, model)


@pytest.mark.parametrize("part", ["qkv", "out", "gate_up", "down"])
def test_the_check_at_the_start_finds_a_layer_that_uses_the_copy_of_another(part: str) -> None:
    model = make_model("qwen2")
    engine = EmbeddedEngine(model, settings(backend="paged"), num_pages=100)
    one, other = (getattr(layer, part) for layer in engine.core.runner.fused.layers[:2])
    one.copy, other.copy = other.copy, one.copy
    with pytest.raises(StartupCheckError, match=rf"layers.[01].{part} is not computed correctly in FP8"):
        checked(engine, model)


def test_the_check_at_the_start_finds_what_is_wrong_without_fp8(monkeypatch: pytest.MonkeyPatch) -> None:
    """A mistake that the difference of FP8 would hide."""
    model = make_model("qwen2")
    engine = EmbeddedEngine(model, settings(), num_pages=100)
    own = Request.result

    def shifted(self: Request):
        generation = own(self)
        return type(generation)(
            **{**vars(generation), "logprobs": tuple(value - 0.05 for value in generation.logprobs)}
        )

    monkeypatch.setattr(Request, "result", shifted)
    with pytest.raises(StartupCheckError, match=r"the rollout differs by at most 5.0e-02 .* and rounding explains"):
        checked(engine, model)


@gpu
@needs_fp8_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_a_gpu_samples_what_the_reference_computes(family: str) -> None:
    """Through CUDA graphs, before and after an update. In half precision two forwards in FP8 differ by FP8 itself."""
    model = make_model(family).cuda().bfloat16()
    core = EngineCore(model, settings(), num_pages=200)
    core.prepare()
    assert isinstance(core.runner, CudaRunner) and core.runner.fused is not None
    for _ in range(2):
        assert core.fp8_error().relative < 0.06 and core.fp8.largest_error().relative < 0.06
        requests = sampled(core, prompts())
        reference = make_model(family)
        reference.load_state_dict({name: value.float().cpu() for name, value in model.state_dict().items()})
        off = differences(reference, requests, Fp8Linears(reference))
        assert off.mean() < 0.25 and off.max() < 2, f"mean {float(off.mean()):.3f}, largest {float(off.max()):.3f}"
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn_like(parameter), alpha=0.05)
        core.commit_weights()
    assert core.runner._captured, "the graphs served both versions"


async def test_a_request_of_the_check_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """The others end before the engine computes in FP8 again."""
    model = make_model("llama")
    engine = EmbeddedEngine(model, settings(), num_pages=100)
    added, add = itertools.count(), engine.core.add

    def failing(*arguments: object, **more: object) -> Request:
        if next(added) == 1:
            raise torch.OutOfMemoryError("out of memory")
        return add(*arguments, **more)  # type: ignore[arg-type]

    monkeypatch.setattr(engine.core, "add", failing)
    with pytest.raises(torch.OutOfMemoryError, match="out of memory"):
        await check_rollout(engine, model, prompts(2), SamplingParams())
    assert engine.core.fp8 is not None and engine.core.fp8.active and not engine.core.busy
    await engine.close()
