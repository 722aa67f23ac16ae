"""The fused training forward equals the module's, for every family, with adapters and gradient checkpointing."""

import copy
import random

import pytest
import torch
from small_models import FAMILIES, VOCABULARY, make_model
from torch import Tensor
from transformers import Gemma3Config, Gemma3ForConditionalGeneration, Gemma3TextConfig, PreTrainedModel

from rally.models import attention
from rally.models.attention import packed_hidden
from rally.models.decoder_families import known
from rally.models.kernels import reference
from rally.models.lora import LoraSettings, add_adapters, without_adapters
from rally.train.forward import fused_layers
from rally.train.forward.packed_attention import PackedAttention
from rally.train.packing import PackedRows, Row, pack

SPECIFIED = fused_layers.Ops(reference.rms_norm, reference.add_and_norm, reference.gated, reference.rotate)


def rows(lengths: tuple[int, ...], shared: int) -> list[Row]:
    rng = random.Random(0)
    prompt = tuple(rng.randrange(VOCABULARY) for _ in range(shared))
    made = [(*prompt, *(rng.randrange(VOCABULARY) for _ in range(n))) for n in lengths]
    return [
        Row(ids=ids, sampled=tuple(range(shared, len(ids))), logprobs=(0.0,) * (len(ids) - shared), episode=i)
        for i, ids in enumerate(made)
    ]


def model_of(family: str, device: str = "cpu", dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    torch.manual_seed(0)
    model = make_model(family).to(device, dtype)
    for name, parameter in model.named_parameters():
        if "norm" in name:
            torch.nn.init.uniform_(parameter, 0.5, 1.5)
    attention.install(model)
    return model.train()


def gradients(model: PreTrainedModel, hidden_TC: Tensor) -> dict[str, Tensor]:
    model.zero_grad(set_to_none=True)
    weights_TC = torch.randn(hidden_TC.shape, generator=torch.Generator().manual_seed(1)).to(hidden_TC)
    (hidden_TC * weights_TC).sum().backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


def assert_alike(model: PreTrainedModel, packed: PackedRows, ops: fused_layers.Ops, tolerance: float) -> None:
    context = PackedAttention(packed)
    theirs = packed_hidden(model, packed.ids_T, packed.positions_T, context)
    expected = gradients(model, theirs)
    ours = fused_layers.fused_hidden(model, packed.ids_T, packed.positions_T, context, ops)
    found = gradients(model, ours)
    assert expected.keys() == found.keys()
    pairs = {"hidden": (ours.detach(), theirs.detach())} | {name: (found[name], expected[name]) for name in found}
    for name, (a, b) in pairs.items():
        assert float((a - b).norm()) <= tolerance * float(b.norm()) + 1e-6, name


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(family: str) -> None:
    model = model_of(family)
    assert known(model)
    assert_alike(model, pack(rows((9, 4, 17), 5), torch.device("cpu")), SPECIFIED, 1e-5)


def test_a_text_model_inside_another_goes_through_its_own_forward() -> None:
    inner = Gemma3TextConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1, head_dim=16)
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = Gemma3Config(text_config=inner.to_dict(), vision_config={**vision, "image_size": 28, "patch_size": 14})
    with torch.device("meta"):
        assert not known(Gemma3ForConditionalGeneration(config))


def test_checkpointing_computes_the_same_and_really_computes_again() -> None:
    model = model_of("qwen2")
    packed = pack(rows((9, 4), 5), torch.device("cpu"))
    plain = gradients(
        model, fused_layers.fused_hidden(model, packed.ids_T, packed.positions_T, PackedAttention(packed), SPECIFIED)
    )
    calls = 0

    def counted(*args: Tensor, **options: object) -> Tensor:
        nonlocal calls
        calls += 1
        return reference.gated(*args, **options)

    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    ops = SPECIFIED._replace(gated=counted)
    again = gradients(
        model, fused_layers.fused_hidden(model, packed.ids_T, packed.positions_T, PackedAttention(packed), ops)
    )
    assert calls == 2 * model.config.num_hidden_layers
    assert all(torch.equal(plain[name], again[name]) for name in plain)


def with_adapters(model: PreTrainedModel, targets: tuple[str, ...] = ("all-linear",)) -> PreTrainedModel:
    add_adapters(model, LoraSettings(rank=4, targets=targets), "somewhere")
    torch.manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_B" in name:
                parameter.normal_(std=0.1)
    return model.train()


@pytest.mark.parametrize("targets", [("all-linear",), ("q_proj", "v_proj"), ("o_proj", "up_proj")])
@pytest.mark.parametrize("family", FAMILIES)
def test_adapters_learn_through_it_as_through_their_own_layers(family: str, targets: tuple[str, ...]) -> None:
    model = with_adapters(model_of(family), targets)
    assert_alike(model, pack(rows((9, 4), 5), torch.device("cpu")), SPECIFIED, 1e-5)
    trained = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert trained == {name for name, _ in model.named_parameters() if "lora_" in name}


def test_layers_of_plain_adapters_are_not_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("peft.tuners.lora.Linear.forward", None)
    model, packed = with_adapters(model_of("qwen2")), pack(rows((9, 4), 5), torch.device("cpu"))
    found = gradients(
        model, fused_layers.fused_hidden(model, packed.ids_T, packed.positions_T, PackedAttention(packed), SPECIFIED)
    )
    assert len(found) == 2 * 7 * model.config.num_hidden_layers


def test_switched_off_adapters_leave_the_base() -> None:
    model, packed = with_adapters(model_of("qwen2")), pack(rows((9, 4), 5), torch.device("cpu"))
    given = (packed.ids_T, packed.positions_T, PackedAttention(packed), SPECIFIED)
    with torch.no_grad():
        bare, adapted = fused_layers.fused_hidden(model_of("qwen2"), *given), fused_layers.fused_hidden(model, *given)
        with without_adapters(model):
            assert torch.equal(fused_layers.fused_hidden(model, *given), bare)
    assert float((adapted - bare).norm()) > 1e-2 * float(bare.norm())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_adapters_may_be_switched_off_between_forward_and_backward(checkpointing: bool) -> None:
    """As a reference does for a KL term."""
    model, packed = with_adapters(model_of("qwen2")), pack(rows((9, 4), 5), torch.device("cpu"))
    given = (packed.ids_T, packed.positions_T, PackedAttention(packed), SPECIFIED)
    plain = gradients(model, fused_layers.fused_hidden(model, *given))
    if checkpointing:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    hidden_TC = fused_layers.fused_hidden(model, *given)
    with without_adapters(model), torch.no_grad():
        fused_layers.fused_hidden(model, *given)
    found = gradients(model, hidden_TC)
    assert plain.keys() == found.keys() and all(torch.equal(plain[name], found[name]) for name in plain)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("adapted", [False, True])
def test_compiled(family: str, adapted: bool) -> None:
    """In bf16, no further from float32 than the module itself."""
    exact = with_adapters(model_of(family, "cuda")) if adapted else model_of(family, "cuda")
    model = copy.deepcopy(exact).bfloat16()
    packed = pack(rows((90, 40, 170), 50), torch.device("cuda"))
    context = PackedAttention(packed)
    truth = gradients(exact, packed_hidden(exact, packed.ids_T, packed.positions_T, context))
    module = gradients(model, packed_hidden(model, packed.ids_T, packed.positions_T, context))
    ours = gradients(model, fused_layers.hidden_states(model, packed))
    for name, gradient in truth.items():
        gap, usual = ((x[name].float() - gradient).norm() / gradient.norm() for x in (ours, module))
        assert gap <= 1.3 * usual + 1e-3, name
