"""The CUDA runner equals the plain runner: with reference kernels on a CPU, with the real kernels on a GPU."""

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from small_models import FAMILIES, VOCABULARY, full_logprobs, make_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from rally.engines import EmbeddedEngine
from rally.engines.embedded import EngineCore, EngineSettings, cuda_runner
from rally.engines.embedded.cuda_runner import CudaRunner, bucket
from rally.engines.embedded.request_slots import Request
from rally.models.fused_layers import FusedDecoder
from rally.models.kernels.dispatch import kernels_for
from rally.train.forward.deterministic_logprobs import exact_decoder, exact_logprobs
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack
from rally.types import SamplingParams

gpu = pytest.mark.gpu
needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def run(
    model: PreTrainedModel, count: int = 24, pages: int = 400, **settings: object
) -> tuple[EngineCore, list[Request]]:
    sizes = {"max_num_batched_tokens": 128, "max_num_seqs": 16, "max_model_len": 512, "backend": "paged"}
    core = EngineCore(model, EngineSettings(**{**sizes, **settings}), num_pages=pages)  # type: ignore[arg-type]
    rng = random.Random(0)
    shared = [rng.randrange(VOCABULARY) for _ in range(40)]
    prompts = [shared[: rng.choice((0, 40))] + [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 90))]
               for _ in range(count)]  # fmt: skip
    requests = [core.add(p, SamplingParams(max_tokens=24, seed=i, temperature=0.8)) for i, p in enumerate(prompts)]
    while core.busy:
        core.step()
    return core, requests


def rows(requests: list[Request]) -> list[Row]:
    return [
        Row(ids=tuple(r.ids), sampled=tuple(range(r.prompt_len, len(r.ids))), logprobs=tuple(r.logprobs), episode=i)
        for i, r in enumerate(requests)
    ]


def test_histories_of_few_requests_are_split_and_agree(monkeypatch):
    monkeypatch.setattr(cuda_runner, "SPLIT", 32)
    model = make_model()
    _, requests = run(model)
    for request in requests:
        want = full_logprobs(model, request.ids, request.prompt_len, 0.8)
        assert request.logprobs == pytest.approx(want, abs=1e-5)


def test_the_graphs_of_all_steps_are_captured_before_the_first(monkeypatch):
    monkeypatch.setattr(cuda_runner, "SPLIT", 32)
    captured, used = set(), set()
    seen = captured

    def replay(self, graph, key, run):
        if graph:
            seen.add(key)
        run()

    monkeypatch.setattr(CudaRunner, "_replay", replay)
    core = EngineCore(make_model(), EngineSettings(backend="paged", max_model_len=512, max_num_seqs=90), num_pages=400)
    core.runner.graphs = True
    core.prepare()
    seen = used
    requests = [
        core.add([i % 90, 1, 2] * (1 + i % 40), SamplingParams(max_tokens=5 + i % 60, seed=i)) for i in range(140)
    ]
    while core.busy:
        core.step()
    assert len(used) > 10 and used <= captured
    for request in requests[::20]:
        want = full_logprobs(core.model, request.ids, request.prompt_len)
        assert request.logprobs == pytest.approx(want, abs=1e-5)


@gpu
@needs_gpu
def test_no_graph_is_captured_after_the_first_step():
    core = EngineCore(make_model().cuda().bfloat16(), EngineSettings(max_model_len=512, max_num_seqs=90), num_pages=400)
    core.prepare()
    captured = len(core.runner._captured)
    for i in range(140):
        core.add([i % 90, 1, 2] * (1 + i % 40), SamplingParams(max_tokens=5 + i % 60, seed=i))
    while core.busy:
        core.step()
    assert len(core.runner._captured) == captured > 20


def test_a_step_is_launched_before_the_last_is_read_back():
    core = EngineCore(make_model(), EngineSettings(backend="paged", max_model_len=128), num_pages=50)
    request = core.add([1, 2, 3], SamplingParams(max_tokens=5, seed=0))
    assert core.step() == [] and core.slots.known[request.slot] == 3 and core.slots.planned[request.slot] == 4
    core.step()
    assert core.slots.known[request.slot] == 4 and core.slots.planned[request.slot] == 5
    core.abort([request])
    assert request.finish == "abort" and request.sampled == 1
    assert core.step() == [] and not core.busy, "the step in flight is read back and belongs to nobody"


def test_deterministic_logits_have_the_models_final_scaling():
    model = make_model("gemma3")
    model.config.final_logit_softcapping = 3.0
    _, requests = run(model, count=4, deterministic=True)
    for request in requests:
        assert request.logprobs == pytest.approx(full_logprobs(model, request.ids, request.prompt_len, 0.8), abs=1e-5)


def test_a_stop_token_wastes_the_step_that_ran_ahead_and_nothing_else():
    model = make_model()
    _, (free,) = run(model, count=1)
    stop = free.ids[free.prompt_len + 3]
    core = EngineCore(model, EngineSettings(backend="paged", max_model_len=512), num_pages=50)
    params = SamplingParams(max_tokens=24, seed=0, temperature=0.8, stop_ids=(stop,))
    stopped = core.add(free.ids[: free.prompt_len], params)
    while core.busy:
        core.step()
    seen = free.ids[free.prompt_len :].index(stop) + 1
    assert stopped.ids == free.ids[: free.prompt_len + seen]
    assert core.pool.num_free + len(core.index) == core.pool.num_pages


def test_fused_weights_are_the_modules_own(tmp_path: Path):
    model = make_model("qwen3")
    before = {name: p.clone() for name, p in model.state_dict().items()}
    decoder = FusedDecoder(model, kernels_for(model.device))
    again = FusedDecoder(model, kernels_for(model.device))
    first, second = decoder.layers[0].qkv.weight, again.layers[0].qkv.weight
    assert first.data_ptr() == second.data_ptr(), "two decoders of one module share its packed weights"
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    with torch.no_grad():
        model.model.layers[0].self_attn.k_proj.weight.fill_(3)
    assert (first[96:128] == 3).all(), "what an optimizer writes in place is what the engine computes with"
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    assert all(torch.equal(p, model.state_dict()[name]) for name, p in loaded.state_dict().items())


@pytest.mark.parametrize("which", ["", "up_proj", "o_proj", "embed_tokens"])
def test_weights_that_were_moved_are_found_again(which):
    """One moved weight is enough: packed products and CUDA graphs hold addresses, and must not use the old ones."""
    core, _ = run(make_model(seed=0), count=2)
    core.runner._captured[("a", "graph")] = None  # type: ignore[attr-defined]
    others = dict(make_model(seed=1).named_parameters())
    for name, parameter in core.model.named_parameters():
        if which in name:
            parameter.data = others[name].data
    core.commit_weights()
    assert not core.runner._captured  # type: ignore[attr-defined]
    request = core.add([5, 6, 7], SamplingParams(max_tokens=6, seed=1))
    while core.busy:
        core.step()
    assert request.logprobs == pytest.approx(full_logprobs(core.model, request.ids, 3), abs=1e-5)


@pytest.mark.parametrize("family", ["qwen2", "gemma3"])
def test_the_exact_forward_reads_a_packed_tree(family):
    model = make_model(family)
    _, requests = run(model, deterministic=True)
    packed = pack(rows(requests), model.device)
    got = exact_logprobs(exact_decoder(model), packed, 0.8)
    assert got.tolist() == pytest.approx(packed.old_logp_M.tolist(), abs=1e-5)


def test_buckets_hold_what_they_are_for():
    for count in range(1, 3000):
        assert count <= bucket(count) <= max(2 * count, 1)
    assert len({bucket(count) for count in range(1, 257)}) < 24, "each is a graph to capture"


@gpu
@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("eager", [False, True])
def test_gpu_agrees_with_the_training_forward(family, eager):
    model = make_model(family).to("cuda", torch.bfloat16)
    core, requests = run(model, count=60, pages=600, eager=eager)
    assert isinstance(core.runner, CudaRunner)
    packed = pack(rows(requests), model.device)
    with torch.no_grad():
        apart = token_logprobs(model, packed, 0.8).logp_M - packed.old_logp_M
    assert (apart.exp() - 1 - apart).mean() < 5e-4 and apart.abs().max() < 0.25


@gpu
@needs_gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_gpu_deterministic_means_equal_bits_and_no_batch_mates(family):
    model = make_model(family).to("cuda", torch.bfloat16)
    _, requests = run(model, count=40, deterministic=True)
    packed = pack(rows(requests), model.device)
    got = exact_logprobs(exact_decoder(model), packed, 0.8)
    assert torch.equal(got, packed.old_logp_M)
    _, alone = run(model, count=1, deterministic=True)
    assert (alone[0].ids, alone[0].logprobs) == (requests[0].ids, requests[0].logprobs)


@gpu
@needs_gpu
def test_gpu_out_of_pages_preempts():
    model = make_model().to("cuda", torch.bfloat16)
    core, requests = run(model, count=20, pages=40)
    assert core.scheduler.preemptions > 0 and all(len(r.ids) - r.prompt_len == 24 for r in requests)
    assert core.pool.num_free + len(core.index) == core.pool.num_pages


@gpu
@needs_gpu
async def test_gpu_lends_its_memory_while_weights_change():
    model = make_model().to("cuda", torch.bfloat16)
    settings = EngineSettings(max_model_len=512, lend_memory=True, memory_share=0.3)
    engine = EmbeddedEngine(model, settings)
    params = SamplingParams(max_tokens=20, seed=3, temperature=0)
    first = await engine.generate([1, 2, 3, 4], params)
    before = torch.cuda.mem_get_info()[0]
    with engine.updating():
        lent = torch.cuda.mem_get_info()[0] - before
    assert lent > 0.9 * engine.core.store.memory.flat.numel()
    assert torch.cuda.mem_get_info()[0] - before < 64 * 2**20
    second = await engine.generate([1, 2, 3, 4], params)
    await engine.close()
    assert first.ids == second.ids and second.cached_tokens == 0


LENDING = """
import asyncio, torch
from transformers import Qwen2Config, Qwen2ForCausalLM
from rally.engines import EmbeddedEngine
from rally.engines.embedded import EngineSettings
from rally.platforms import use_expandable_segments
from rally.types import SamplingParams
device = torch.device("cuda", 0)
assert use_expandable_segments(device)
sizes = dict(hidden_size=256, intermediate_size=512, num_hidden_layers=2, num_attention_heads=4, vocab_size=512)
model = Qwen2ForCausalLM(Qwen2Config(num_key_value_heads=2, **sizes)).to(device, torch.bfloat16).eval()
params = SamplingParams(max_tokens=20, seed=3, temperature=0)
settings = EngineSettings(max_model_len=512, max_num_seqs=16, lend_memory=True, memory_share=0.5)

async def main():
    engine = EmbeddedEngine(model, settings)
    await engine.start()
    assert engine.core.runner._captured
    first = await engine.generate([1, 2, 3, 4], params)
    for _ in range(2):
        with engine.updating():  # the update takes more than is free beside the KV cache
            whole = torch.empty(int(0.8 * torch.cuda.mem_get_info()[0]), dtype=torch.uint8, device=device)
            whole.fill_(1)
            del whole
        again = await engine.generate([1, 2, 3, 4], params)
        assert first.ids == again.ids and first.logprobs == again.logprobs
    await engine.close()

asyncio.run(main())
assert all(segment["is_expandable"] for segment in torch.cuda.memory_snapshot())
"""


@gpu
@needs_gpu
def test_gpu_graphs_and_lent_memory_work_beside_expandable_segments():
    """In a process of its own: they are a setting of the whole process."""
    done = subprocess.run([sys.executable, "-c", LENDING], capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
