"""The gated activation kernel equals its reference, and the reference equals the Hugging Face module."""

import pytest
import torch
from kernel_cases import assert_rounds_alike, gpu, interpreted, randn, replayed

from rally.models.kernels import reference

KINDS = ["silu", "gelu_tanh"]


@pytest.mark.parametrize(("kind", "name"), [("silu", "silu"), ("gelu_tanh", "gelu_pytorch_tanh")])
def test_reference_is_the_hugging_face_module(kind: str, name: str) -> None:
    from transformers import Qwen2Config
    from transformers.models.qwen2.modeling_qwen2 import Qwen2MLP

    mlp = Qwen2MLP(Qwen2Config(hidden_size=48, intermediate_size=80, hidden_act=name)).bfloat16()
    x = 4 * randn(64, 48, dtype=torch.bfloat16)
    y = reference.gated(mlp.gate_proj(x), mlp.up_proj(x), kind)
    assert torch.equal(mlp.down_proj(y), mlp(x))


def check(device: str, dtype: torch.dtype, tokens: int, features: int, kind: str, scale: float) -> None:
    from rally.models.kernels.activation import gated

    gate, up = (scale * randn(tokens, 2 * features, dtype=dtype, device=device)).chunk(2, dim=1)
    assert_rounds_alike(gated(gate, up, kind), reference.gated(gate, up, kind))


@interpreted
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_interpreted(dtype: torch.dtype, kind: str) -> None:
    # Below -3 the rounding of tanh itself shows through 1 + tanh, and numpy's is not torch's.
    check("cpu", dtype, 3, 1100, kind, scale=0.7)


@gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("tokens", [1, 3, 256, 1000])
def test_compiled(tokens: int, kind: str) -> None:
    check("cuda", torch.bfloat16, tokens, 8960, kind, scale=2)


@gpu
@pytest.mark.parametrize("kind", KINDS)
def test_compiled_for_every_number_of_sixteen_bits(kind: str) -> None:
    from rally.models.kernels.activation import gated

    every = torch.arange(2**16, device="cuda").short().view(torch.bfloat16)
    gate = every[every.isfinite()][None]
    ours, theirs = (function(gate, torch.ones_like(gate), kind) for function in (gated, reference.gated))
    torch.testing.assert_close(ours, theirs, rtol=2**-7, atol=5e-7)


@gpu
def test_captured() -> None:
    from rally.models.kernels.activation import gated

    gate, up = randn(256, 17920, dtype=torch.bfloat16, device="cuda").chunk(2, dim=1)
    assert torch.equal(replayed(lambda: gated(gate, up, "silu")), gated(gate, up, "silu"))
