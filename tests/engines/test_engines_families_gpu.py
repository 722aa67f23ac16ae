"""On a GPU, in half precision and through CUDA graphs, every kind of cache samples what the model computes."""

import copy

import pytest
import torch

from benchmarks.architectures import small_model, words
from rally.engines.embedded import EngineCore, EngineSettings
from rally.engines.embedded.cuda_runner import CudaRunner
from rally.types import SamplingParams

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]

NAMES = [
    *("qwen3_moe", "gpt_oss", "gemma2", "gemma4_text", "deepseek_v2", "deepseek_v3", "mimo_v2_flash"),
    *("qwen3_5_text", "qwen3_next", "lfm2", "falcon_h1", "nemotron_h", "granitemoehybrid", "kimi_linear", "mamba2"),
]


@pytest.mark.parametrize("name", NAMES)
def test_the_engine_samples_what_the_model_computes(name):
    model = small_model(name)
    exact = copy.deepcopy(model).to("cuda")
    core = EngineCore(
        model.to("cuda", torch.bfloat16), EngineSettings(max_model_len=300, max_num_seqs=8), num_pages=400
    )
    prompts = [words(1, 120), words(1, 120), words(2, 60), [*words(1, 100), *words(5, 30)]]
    requests = []
    for _ in range(2):  # the second turn begins from what the first one cached
        turn = [
            core.add(prompt, SamplingParams(max_tokens=30, seed=i, ignore_eos=True)) for i, prompt in enumerate(prompts)
        ]
        while core.busy:
            core.step()
            for size in (1, 8, 64):  # freed memory that a graph still reads would hold this
                torch.full((size,), 2**40, device="cuda")
        prompts = [[*request.ids, *words(9, 12)] for request in turn]
        requests += turn
    assert isinstance(core.runner, CudaRunner) and core.runner._captured, "decode steps run as CUDA graphs"
    assert sum(request.cached_tokens for request in requests[4:]) > 4 * 50
    errors = []
    for request in requests:
        ids = torch.tensor([request.ids], device="cuda")
        with torch.no_grad():
            logp = torch.log_softmax(exact(input_ids=ids, use_cache=False).logits[0].float(), -1)
        want = logp[request.prompt_len - 1 : -1].gather(1, ids[0, request.prompt_len :, None])[:, 0]
        errors.append((want.cpu() - torch.tensor(request.result().logprobs)).abs())
    error = torch.cat(errors)
    assert error.mean() < 0.1 * logp.std(), f"mean {float(error.mean()):.4f}, largest {float(error.max()):.3f}"
