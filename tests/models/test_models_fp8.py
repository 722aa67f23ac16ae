"""FP8 copies of linear layers: what they cover, what is refused, and that nothing else sees them."""

import copy

import pytest
import torch
from small_models import FAMILIES, make_model
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rally.models import attention, fp8
from rally.models.fp8 import Fp8Error, Fp8Linears, covered_layers, forward_in_fp8
from rally.models.kernels import reference
from rally.models.lora import LoraSettings, add_adapters
from rally.train.forward.logprobs import token_logprobs
from rally.train.packing import Row, pack

IDS = torch.arange(3, 43)[None]


def logits(model: PreTrainedModel, linears: Fp8Linears | None = None) -> torch.Tensor:
    with torch.no_grad(), forward_in_fp8(linears):
        return model(input_ids=IDS, use_cache=False).logits[0]


def adapted(model: PreTrainedModel) -> PreTrainedModel:
    add_adapters(model, LoraSettings(rank=4, alpha=32), "base")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.eval()


@pytest.mark.parametrize("family", FAMILIES)
def test_the_projections_of_every_family_are_covered(family: str) -> None:
    model = make_model(family)
    linears = Fp8Linears(model)
    assert sum(map(len, linears.covered.groups)) == 7 * 3 and linears.covered.others == []
    assert [len(group) for group in linears.covered.groups] == [3, 1, 2, 1] * 3
    assert "21 linear layers of the rollout compute in FP8" in linears.words()
    weights = [layer.weight for group in linears.covered.groups for layer in group.values()]
    copies = [linears.copy_of(weight) for weight in weights]
    assert linears.covered.bytes == sum(one.data_FC.nbytes + one.scale_F.nbytes for one in copies)
    assert 0.01 < linears.largest_error().relative < 0.05


def test_a_forward_multiplies_by_the_dequantised_weights() -> None:
    """Inputs that FP8 holds exactly: then only the weights are rounded."""
    model = make_model()
    linears = Fp8Linears(model)
    layer = model.model.layers[0].mlp.down_proj
    copy_ = linears.copy_of(layer.weight)
    x = torch.tensor([448.0, -2.0, 0.0, 16.0]).repeat(2, 3, 24)
    with torch.no_grad(), forward_in_fp8(linears):
        y = layer(x)
    exact = torch.nn.functional.linear(x, copy_.data_FC.float() * copy_.scale_F[:, None])
    torch.testing.assert_close(y, exact, rtol=1e-5, atol=1e-3)


def test_only_forwards_inside_the_context_are_in_fp8() -> None:
    model = make_model()
    before = logits(model)
    state = copy.deepcopy(model.state_dict())
    linears = Fp8Linears(model)
    in_fp8 = logits(model, linears)
    assert 1e-2 < (in_fp8 - before).abs().max() < 2
    assert torch.equal(logits(model), before)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())


def test_training_is_the_same_to_the_last_bit() -> None:
    def gradients(quantized: bool) -> list[torch.Tensor]:
        model = make_model()
        attention.install(model)
        if quantized:
            logits(model, Fp8Linears(model))
        sampled = tuple(range(10, 40))
        rows = [Row(ids=tuple(IDS[0].tolist()), sampled=sampled, logprobs=(-1.0,) * len(sampled), episode=0)]
        logp_M = token_logprobs(model, pack(rows, model.device)).logp_M
        return [logp_M.detach(), *torch.autograd.grad(logp_M.sum(), list(model.parameters()))]

    assert all(map(torch.equal, gradients(False), gradients(True)))


def test_a_refresh_writes_new_weights_into_the_same_memory() -> None:
    model = make_model()
    linears = Fp8Linears(model)
    weight = model.model.layers[1].self_attn.k_proj.weight
    place = linears.copy_of(weight).data_FC.data_ptr()
    with torch.no_grad():
        weight.mul_(-3)
    assert linears.largest_error().relative > 1 and "layers.1.self_attn.k_proj" in linears.largest_error().name
    linears.refresh()
    assert linears.largest_error().relative < 0.05
    assert linears.copy_of(weight).data_FC.data_ptr() == place
    assert torch.equal(logits(model, linears), logits(model, Fp8Linears(model)))


def test_a_parameter_that_was_replaced_is_found_after_a_refresh() -> None:
    model = make_model()
    linears = Fp8Linears(model)
    layer = model.model.layers[1].mlp.down_proj
    layer.weight = torch.nn.Parameter(2 * layer.weight.detach())
    linears.refresh()
    assert linears.copy_of(layer.weight) is not None and linears.largest_error().relative < 0.05


def test_adapters_stay_as_they_are() -> None:
    model = adapted(make_model("llama"))
    linears = Fp8Linears(model)
    assert sum(map(len, linears.covered.groups)) == 21 and linears.covered.others == []
    layer = model.model.layers[0].self_attn.q_proj
    x = torch.randn(1, 5, 96, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        with forward_in_fp8(linears):
            whole, base = layer(x), layer.base_layer(x)
        torch.testing.assert_close(whole - base, layer(x) - layer.base_layer(x), rtol=1e-4, atol=1e-5)
        assert (base - layer.base_layer(x)).abs().max() > 1e-3


REFUSED = {
    "qwen3_moe": "has experts",
    "mixtral": "has experts",
    "deepseek_v3": "has experts",
    "qwen3_next": "has experts",
    "qwen2_vl": "has a vision or audio tower",
    "lfm2": "has layers of type conv",
    "mamba2": "has layers of type linear_attention",
    "gpt2": "finds no layers",
}


@pytest.mark.parametrize("kind", REFUSED)
def test_what_fp8_does_not_support_is_refused_in_a_sentence(kind: str) -> None:
    config = AutoConfig.for_model(kind, **({"layer_types": ["conv", "full_attention"] * 16} if kind == "lfm2" else {}))
    with pytest.raises(Fp8Error, match=rf"rollout.quantization=fp8 .*{REFUSED[kind]}.*; leave it out$"):
        fp8.check_config(config)
        config.num_hidden_layers = 2
        with torch.device("meta"):
            covered_layers(AutoModelForCausalLM.from_config(config))


def test_layers_that_the_product_of_a_gpu_cannot_compute_are_refused() -> None:
    config = Qwen2Config(hidden_size=40, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, vocab_size=9)
    with pytest.raises(Fp8Error, match=r"multiples of 16 features, and layers.0.self_attn.q_proj has 40 and 40"):
        Fp8Linears(Qwen2ForCausalLM(config))


def test_linear_layers_of_their_own_kind_are_refused() -> None:
    model = make_model()

    class Special(torch.nn.Linear):
        pass

    model.model.layers[2].mlp.up_proj = Special(96, 96)
    with pytest.raises(Fp8Error, match=r"layers.2.mlp.up_proj, which is no plain linear layer"):
        Fp8Linears(model)


def test_linear_layers_that_are_not_covered_are_named() -> None:
    model = make_model()
    model.model.layers[0].extra = torch.nn.Linear(96, 96)
    assert "nor do 1 other linear layers (extra)" in Fp8Linears(model).words()


@pytest.mark.parametrize(
    ("capability", "dtype", "sentence"),
    [
        ((8, 0), torch.bfloat16, "needs a GPU of compute capability 8.9 or more, and A100 has 8.0; leave it out"),
        ((9, 0), torch.float16, "needs weights in bfloat16 on a GPU, and these are float16"),
        ((9, 0), torch.bfloat16, None),
    ],
)
def test_devices_that_cannot_multiply_in_fp8_are_refused(monkeypatch, capability, dtype, sentence) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "A100")
    if sentence is None:
        fp8.check_device(torch.device("cuda"), dtype)
        return
    with pytest.raises(Fp8Error, match=f"--quantization=fp8 {sentence}"):
        fp8.check_device(torch.device("cuda"), dtype, "--quantization")


def test_a_torch_without_the_product_is_refused(monkeypatch) -> None:
    def missing(*arguments: object) -> torch.Tensor:
        raise RuntimeError("Rowwise scaling is not supported on your device\nException raised from x")

    monkeypatch.setattr(reference, "fp8_linear", missing)
    with pytest.raises(Fp8Error, match=r"cannot multiply in FP8 on cpu \(Rowwise scaling .* device\); leave it out"):
        Fp8Linears(make_model())


def test_other_accelerators_are_refused(monkeypatch) -> None:
    with pytest.raises(Fp8Error, match="runs on NVIDIA GPUs and on CPUs, not on mps here; leave it out"):
        fp8.check_device(torch.device("mps"), torch.bfloat16)
    monkeypatch.setattr(torch.version, "hip", "6.3")
    with pytest.raises(Fp8Error, match="runs on NVIDIA GPUs and on CPUs, not on cuda here"):
        fp8.check_device(torch.device("cuda"), torch.bfloat16)


def test_training_in_fp8_is_an_error_of_the_code() -> None:
    model = make_model()
    with pytest.raises(AssertionError, match="training does not compute in FP8"), forward_in_fp8(Fp8Linears(model)):
        model(input_ids=IDS)
