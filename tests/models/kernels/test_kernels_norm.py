"""The RMS norm kernels equal their reference, and the reference equals the Hugging Face modules."""

import pytest
import torch
from kernel_cases import assert_rounds_alike, gpu, interpreted, randn, replayed

from rally.models.kernels import reference

EPS = 1e-6


@pytest.mark.parametrize("offset", [False, True])
def test_reference_is_the_hugging_face_module(offset: bool) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm

    module = (Gemma3RMSNorm if offset else Qwen2RMSNorm)(96, eps=EPS).bfloat16()
    module.weight.data = randn(96, dtype=torch.bfloat16, seed=1)
    x, residual = (randn(64, 96, dtype=torch.bfloat16, seed=seed) for seed in (2, 3))
    assert torch.equal(reference.rms_norm(x, module.weight, EPS, offset=offset), module(x))

    stream = residual.clone()
    y = reference.add_rms_norm(x, stream, module.weight, EPS, offset=offset)
    assert torch.equal(stream, residual + x)
    assert torch.equal(y, module(residual + x))


def check(device: str, dtype: torch.dtype, tokens: int, channels: int, offset: bool) -> None:
    from rally.models.kernels import rms_norm as norm

    weight = randn(channels, dtype=dtype, device=device, seed=1)
    wide = randn(tokens, channels + 32, dtype=dtype, device=device, seed=2)
    x = wide[:, 16 : 16 + channels]
    stream = randn(tokens, 2 * channels, dtype=dtype, device=device, seed=3)[:, channels:]
    expected_stream = stream.clone()

    y = norm.rms_norm(x, weight, EPS, offset=offset)
    assert_rounds_alike(y, reference.rms_norm(x, weight, EPS, offset=offset))
    y = norm.add_rms_norm(x, stream, weight, EPS, offset=offset)
    assert_rounds_alike(y, reference.add_rms_norm(x, expected_stream, weight, EPS, offset=offset))
    assert torch.equal(stream, expected_stream)
    assert torch.equal(norm.rms_norm(x[-1:], weight, EPS), norm.rms_norm(x, weight, EPS)[-1:])


@interpreted
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("channels", [64, 2050])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_interpreted(dtype: torch.dtype, channels: int, offset: bool) -> None:
    check("cpu", dtype, 3, channels, offset)


@gpu
@pytest.mark.parametrize("offset", [False, True])
@pytest.mark.parametrize("channels", [64, 1536, 16384])
@pytest.mark.parametrize("tokens", [1, 3, 256, 1000])
def test_compiled(tokens: int, channels: int, offset: bool) -> None:
    check("cuda", torch.bfloat16, tokens, channels, offset)


@gpu
def test_captured() -> None:
    from rally.models.kernels import rms_norm as norm

    x, weight = (randn(*shape, dtype=torch.bfloat16, device="cuda") for shape in ((256, 1536), (1536,)))
    assert torch.equal(replayed(lambda: norm.rms_norm(x, weight, EPS)), norm.rms_norm(x, weight, EPS))
