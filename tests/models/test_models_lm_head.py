"""The chunked output head equals autograd on whole logits, in each of its uses."""

import math

import pytest
import torch
from small_models import VOCABULARY, make_model
from train_cases import Gradients, difference, size, uneven_episodes
from transformers import PreTrainedModel

from benchmarks.architectures import small_model
from rally.models import attention
from rally.models import lm_head as head
from rally.models.lm_head import HeadLogprobs, chunk_rows, head_logits, head_scale, plain_weight
from rally.train.batch import build_batch
from rally.train.forward.logprobs import TokenLogprobs, token_logprobs
from rally.train.packing import PackedRows, pack

CPU = torch.device("cpu")


def reference(
    hidden: torch.Tensor, weight: torch.Tensor, targets: torch.Tensor, temperature: float
) -> tuple[torch.Tensor, torch.Tensor]:
    logp = torch.log_softmax(hidden @ weight.t() / temperature, -1)
    return logp.gather(1, targets[:, None]).squeeze(1), -(logp.exp() * logp).sum(-1)


def problem(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(23, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 50, (23,), generator=generator)


@pytest.mark.parametrize("rows", [1, 5, 23, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_it_equals_autograd_on_whole_logits(rows: int, temperature: float) -> None:
    """Entropy and log-probability both have a gradient here, a different one for each token."""
    hidden, weight, targets = problem()
    slopes = torch.linspace(-1, 2, len(hidden))
    found = HeadLogprobs.apply(hidden, weight, targets, temperature, rows, True)
    expected = reference(hidden, weight, targets, temperature)
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5)
    ours, theirs = (
        torch.autograd.grad((logp * slopes).sum() + (entropy * slopes.flip(0)).sum(), (hidden, weight))
        for logp, entropy in (found, expected)
    )
    assert all(torch.allclose(a, b, atol=1e-4, rtol=1e-4) for a, b in zip(ours, theirs, strict=True))


def test_without_being_asked_the_entropy_has_no_gradient() -> None:
    hidden, weight, targets = problem()
    logp, entropy = HeadLogprobs.apply(hidden, weight, targets, 1.0, 5, False)
    assert logp.requires_grad and not entropy.requires_grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_kept_probabilities_give_the_same_gradient(dtype: torch.dtype) -> None:
    hidden, weight, targets = problem(dtype)
    slopes = torch.linspace(-1, 2, len(hidden))
    found, expected = (HeadLogprobs.apply(hidden, weight, targets, 0.7, 5, False, None, keep) for keep in (True, False))
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    ours, theirs = (torch.autograd.grad((x[0] * slopes).sum(), (hidden, weight)) for x in (found, expected))
    tolerance = 1e-5 if dtype == torch.float32 else 2e-2
    for a, b in zip(ours, theirs, strict=True):
        assert float((a - b).norm()) <= tolerance * float(b.norm())


def test_a_kept_probability_of_nearly_one_leaves_its_gradient() -> None:
    """In bf16 p rounds to 1, and the gradient of the target's logit, 1 - p, must not become 0."""
    hidden, weight = torch.tensor([[7.0]]).bfloat16().requires_grad_(), torch.tensor([[1.0], [0.0]]).bfloat16()
    logp, _ = HeadLogprobs.apply(hidden, weight, torch.tensor([0]), 1.0, 1, False, None, True)
    [gradient] = torch.autograd.grad(logp.sum(), hidden)
    assert float(gradient) == pytest.approx(1 / (1 + math.exp(7)), rel=0.01)


def test_a_sure_token_has_exact_numbers() -> None:
    """Logits of hundreds must not overflow, and a certain token has log-probability and entropy 0."""
    hidden, weight = torch.tensor([[300.0], [-300.0]]), torch.tensor([[1.0], [0.0], [-1.0]])
    logp, entropy = HeadLogprobs.apply(hidden, weight, torch.tensor([0, 0]), 1.0, 1, False)
    assert logp.tolist() == [0, -600] and entropy.tolist() == [0, 0]


def test_in_bf16_results_are_float32_and_gradients_bf16() -> None:
    hidden, weight, targets = problem(torch.bfloat16)
    logp, entropy = HeadLogprobs.apply(hidden, weight, targets, 1.0, 5, False)
    assert logp.dtype == entropy.dtype == torch.float32
    logp.sum().backward()
    exact_hidden, exact_weight = (x.detach().float().requires_grad_() for x in (hidden, weight))
    reference(exact_hidden, exact_weight, targets, 1.0)[0].sum().backward()
    for half, exact in ((hidden.grad, exact_hidden.grad), (weight.grad, exact_weight.grad)):
        assert half.dtype == torch.bfloat16
        assert float((half.float() - exact).norm() / exact.norm()) < 0.02


def with_bias(model: PreTrainedModel) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.linspace(-1, 1, VOCABULARY))


def with_wrapper(model: PreTrainedModel) -> None:
    class Adapted(torch.nn.Linear):
        """Stands in for a head with LoRA."""

    weight = model.lm_head.weight
    model.lm_head = Adapted(weight.shape[1], weight.shape[0], bias=False)
    model.lm_head.weight = weight


HEADS = {
    "bias": with_bias,
    "adapter": with_wrapper,
}


@pytest.mark.parametrize("kind", HEADS)
def test_other_heads_go_the_long_way_and_count(kind: str) -> None:
    model, plain = make_model(), make_model()
    HEADS[kind](model)
    assert plain_weight(plain) is plain.lm_head.weight and plain_weight(model) is None
    for one in (model, plain):
        attention.install(one)
    packed = pack(build_batch(uneven_episodes()).rows, CPU)
    found, same = token_logprobs(model, packed), token_logprobs(plain, packed)
    assert torch.allclose(found.logp_M, same.logp_M, atol=1e-5) == (kind == "adapter")
    found.logp_M.sum().backward()
    assert float(model.lm_head.weight.grad.abs().max()) > 0


def learned(model: PreTrainedModel, packed: PackedRows) -> tuple[TokenLogprobs, Gradients]:
    model.zero_grad()
    found = token_logprobs(model, packed, entropy_gradient=True)
    (found.logp_M.sum() + 0.1 * found.entropy_M.sum()).backward()
    return found, {n: p.grad.clone() for n, p in model.named_parameters()}


@pytest.mark.parametrize("kind", ["plain", "adapter"])
def test_chunks_change_nothing(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    model = make_model()
    attention.install(model)
    if kind == "adapter":
        with_wrapper(model)
    packed = pack(build_batch(uneven_episodes()).rows, CPU)
    whole, whole_gradients = learned(model, packed)
    monkeypatch.setattr(head, "MAX_LOGITS", {"cpu": 5 * VOCABULARY})
    assert chunk_rows(VOCABULARY, CPU) == 5 < len(packed.predict_U)
    parts, parts_gradients = learned(model, packed)
    assert torch.allclose(whole.logp_M, parts.logp_M, atol=1e-6)
    assert torch.allclose(whole.entropy_M, parts.entropy_M, atol=1e-6)
    assert difference(whole_gradients, parts_gradients) <= 1e-6 * size(whole_gradients)


def test_a_frozen_head_gets_no_gradient() -> None:
    hidden, weight, targets = problem()
    frozen = weight.detach()
    HeadLogprobs.apply(hidden, frozen, targets, 1.0, 5, False)[0].sum().backward()
    assert hidden.grad is not None and frozen.grad is None


@pytest.mark.parametrize(
    ("name", "scale"), [("llama", 1.0), ("cohere", 0.0625), ("granite", 0.125), ("minicpm3", 4.0), ("gemma2", None)]
)
def test_what_a_class_does_to_its_logits_is_found(name: str, scale: float | None) -> None:
    model = small_model(name)
    assert head_scale(model) == (scale if scale is None else pytest.approx(scale))
    ids = torch.tensor([[5, 9, 200, 17]])
    with torch.no_grad():
        expected = model(input_ids=ids, use_cache=False).logits[0]
        found = head_logits(model, attention.body_of(model)(input_ids=ids, use_cache=False).last_hidden_state[0])
    assert torch.allclose(found, expected, atol=1e-4)
    assert (plain_weight(model) is None) == (scale is None)


def test_capped_logits_are_float32_on_a_gpu_in_training_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rollout's are. Rounded to bfloat16, log-probabilities would be off by some percent."""
    monkeypatch.setattr(head, "has_kernels", lambda device: True)
    monkeypatch.setattr(head, "_exact_product", lambda a, b: a.float() @ b.float())  # what a GPU accumulates
    model = small_model("gemma2")
    weight, cap = model.get_output_embeddings().weight, model.config.final_logit_softcapping
    hidden = torch.randn(7, weight.shape[1]) * 8
    leaf = hidden.bfloat16().float().requires_grad_()
    exact_weight = weight.detach().bfloat16().float().requires_grad_()
    exact = torch.tanh(leaf @ exact_weight.t() / cap) * cap
    half, model = hidden.bfloat16().requires_grad_(), model.bfloat16()
    found = head_logits(model, half)
    assert found.dtype == torch.float32 and torch.allclose(found, exact, atol=1e-4)
    with torch.no_grad():
        assert torch.equal(head_logits(model, half), found)
    for logits in (found, exact):
        torch.log_softmax(logits, -1)[:, 3].sum().backward()
    assert half.grad is not None and leaf.grad is not None
    assert float((half.grad.float() - leaf.grad).norm() / leaf.grad.norm()) < 0.02
    learned_weight = model.get_output_embeddings().weight.grad
    assert float((learned_weight.float() - exact_weight.grad).norm() / exact_weight.grad.norm()) < 0.02
