"""The kernels of the output head equal the plain torch that specifies them, and float64."""

import pytest
import torch
from kernel_cases import gpu, interpreted
from torch import Tensor

from rally.models import lm_head
from rally.models.lm_head import HeadLogprobs, _Known, _logits_gradient, _statistics
from rally.models.token_masks import MASKED

NAN, INF = float("nan"), float("inf")


def logits_of(rows: int, vocabulary: int, device: str) -> tuple[Tensor, Tensor]:
    """Logits of different spread, some rows with forbidden tokens, with padding between rows; and targets."""
    generator = torch.Generator().manual_seed(rows + vocabulary)
    logits = torch.randn(rows, vocabulary + 3, generator=generator) * torch.logspace(-1, 1.5, rows)[:, None]
    logits[1::3, 1::2] = MASKED
    targets = torch.randint(0, (vocabulary + 1) // 2, (rows,), generator=generator) * 2
    return logits[:, :vocabulary].to(device), targets.to(device)


def check(device: str, rows: int, vocabulary: int) -> None:
    from rally.models.kernels.token_logprobs import logits_gradient, statistics

    logits, targets = logits_of(rows, vocabulary, device)
    ours = statistics(logits, targets)
    exact = logits.double().log_softmax(-1)
    assert_close(ours[0], exact.gather(1, targets[:, None]).squeeze(1))
    assert_close(ours[1], -(exact.exp() * exact).sum(-1))
    assert_close(ours[2], logits.double().logsumexp(-1))

    of_logp, of_entropy = torch.linspace(-1, 2, rows, device=device), torch.linspace(3, -1, rows, device=device)
    for slopes in (of_entropy, None):
        gradient = logits_gradient(logits, targets, ours[1], ours[2], of_logp, slopes, torch.float32)
        leaf = logits.double().requires_grad_()
        logp = leaf.log_softmax(-1)
        total = (logp.gather(1, targets[:, None]).squeeze(1) * of_logp.double()).sum()
        if slopes is not None:
            total = total - ((logp.exp() * logp).sum(-1) * slopes.double()).sum()
        [expected] = torch.autograd.grad(total, leaf)
        assert_close(gradient, expected)
    half = logits_gradient(logits, targets, ours[1], ours[2], of_logp, None, torch.float16)
    assert half.dtype == torch.float16 and torch.equal(half, gradient.half())


def assert_close(ours: Tensor, exact: Tensor) -> None:
    torch.testing.assert_close(ours.double(), exact, rtol=2e-5, atol=2e-5)


def check_kept(device: str, rows: int, vocabulary: int) -> None:
    from rally.models.kernels.token_logprobs import probabilities, scale_probabilities

    logits, targets = logits_of(rows, vocabulary, device)
    logits[0, targets[0]] += 40.0  # a target of probability 1, of which 1e-9 is missing
    exact = logits.double().log_softmax(-1)
    logp = exact.gather(1, targets[:, None]).squeeze(1)
    for dtype, tolerance in ((torch.float32, 2e-5), (torch.bfloat16, 1e-2)):
        kept = torch.full((rows, vocabulary), NAN, dtype=dtype, device=device)
        probabilities(logits, logits.double().logsumexp(-1).float(), kept)
        torch.testing.assert_close(kept.double(), exact.exp(), rtol=tolerance, atol=1e-6)
        slopes = torch.linspace(-1, 2, rows, device=device)
        scale_probabilities(kept, targets, logp.float(), slopes)
        expected = -exact.exp() * slopes.double()[:, None]
        expected.scatter_(1, targets[:, None], (-torch.expm1(logp) * slopes.double())[:, None])
        torch.testing.assert_close(kept.double(), expected, rtol=tolerance, atol=1e-6)
        missing = float(kept[0, targets[0]].double() / slopes[0].double())
        assert missing == pytest.approx(float(-torch.expm1(logp[0])), rel=0.02)


def check_edges(device: str) -> None:
    from rally.models.kernels.token_logprobs import logits_gradient, statistics

    sure = torch.tensor([[300.0, 0.0, -300.0]] * 2, device=device)
    logp, entropy, _ = statistics(sure, torch.tensor([0, 2], device=device))
    assert logp.tolist() == [0, -600] and entropy.tolist() == [0, 0]
    broken = torch.zeros(3, 5000, device=device)
    broken[0, 4999], broken[1, 2], broken[2, 3] = NAN, NAN, INF
    assert torch.stack(statistics(broken, torch.zeros(3, dtype=torch.int64, device=device))).isnan().all(0).all()
    none = torch.empty(0, device=device)
    empty = statistics(sure[:0], torch.empty(0, dtype=torch.int64, device=device))
    assert all(len(x) == 0 for x in empty)
    assert logits_gradient(sure[:0], none.long(), none, none, none, None, torch.float16).shape == (0, 3)


def check_head(device: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """The whole output head by the kernels, and by plain torch."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(n, 16, generator=generator).to(device, dtype) for n in (23, 50))
    targets = torch.randint(0, 50, (23,), generator=generator).to(device)
    slopes = torch.linspace(-1, 2, 23, device=device)
    found = []
    for by_kernel in (True, False):
        monkeypatch.setattr(lm_head, "_by_kernel", lambda _, by_kernel=by_kernel: by_kernel)
        leaves = hidden.clone().requires_grad_(), weight.clone().requires_grad_()
        logp, entropy = HeadLogprobs.apply(*leaves, targets, 0.7, 5, True)
        gradients = torch.autograd.grad((logp * slopes).sum() + (entropy * slopes.flip(0)).sum(), leaves)
        found.append((logp, entropy, *gradients))
    for ours, theirs in zip(*found, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = 1e-4 if ours.dtype == torch.float32 else 2e-2
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)


def test_the_specification_is_right() -> None:
    logits, targets = logits_of(7, 50, "cpu")
    of_logp, of_entropy = torch.linspace(-1, 2, 7), torch.linspace(3, -1, 7)
    logp, entropy, normaliser = _statistics(logits, targets)
    gradient = _logits_gradient(
        logits.clone(), _Known(targets, entropy, normaliser, of_logp, of_entropy), True, torch.float32
    )
    leaf = logits.double().requires_grad_()
    exact = leaf.log_softmax(-1)
    values = exact.gather(1, targets[:, None]).squeeze(1), -(exact.exp() * exact).sum(-1)
    [expected] = torch.autograd.grad((values[0] * of_logp).sum() + (values[1] * of_entropy).sum(), leaf)
    for ours, theirs in zip((logp, entropy, gradient), (*values, expected), strict=True):
        assert_close(ours, theirs)


@interpreted
@pytest.mark.parametrize(("rows", "vocabulary"), [(7, 50), (4, 9001), (1, 4096)])
def test_interpreted(rows: int, vocabulary: int) -> None:
    check("cpu", rows, vocabulary)
    check_kept("cpu", rows, vocabulary)


@interpreted
@pytest.mark.filterwarnings("ignore::RuntimeWarning")
def test_interpreted_edges_and_the_whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    check_edges("cpu")
    check_head("cpu", torch.float32, monkeypatch)


@gpu
@pytest.mark.parametrize(("rows", "vocabulary"), [(7, 50), (1766, 151936), (5, 262144)])
def test_compiled(rows: int, vocabulary: int) -> None:
    check("cuda", rows, vocabulary)
    check_kept("cuda", rows, vocabulary)


@gpu
def test_compiled_edges_and_the_whole_head(monkeypatch: pytest.MonkeyPatch) -> None:
    check_edges("cuda")
    check_head("cuda", torch.bfloat16, monkeypatch)
