"""The fused layer with a plain adapter equals PEFT's, in engine and trainer; PEFT computes all other adapters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from small_models import FAMILIES, full_logprobs, make_model
from torch import Tensor, nn
from transformers import PreTrainedModel

from rally.engines.base import EngineError
from rally.engines.embedded import EngineCore, EngineSettings
from rally.models.fused_layers import FusedDecoder, Packed, fusable
from rally.models.kernels.dispatch import kernels_for
from rally.models.lora import LoraSettings, add_adapters, plain_linear
from rally.train.forward.linear_layers import linear_layers
from rally.types import SamplingParams

peft = pytest.importorskip("peft")
T, C, F_OUT = 11, 24, 40


class Holder(nn.Module):
    def __init__(self, bias: bool, dtype: torch.dtype) -> None:
        super().__init__()
        self.proj = nn.Linear(C, F_OUT, bias=bias, dtype=dtype)

    def forward(self, x_TC: Tensor) -> Tensor:
        return self.proj(x_TC)


def layer_of(bias: bool = True, dtype: torch.dtype = torch.float64, **config: Any) -> Any:
    """PEFT's layer over a linear one, with a second matrix that is not zero."""
    torch.manual_seed(0)
    holder = Holder(bias, dtype)
    options = {"r": 4, "lora_alpha": 6, "target_modules": ["proj"]} | config
    peft.inject_adapter_in_model(peft.LoraConfig(**options), holder)
    for matrix in (holder.proj.lora_A, holder.proj.lora_B):
        matrix["default"].to(dtype)
    nn.init.normal_(holder.proj.lora_B["default"].weight)
    return holder.proj


def gradients(layer: nn.Module, call: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
    """The output of the layer, and the gradients of its input and of all its parameters."""
    layer.zero_grad()
    generator = torch.Generator().manual_seed(1)
    dtype = next(layer.parameters()).dtype
    x_TC, weights_TF = (torch.randn((T, n), generator=generator, dtype=dtype) for n in (C, F_OUT))
    y_TF = call(x_TC.requires_grad_())
    (y_TF * weights_TF).sum().backward()
    assert x_TC.grad is not None
    own = {name: p.grad.clone() for name, p in layer.named_parameters() if p.grad is not None}
    return {"y": y_TF.detach(), "x": x_TC.grad} | own


@pytest.mark.parametrize("bias", [False, True])
def test_value_and_gradients_are_those_of_peft(bias: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = layer_of(bias)
    theirs = gradients(layer, layer)
    monkeypatch.setattr("peft.tuners.lora.Linear.forward", None)
    ours = gradients(layer, lambda x_TC: linear_layers([layer], x_TC)[0])
    assert ours.keys() == theirs.keys() == {"y", "x", "lora_A.default.weight", "lora_B.default.weight"}
    for name, value in theirs.items():
        assert torch.allclose(ours[name], value, rtol=1e-10, atol=1e-10), name


def test_an_input_without_gradient_gets_none_and_the_adapter_its_own() -> None:
    layer = layer_of()
    expected = gradients(layer, layer)
    found = gradients(layer, lambda x_TC: linear_layers([layer], x_TC.detach())[0] + 0 * x_TC.sum())
    assert not found["x"].any()
    assert torch.allclose(found["lora_A.default.weight"], expected["lora_A.default.weight"])


def two_adapters(layer: Any) -> None:
    layer.update_layer("other", r=2, lora_alpha=2, config=peft.LoraConfig(r=2))
    layer.to(torch.float64).set_adapter(["default", "other"])


@pytest.mark.parametrize(
    ("config", "change"),
    [
        ({"lora_dropout": 0.5}, lambda layer: layer.train()),
        ({"use_dora": True}, lambda layer: None),
        ({"lora_bias": True}, lambda layer: None),
        ({}, two_adapters),
        ({}, lambda layer: layer.merge()),
        ({}, lambda layer: layer.base_layer.weight.requires_grad_()),
        ({}, lambda layer: layer.base_layer.bias.requires_grad_()),
    ],
    ids=["dropout", "dora", "bias", "two", "merged", "trained", "trained bias"],
)
def test_what_is_more_than_plain_is_the_modules_business(config: dict[str, Any], change: Callable[[Any], Any]) -> None:
    layer = layer_of(**config).to(torch.float64)
    change(layer)
    found = []
    for call in (layer, lambda x_TC: linear_layers([layer], x_TC)[0]):
        torch.manual_seed(2)
        found.append(gradients(layer, call))
    assert found[0].keys() == found[1].keys()
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())


def test_what_a_layer_is_made_of() -> None:
    layer = layer_of(lora_dropout=0.5)
    assert plain_linear(layer) is None, "dropout, in training"
    plain = plain_linear(layer.eval())
    assert plain is not None and plain.adapter is not None and plain.adapter.scale == 6 / 4
    assert plain_linear(layer.base_layer) == (layer.base_layer, None)
    layer.enable_adapters(False)
    assert plain_linear(layer) == (layer.base_layer, None)
    layer.enable_adapters(True)
    layer.lora_A.to(torch.float32)
    assert plain_linear(layer) is None, "two dtypes"
    assert plain_linear(nn.Embedding(2, 2)) is None


def test_engine_and_trainer_round_alike() -> None:
    layer, x_TC = layer_of(dtype=torch.bfloat16), torch.randn(T, C, dtype=torch.bfloat16)
    with torch.no_grad():
        sampled = Packed([layer])(x_TC, F.linear)
    assert torch.equal(sampled, linear_layers([layer], x_TC)[0])
    assert not torch.equal(sampled, layer(x_TC)), (
        "rounded once less than PEFT does, or the test cannot see a difference"
    )


def adapted(family: str = "qwen2", targets: tuple[str, ...] = ("all-linear",)) -> PreTrainedModel:
    model = make_model(family)
    add_adapters(model, LoraSettings(rank=4, alpha=8, targets=targets), "somewhere")
    change(model, seed=1)
    return model


@torch.no_grad()
def change(model: PreTrainedModel, seed: int) -> None:
    """Writes the adapters in place."""
    torch.manual_seed(seed)
    for name, parameter in model.named_parameters():
        if "lora_" in name:
            parameter.copy_(0.1 * torch.randn(parameter.shape))


def core_of(model: PreTrainedModel) -> EngineCore:
    return EngineCore(model, EngineSettings(max_model_len=64, max_num_seqs=4, backend="paged"), num_pages=32)


def assert_samples_from(core: EngineCore, model: PreTrainedModel) -> None:
    request = core.add(list(range(12)), SamplingParams(max_tokens=20, seed=3))
    while core.busy:
        core.step()
    assert core.runner.fused is not None  # type: ignore[attr-defined]
    assert request.logprobs == pytest.approx(full_logprobs(model, request.ids, 12), abs=2e-5)


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj"), ("k_proj", "up_proj"), ("o_proj",)])
@pytest.mark.parametrize("family", FAMILIES)
def test_fused_layers_sample_from_adapters_that_an_optimizer_writes(family: str, targets: tuple[str, ...]) -> None:
    model = adapted(family, targets)
    core = core_of(model)
    for seed in (1, 2):
        change(model, seed)
        core.commit_weights()
        assert_samples_from(core, copy.deepcopy(model))


def test_packed_adapters_are_the_modules_own() -> None:
    model = adapted(targets=("q_proj", "v_proj"))
    before = {name: p.clone() for name, p in model.state_dict().items()}
    first, second = (FusedDecoder(model, kernels_for(model.device)).layers[0].qkv.inner for _ in range(2))
    assert first is not None and second is not None and first.shape == (8, 96)
    assert first.data_ptr() == second.data_ptr(), "two decoders of one module share its adapters"
    assert all(torch.equal(before[name], p) for name, p in model.state_dict().items())
    with torch.no_grad():
        model.model.layers[0].self_attn.v_proj.lora_A["default"].weight.fill_(3)
    assert (first[4:] == 3).all() and not (first[:4] == 3).any()


@pytest.mark.parametrize("which", ["lora_A", "lora_B", "k_proj.lora_A", "down_proj.lora_B"])
def test_adapters_that_were_moved_are_found_again(which: str) -> None:
    model = adapted()
    core = core_of(model)
    core.runner._captured[("a", "graph")] = None  # type: ignore[attr-defined]
    for name, parameter in model.named_parameters():
        if which in name:
            parameter.data = 2 * parameter.data
    core.commit_weights()
    assert not core.runner._captured  # type: ignore[attr-defined]
    assert_samples_from(core, model)


def test_adapters_that_come_after_the_engine_are_found() -> None:
    model = make_model()
    core = core_of(model)
    assert_samples_from(core, model)
    add_adapters(model, LoraSettings(rank=4), "somewhere")
    change(model, seed=1)
    core.commit_weights()
    assert_samples_from(core, model)


@pytest.mark.parametrize("begun_on", [True, False])
def test_adapters_that_are_switched_are_followed(begun_on: bool) -> None:
    model = adapted()
    switch = {True: model.enable_adapters, False: model.disable_adapters}
    switch[begun_on]()
    core = core_of(model)
    assert_samples_from(core, model)
    switch[not begun_on]()
    core.commit_weights()
    assert_samples_from(core, model)


def test_adapters_that_are_not_plain_are_the_modules_business_again() -> None:
    model = make_model()
    core = core_of(model)
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["o_proj"], use_dora=True), "default")
    core.commit_weights()
    assert core.runner.fused is None  # type: ignore[attr-defined]
    core.runner.deterministic = True  # type: ignore[attr-defined]
    model.disable_adapters()
    with pytest.raises(EngineError, match="does not support adapters"):
        core.commit_weights()


def test_adapters_that_are_not_plain_are_not_fused() -> None:
    model = make_model()
    model.add_adapter(peft.LoraConfig(r=4, target_modules=["o_proj"], use_dora=True), "default")
    assert not fusable(model)
