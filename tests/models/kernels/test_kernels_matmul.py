"""The batch-invariant matrix product equals its reference, and a row's result does not depend on the other rows."""

import pytest
import torch
import torch.nn.functional as F
from kernel_cases import gpu, interpreted, randn, replayed
from torch import Tensor

from rally.models.kernels import reference


def operands(device: str, dtype: torch.dtype, tokens: int, channels: int, features: int) -> tuple[Tensor, ...]:
    x = randn(tokens, channels + 16, dtype=dtype, device=device, seed=1)[:, :channels]
    weight = randn(features, channels, dtype=dtype, device=device, seed=2) * channels**-0.5
    return x, weight, randn(features, dtype=dtype, device=device, seed=3)


def check(x: Tensor, weight: Tensor, bias: Tensor) -> None:
    from rally.models.kernels.batch_invariant_matmul import linear

    half = x.dtype != torch.float32
    rtol, atol = (torch.finfo(x.dtype).eps, 1e-4) if half else (1e-5, 1e-5)
    for b in (None, bias):
        torch.testing.assert_close(linear(x, weight, b), reference.linear(x, weight, b), rtol=rtol, atol=atol)
        wide = linear(x, weight, b, out_dtype=torch.float32)
        assert wide.dtype == torch.float32
        torch.testing.assert_close(wide, reference.linear(x, weight, b, torch.float32), rtol=1e-5, atol=atol)
        assert torch.equal(wide.to(x.dtype), linear(x, weight, b))


def test_reference_is_torchs_linear() -> None:
    x, weight, bias = operands("cpu", torch.float32, 5, 70, 33)
    torch.testing.assert_close(reference.linear(x, weight, bias), F.linear(x, weight, bias))
    half = [t.bfloat16() for t in (x, weight, bias)]
    torch.testing.assert_close(reference.linear(*half), F.linear(*half), rtol=2**-7, atol=1e-3)


@interpreted
@pytest.mark.parametrize(("tokens", "channels", "features"), [(1, 64, 64), (130, 70, 150), (70, 128, 33)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_interpreted(dtype: torch.dtype, tokens: int, channels: int, features: int) -> None:
    check(*operands("cpu", dtype, tokens, channels, features))


@interpreted
def test_interpreted_walks_many_tiles_and_each_once() -> None:
    from rally.models.kernels.batch_invariant_matmul import linear

    x, weight, bias = operands("cpu", torch.float32, 700, 32, 140)
    torch.testing.assert_close(linear(x, weight, bias), reference.linear(x, weight, bias), rtol=1e-5, atol=1e-5)


@gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 3, 256, 1000])
def test_compiled(tokens: int, dtype: torch.dtype) -> None:
    check(*operands("cuda", dtype, tokens, 1536, 1536))
    check(*operands("cuda", dtype, tokens, 200, 4133))


@gpu
@pytest.mark.parametrize(
    ("channels", "features"), [(1536, 2048), (1536, 17920), (8960, 1536), (1536, 151936), (100, 99)]
)
def test_compiled_row_does_not_depend_on_the_others(channels: int, features: int) -> None:
    from rally.models.kernels.batch_invariant_matmul import linear

    x, weight, bias = operands("cuda", torch.bfloat16, 1000, channels, features)
    whole = linear(x, weight, bias)
    for tokens in (1, 3, 64, 129, 256, 512):
        assert torch.equal(linear(x[:tokens], weight, bias), whole[:tokens])
    for i in (0, 1, 77, 500, 999):
        assert torch.equal(linear(x[i : i + 1], weight, bias), whole[i : i + 1])


@gpu
def test_captured() -> None:
    from rally.models.kernels.batch_invariant_matmul import linear

    x, weight, bias = operands("cuda", torch.bfloat16, 256, 1536, 2048)
    assert torch.equal(replayed(lambda: linear(x, weight, bias)), linear(x, weight, bias))
