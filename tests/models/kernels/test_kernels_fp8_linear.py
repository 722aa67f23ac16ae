"""Quantisation to FP8 equals its reference, and the product of quantised matrices is near that of the exact ones."""

import pytest
import torch
from kernel_cases import INTERPRETED, gpu, interpreted, randn, replayed
from torch import Tensor

from rally.models.kernels import reference

E4M3 = torch.float8_e4m3fn


def quantized(x: Tensor, quantize_rows=reference.quantize_rows) -> tuple[Tensor, Tensor]:
    out, scale = torch.empty(x.shape, dtype=E4M3, device=x.device), torch.empty(len(x), device=x.device)
    quantize_rows(x, out, scale)
    return out, scale


def rows_of(*shape: int, dtype: torch.dtype, device: str = "cpu") -> Tensor:
    """Rows of very different sizes, one of zeros."""
    x = randn(*shape, dtype=torch.float32, device=device) * torch.logspace(-3, 3, shape[0], device=device)[:, None]
    x[shape[0] // 2] = 0
    return x.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_reference_rounds_each_row_to_its_own_scale(dtype: torch.dtype) -> None:
    x = rows_of(8, 64, dtype=dtype)
    out, scale = quantized(x)
    back = out.float() * scale[:, None]
    torch.testing.assert_close(scale * 448, x.float().abs().amax(1).clamp(min=1e-12))
    assert torch.equal(out.float().abs().amax(1), torch.where(x.abs().amax(1) > 0, 448.0, 0.0))
    # three bits behind the first one: half a step is 1/16, and below 2^-6 steps no longer shrink
    assert ((back - x.float()).abs() <= x.float().abs() / 16 + scale[:, None] * 2.0**-10).all()


def test_what_is_not_finite_is_not_hidden() -> None:
    x = randn(3, 32, dtype=torch.float32)
    x[0, 5], x[1, 7] = torch.inf, torch.nan
    (data, scale), (weight, weight_scale) = quantized(x), quantized(randn(16, 32, dtype=torch.float32, seed=1))
    y = reference.fp8_linear(data, scale, weight, weight_scale, None, torch.float32)
    assert y[:2].isnan().all() and y[2].isfinite().all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [False, True])
def test_the_reference_is_the_product_of_the_dequantised(dtype: torch.dtype, bias: bool) -> None:
    x, weight = rows_of(8, 64, dtype=dtype), randn(48, 64, dtype=dtype, seed=1)
    added = randn(48, dtype=dtype, seed=2) if bias else None
    (data, scale), (weight8, weight_scale) = quantized(x), quantized(weight)
    y = reference.fp8_linear(data, scale, weight8, weight_scale, added, dtype)
    exact = (data.double() * scale[:, None]) @ (weight8.double() * weight_scale[:, None]).t()
    exact = exact if added is None else exact + added.double()
    assert y.dtype == dtype
    off = (y - exact).abs().amax(1) / exact.abs().amax(1).clamp(min=1)
    assert off.max() < (1e-5 if dtype == torch.float32 else 4e-3)
    plain = torch.nn.functional.linear(x.double(), weight.double(), None if added is None else added.double())
    assert (y - plain).norm(dim=1).max() < 0.05 * plain.norm(dim=1).max(), "each factor keeps four bits"


def check(device: str, dtype: torch.dtype, tokens: int, channels: int) -> None:
    from rally.models.kernels import fp8_linear

    wide = rows_of(tokens, channels + 32, dtype=dtype, device=device)
    for x in (wide, wide[:, 16 : 16 + channels]):
        ours, scale = quantized(x, fp8_linear.quantize_rows)
        theirs, expected = quantized(x)
        assert torch.equal(scale, expected)
        same = ours.view(torch.uint8) == theirs.view(torch.uint8)
        if INTERPRETED:  # it rounds ties away from zero, and loses the carry into the next power of two
            exact, rounded = x.float() / scale[:, None], theirs.float()
            same |= (ours.float() - exact).abs() <= (rounded - exact).abs() * (1 + 1e-5)
            same |= (rounded == 2 * ours.float()) & (rounded.abs().frexp().mantissa == 0.5)
        assert same.all()


@interpreted
@pytest.mark.parametrize("channels", [64, 2050])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_interpreted(dtype: torch.dtype, channels: int) -> None:
    check("cpu", dtype, 5, channels)


def needs_fp8() -> None:
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("FP8 products need compute capability 8.9")


@gpu
@pytest.mark.parametrize("channels", [64, 1536, 18944])
@pytest.mark.parametrize("tokens", [1, 3, 256, 1000])
def test_compiled(tokens: int, channels: int) -> None:
    needs_fp8()
    check("cuda", torch.bfloat16, tokens, channels)


@gpu
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("features, channels", [(16, 64), (2048, 1536), (1536, 8960), (17920, 1536)])
@pytest.mark.parametrize("tokens", [1, 2, 17, 256, 2049])
def test_the_product_of_the_gpu(tokens: int, features: int, channels: int, bias: bool) -> None:
    from rally.models.kernels import fp8_linear

    needs_fp8()
    x = rows_of(tokens, channels, dtype=torch.bfloat16, device="cuda")
    weight = randn(features, channels, dtype=torch.bfloat16, device="cuda", seed=1)
    added = randn(features, dtype=torch.bfloat16, device="cuda", seed=2) if bias else None
    arguments = (*quantized(x), *quantized(weight), added, torch.bfloat16)
    ours, theirs = fp8_linear.fp8_linear(*arguments), reference.fp8_linear(*arguments)
    # sums of fewer bits: a hundredth of what a row of the output measures
    off = (ours.float() - theirs.float()).abs().amax(1)
    assert (off <= 0.01 * theirs.float().norm(dim=1) / features**0.5 * 6 + 1e-6).all()
    # the weight of a layer inside a packed one
    part = fp8_linear.fp8_linear(
        *arguments[:2], arguments[2][features // 2 :], arguments[3][features // 2 :], None, torch.bfloat16
    )
    assert part.shape == (tokens, features - features // 2)


@gpu
def test_captured() -> None:
    from rally.models.kernels import fp8_linear

    needs_fp8()
    x, weight = (randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((256, 1536), (2048, 1536)))
    copy = quantized(weight)

    def work() -> Tensor:
        return fp8_linear.fp8_linear(*quantized(x, fp8_linear.quantize_rows), *copy, None, torch.bfloat16)

    assert torch.equal(replayed(work), work())
