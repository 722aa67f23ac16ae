"""The gradients of the fused kernels equal those of autograd on their references."""

from collections.abc import Callable, Sequence

import pytest
import torch
from kernel_cases import gpu, interpreted, randn
from torch import Tensor

from rally.models.kernels import reference

EPS = 1e-6
Op = Callable[..., Tensor | tuple[Tensor, ...]]


def gradients(op: Op, inputs: Sequence[Tensor], **options: object) -> list[Tensor]:
    """The outputs, then the gradients of a sum over them in which every element has a weight of its own."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    made = op(*leaves, **options)
    outputs = (made,) if isinstance(made, Tensor) else made
    torch.autograd.backward(
        outputs, [randn(*y.shape, dtype=y.dtype, device=y.device.type, seed=9 + i) for i, y in enumerate(outputs)]
    )
    return [*(y.detach() for y in outputs), *(x.grad for x in leaves if x.grad is not None)]


def agree(ours: Op, theirs: Op, inputs: Sequence[Tensor], **options: object) -> None:
    """Equal in float32; in half precision no further from float32 than the reference is."""
    found, expected = (gradients(op, inputs, **options) for op in (ours, theirs))
    if inputs[0].dtype == torch.float32:
        for a, b in zip(found, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5)
        return
    exact = gradients(theirs, [x.float() for x in inputs], **options)
    for a, b, c in zip(found, expected, exact, strict=True):
        assert a.dtype == b.dtype and a.shape == b.shape
        assert (a - c).norm() <= 1.2 * (b - c).norm() + 1e-3 * c.norm()


def check_norms(device: str, dtype: torch.dtype, tokens: int, channels: int, offset: bool) -> None:
    from rally.models.kernels import autograd as ours

    weight = randn(channels, dtype=dtype, device=device, seed=1)
    x, residual = (randn(tokens, channels, dtype=dtype, device=device, seed=seed) for seed in (2, 3))
    inputs = [x, weight]
    agree(
        lambda x, w: ours.rms_norm(x, w, EPS, offset=offset),
        lambda x, w: reference.rms_norm(x, w, EPS, offset=offset),
        inputs,
    )
    agree(
        lambda x, r, w: ours.add_and_norm(x, r, w, EPS, offset=offset),
        lambda x, r, w: reference.add_and_norm(x, r, w, EPS, offset=offset),
        [x, residual, weight],
    )


def check_gated(device: str, dtype: torch.dtype, tokens: int, features: int, kind: str) -> None:
    from rally.models.kernels import autograd as ours

    gate, up = (2 * randn(tokens, features, dtype=dtype, device=device, seed=seed) for seed in (1, 2))
    agree(ours.gated, reference.gated, [gate, up], kind=kind)


def check_rotate(device: str, dtype: torch.dtype, tokens: int, heads: int, size: int) -> None:
    from rally.models.kernels import autograd as ours

    angles = torch.arange(tokens)[:, None] * torch.linspace(1, 0.01, size // 2)
    cos, sin = (f(torch.cat([angles, angles], dim=1)).to(dtype).to(device) for f in (torch.cos, torch.sin))
    x = randn(tokens, heads, size, dtype=dtype, device=device)
    agree(
        lambda x: ours.rotate(x, cos.to(x.dtype), sin.to(x.dtype)),
        lambda x: reference.rotate(x, cos.to(x.dtype), sin.to(x.dtype)),
        [x],
    )


@interpreted
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("tokens", "channels"), [(5, 96), (3, 2050), (600, 4)])
def test_interpreted_norms(tokens: int, channels: int, offset: bool) -> None:
    check_norms("cpu", torch.float32, tokens, channels, offset)


@interpreted
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_interpreted_gated(kind: str) -> None:
    check_gated("cpu", torch.float32, 3, 700, kind)


@interpreted
def test_interpreted_rotate() -> None:
    check_rotate("cpu", torch.float32, 5, 3, 16)


@gpu
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize(("tokens", "channels"), [(1, 64), (777, 1536), (5000, 128), (300, 5376)])
def test_compiled_norms(tokens: int, channels: int, offset: bool) -> None:
    check_norms("cuda", torch.bfloat16, tokens, channels, offset)


@gpu
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
def test_compiled_gated(kind: str) -> None:
    check_gated("cuda", torch.bfloat16, 333, 8960, kind)


@gpu
@pytest.mark.parametrize(("heads", "size"), [(12, 128), (2, 128), (9, 64), (4, 256)])
def test_compiled_rotate(heads: int, size: int) -> None:
    check_rotate("cuda", torch.bfloat16, 1000, heads, size)
