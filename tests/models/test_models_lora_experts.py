"""LoRA on the experts of a mixture-of-experts model, which are parameters and not linear layers."""

from pathlib import Path

import pytest
import torch

from benchmarks.architectures import small_model, words
from rally.models import attention
from rally.models.load import LoadError, load_model
from rally.models.lora import (
    LoraError,
    LoraSettings,
    adapter_weights,
    add_adapters,
    merged_weights,
    save_adapters,
    unadapted_experts,
    without_adapters,
)
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack

pytest.importorskip("peft")
EXPERTS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")
IDS = torch.tensor([words(1, 24)])


def adapted(name: str = "qwen3_moe", **settings: object) -> torch.nn.Module:
    model = small_model(name)
    add_adapters(model, LoraSettings(**{"rank": 2, "parameters": EXPERTS} | settings), "somewhere")  # type: ignore[arg-type]
    torch.manual_seed(1)
    for part, parameter in model.named_parameters():
        if "lora_B" in part:
            parameter.data = 0.2 * torch.randn(parameter.shape)
    attention.install(model)
    return model


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "deepseek_v2"])
def test_adapters_on_experts_train_save_and_merge(name: str, tmp_path: Path) -> None:
    model = adapted(name)
    assert unadapted_experts(model) is None
    with torch.no_grad():
        found = model(input_ids=IDS, use_cache=False).logits
        with without_adapters(model):
            base = model(input_ids=IDS, use_cache=False).logits
    assert torch.equal(base, small_model(name)(input_ids=IDS, use_cache=False).logits)
    assert (found - base).abs().max() > 1e-2
    plain = small_model(name)
    plain.load_state_dict(merged_weights(model))
    torch.testing.assert_close(plain(input_ids=IDS, use_cache=False).logits, found, atol=2e-4, rtol=1e-3)
    save_adapters(model, adapter_weights(model), tmp_path)
    again = small_model(name)
    add_adapters(again, LoraSettings(start=str(tmp_path)), "somewhere")
    assert torch.allclose(again(input_ids=IDS, use_cache=False).logits, found, atol=1e-5)


def test_packed_rows_with_adapted_experts_are_exact_and_have_gradients() -> None:
    model = adapted()
    ids = words(1, 24)
    rows = [Row(ids=tuple(ids[:n]), sampled=(n - 1,), logprobs=(0.0,), episode=n) for n in (12, 24)]
    logp = token_logprobs(model, pack(rows, torch.device("cpu"))).logp_M
    expected = model(input_ids=IDS, use_cache=False).logits[0].log_softmax(-1)
    torch.testing.assert_close(logp, torch.stack([expected[n - 2, ids[n - 1]] for n in (12, 24)]), atol=1e-5, rtol=0)
    logp.sum().backward()
    trained = {name for name, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 0}
    assert any("experts" in name for name in trained) and all("lora_" in name for name in trained)


def test_all_linear_says_that_experts_are_not_adapted() -> None:
    sentence = unadapted_experts(adapted(parameters=()))
    assert sentence is not None and "get no LoRA adapters" in sentence
    assert "model.target_parameters=[mlp.experts.down_proj,mlp.experts.gate_up_proj] adapts them" in sentence
    assert unadapted_experts(small_model("qwen3_moe")) is None  # without LoRA all weights are trained


@pytest.mark.parametrize("name", ["qwen3_moe", "glm4_moe", "mixtral"])
def test_all_linear_adapts_linear_layers_only(name: str) -> None:
    """Neither experts nor routers; PEFT would add both, and take the dense layers of GLM for experts."""
    model = adapted(name, parameters=())
    found = {part.partition(".lora_")[0] for part, p in model.named_parameters() if p.requires_grad}
    linear = {part for part, module in small_model(name).named_modules() if type(module) is torch.nn.Linear}
    assert found == linear - {"lm_head"}
    plain = small_model(name)
    plain.load_state_dict(merged_weights(model))
    with torch.no_grad():
        expected = model(input_ids=IDS, use_cache=False).logits
    torch.testing.assert_close(plain(input_ids=IDS, use_cache=False).logits, expected, atol=2e-4, rtol=1e-3)


def test_all_linear_leaves_out_what_cannot_be_adapted() -> None:
    """PEFT refuses out_proj of Mamba; routers of Llama 4 and PhiMoE are linear layers that return tuples."""
    for name, absent, present in (
        ("falcon_h1", "out_proj", "in_proj"),
        ("llama4_text", "router", "q_proj"),
        ("phimoe", "router", "q_proj"),
        ("qwen3_5_text", "lm_head", "linear_attn.out_proj"),
    ):
        model = adapted(name, parameters=())
        found = {part.partition(".lora_")[0] for part, p in model.named_parameters() if p.requires_grad}
        assert any(part.endswith(present) for part in found) and not any(part.endswith(absent) for part in found)
        assert model(input_ids=IDS, use_cache=False).logits.isfinite().all()


def test_names_that_match_nothing_are_an_error() -> None:
    with pytest.raises(LoraError, match=r"target_parameters=experts.up matches no parameter .*mlp.experts.down_proj"):
        adapted(parameters=("experts.up",))
    with pytest.raises(LoraError, match="has no experts; leave it out"):
        adapted("llama", parameters=EXPERTS)


def test_the_balance_loss_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LoadError, match="output_router_logits, router_aux_loss_coef, and the load-balancing loss"):
        load_model(str(tmp_path), overrides={"output_router_logits": True, "router_aux_loss_coef": 0.01})


@pytest.mark.drill(
    "reliability",
    "LoRA on layers that share one weight (Zamba 2)",
    "Refused with the names of two of them; merging would have kept one adapter only",
)
def test_layers_that_share_a_weight_are_not_adapted() -> None:
    with pytest.raises(LoraError, match=r"share one weight, so LoRA cannot adapt either"):
        add_adapters(small_model("zamba2"), LoraSettings(rank=2), "somewhere")
