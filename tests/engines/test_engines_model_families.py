"""Every variant of attention is sampled as the model computes it, in plain torch and in the kernels' reference."""

import asyncio
import copy
import random

import pytest
import torch
from small_models import VOCABULARY
from transformers import Gemma2Config, Gemma2ForCausalLM, GptOssConfig, GptOssForCausalLM, PreTrainedModel

from benchmarks.architectures import sampled, small_model
from rally.engines import EngineError
from rally.engines.embedded import EngineCore, EngineSettings
from rally.models import attention
from rally.models.kv_layers import KVLayer, cached_parts
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


@pytest.mark.parametrize("backend", ["gather", "paged"])
@pytest.mark.parametrize("make", [softcapped, with_sinks])
def test_variants_of_attention_are_those_of_the_model(make, backend):
    model, reference = make(), make()
    core = EngineCore(model, EngineSettings(backend=backend, max_model_len=256), num_pages=200)
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


@pytest.mark.parametrize("backend", ["gather", "paged"])
@pytest.mark.parametrize("name", ["gemma4_text", "deepseek_v3", "mimo_v2_flash", "hrm_text", "gpt_bigcode"])
def test_caches_of_every_shape_are_exact(name, backend):
    """Sizes and heads per layer and shared layers, latents, keys longer than values, modules that run several times,
    one key/value head."""
    model = small_model(name)
    verdict = asyncio.run(sampled(copy.deepcopy(model), model, backend))
    assert verdict.outcome == "exact", verdict


def test_latents_are_cached_compressed():
    model = small_model("deepseek_v3")
    core = EngineCore(model, EngineSettings(max_model_len=64), num_pages=8)
    config = model.config
    expected = KVLayer(1, config.kv_lora_rank + config.qk_rope_head_dim, config.kv_lora_rank, values_in_keys=True)
    assert set(core.store.layers) == {expected}
    assert core.store.keys[0].data_ptr() == core.store.values[0].data_ptr()


def test_shared_layers_are_cached_once():
    model = small_model("gemma4_text")
    attention.install(model)
    layers = cached_parts(model).layers
    shared = [layer for layer in layers if layer.source is not None]
    assert len(shared) == model.config.num_kv_shared_layers or not model.config.num_kv_shared_layers
    assert all(layer.numbers == 0 for layer in shared)


def test_sparse_attention_is_refused_where_it_would_choose():
    model = small_model("deepseek_v32")
    model.config.index_topk = 32
    with pytest.raises(EngineError, match=r"sparse attention over 32 chosen tokens.*64"):
        EngineCore(model, EngineSettings(max_model_len=64), num_pages=50)
