"""Attention that the CUDA kernels do not support is rejected by name before the first step, and runs in plain torch."""

import random

import pytest
import torch
from small_models import VOCABULARY, make_model
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel

from rally.engines import EngineError
from rally.engines.embedded import EngineCore, EngineSettings
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack
from rally.types import SamplingParams

SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "initializer_range": 0.3,
    "sliding_window": 20,
    "layer_types": ["sliding_attention", "full_attention"],
    "attn_implementation": "eager",
}


def softcapped() -> PreTrainedModel:
    torch.manual_seed(0)
    config = Gemma2Config(**SIZES, attn_logit_softcapping=2.0, final_logit_softcapping=5.0, query_pre_attn_scalar=16)
    return Gemma2ForCausalLM(config).eval()


def with_sinks() -> PreTrainedModel:
    torch.manual_seed(0)
    config = GptOssConfig(**SIZES, num_local_experts=2, num_experts_per_tok=1, rope_parameters={"rope_type": "default"})
    return GptOssForCausalLM(config).eval()


@torch.no_grad()
def spec(model: PreTrainedModel, ids: list[int], prompt_len: int) -> list[float]:
    """The reference: the library's own eager attention, on a separate copy of the model."""
    logp = torch.log_softmax(model(input_ids=torch.tensor([ids])).logits[0].float(), -1)
    return [logp[i - 1, ids[i]].item() for i in range(prompt_len, len(ids))]


@pytest.mark.parametrize(("make", "name"), [(softcapped, "soft-capping"), (with_sinks, "sinks")])
def test_variants_run_in_plain_torch_and_are_refused_by_the_kernels(make, name):
    with pytest.raises(EngineError, match=f"{name}.*attention_backend=gather"):
        EngineCore(make(), EngineSettings(backend="paged", max_model_len=256), num_pages=50)
    model, reference = make(), make()
    core = EngineCore(model, EngineSettings(backend="gather", max_model_len=256), num_pages=200)
    rng = random.Random(0)
    prompts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(2, 50))] for _ in range(5)]
    requests = [core.add(p, SamplingParams(max_tokens=10, seed=i)) for i, p in enumerate(prompts)]
    while core.busy:
        core.step()
    for request in requests:
        want = spec(reference, request.ids, request.prompt_len)
        assert request.logprobs == pytest.approx(want, abs=2e-5)
        row = Row(
            ids=tuple(request.ids),
            sampled=tuple(range(request.prompt_len, len(request.ids))),
            logprobs=tuple(request.logprobs),
            episode=0,
        )
        trained = token_logprobs(model, pack([row], torch.device("cpu"))).logp_M
        assert trained.tolist() == pytest.approx(want, abs=2e-5)


def test_other_attention_and_other_heads_are_refused():
    odd = make_model()
    odd.config.head_dim = 24
    with pytest.raises(EngineError, match="head size of 24"):
        EngineCore(odd, EngineSettings(backend="paged"), num_pages=50)
    linear = make_model()
    linear.config.layer_types = ["linear_attention", "full_attention", "full_attention"]
    with pytest.raises(EngineError, match=r"linear_attention.*does not support"):
        EngineCore(linear, EngineSettings(backend="gather"), num_pages=50)
