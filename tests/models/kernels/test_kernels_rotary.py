"""The rotary embedding kernel, which also writes keys and values to their slots, equals its reference."""

from typing import Any, NamedTuple

import pytest
import torch
from kernel_cases import gpu, interpreted, randn, replayed
from torch import Tensor

from rally.models.kernels import reference

EPS = 1e-6
SLOTS = 40


class Case(NamedTuple):
    """A packed projection with 2 query heads per key head, padding among its tokens, and non-empty pools."""

    packed: Tensor
    arguments: tuple[Tensor, ...]  # q, k, v, cos, sin, slots, keys, values, q_out
    norm: dict[str, Any]

    def outputs(self) -> tuple[Tensor, ...]:
        return self.arguments[6:]

    def fresh(self) -> "Case":
        *inputs, keys, values, q_out = self.arguments
        return self._replace(arguments=(*inputs, keys.clone(), values.clone(), q_out.clone()))


def case(device: str, dtype: torch.dtype, tokens: int, kv_heads: int, size: int, norm: str) -> Case:
    heads = 2 * kv_heads
    packed = randn(tokens, (heads + 2 * kv_heads) * size, dtype=dtype, device=device)
    q, k, v = packed.view(tokens, -1, size).split([heads, kv_heads, kv_heads], dim=1)
    angles = randn(tokens, size // 2, dtype=torch.float32, device=device, seed=1).repeat(1, 2) * 3
    slots = torch.randperm(tokens + SLOTS, generator=torch.Generator().manual_seed(2))[:tokens].to(device)
    slots[1::3] = -1
    pools = [randn(tokens + SLOTS, kv_heads, size, dtype=dtype, device=device, seed=seed) for seed in (3, 4)]
    cos, sin = angles.cos().to(dtype), angles.sin().to(dtype)
    weights = {f"{x}_weight": randn(size, dtype=dtype, device=device, seed=seed) for x, seed in (("q", 5), ("k", 6))}
    options = {} if norm == "none" else {**weights, "eps": EPS, "offset": norm == "gemma"}
    return Case(packed, (q, k, v, cos, sin, slots, *pools, torch.zeros_like(q).contiguous()), options)


@pytest.mark.parametrize("norm", ["none", "qwen", "gemma"])
def test_reference_is_hugging_face(norm: str) -> None:
    from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
    from transformers.models.llama.modeling_llama import apply_rotary_pos_emb
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

    one = case("cpu", torch.bfloat16, 20, 2, 32, norm)
    q, k, v, cos, sin, slots, keys, values, q_out = one.arguments
    old_keys = keys.clone()
    reference.rotate_and_store(*one.arguments, **one.norm)
    if norm != "none":
        module = (Qwen3RMSNorm if norm == "qwen" else Gemma3RMSNorm)(32, eps=EPS)
        module.weight.data = one.norm["q_weight"]
        q = module(q)
        module.weight.data = one.norm["k_weight"]
        k = module(k)
    q, k = apply_rotary_pos_emb(q.transpose(0, 1)[None], k.transpose(0, 1)[None], cos[None], sin[None])
    stored = slots >= 0
    assert torch.equal(q_out, q[0].transpose(0, 1))
    assert torch.equal(keys[slots[stored]], k[0].transpose(0, 1)[stored])
    assert torch.equal(values[slots[stored]], v[stored])
    others = torch.ones(len(keys), dtype=torch.bool)
    others[slots[stored]] = False
    assert torch.equal(keys[others], old_keys[others])


def check(device: str, dtype: torch.dtype, tokens: int, kv_heads: int, size: int, norm: str) -> None:
    from rally.models.kernels.rotary import rotate_and_store

    ours = case(device, dtype, tokens, kv_heads, size, norm)
    theirs = ours.fresh()
    rotate_and_store(*ours.arguments, **ours.norm)
    reference.rotate_and_store(*theirs.arguments, **theirs.norm)
    for mine, other in zip(ours.outputs(), theirs.outputs(), strict=True):
        if norm == "none":
            assert torch.equal(mine, other)
        else:  # a rounding difference of the norm affects two rotated values, and is large relative to a small one
            eps = torch.finfo(dtype).eps
            torch.testing.assert_close(mine, other, rtol=2 * eps, atol=8 * eps)
            assert dtype == torch.float32 or (mine != other).sum() <= max(4, mine.numel() // 500)


@interpreted
@pytest.mark.parametrize("norm", ["none", "qwen", "gemma"])
@pytest.mark.parametrize(("dtype", "kv_heads", "size"), [(torch.float16, 3, 64), (torch.float32, 1, 128)])
def test_interpreted(dtype: torch.dtype, kv_heads: int, size: int, norm: str) -> None:
    check("cpu", dtype, 3, kv_heads, size, norm)


@interpreted
def test_interpreted_refuses_a_head_that_does_not_halve() -> None:
    with pytest.raises(AssertionError):
        check("cpu", torch.float16, 4, 1, 96, "none")


@gpu
@pytest.mark.parametrize("norm", ["none", "qwen", "gemma"])
@pytest.mark.parametrize(("kv_heads", "size"), [(2, 128), (8, 128), (5, 64), (1, 256)])
@pytest.mark.parametrize("tokens", [1, 3, 256, 1000])
def test_compiled(tokens: int, kv_heads: int, size: int, norm: str) -> None:
    check("cuda", torch.bfloat16, tokens, kv_heads, size, norm)


@gpu
def test_captured() -> None:
    from rally.models.kernels.rotary import rotate_and_store

    eager = case("cuda", torch.bfloat16, 256, 2, 128, "qwen")
    graph = eager.fresh()
    rotate_and_store(*eager.arguments, **eager.norm)
    replayed(lambda: rotate_and_store(*graph.arguments, **graph.norm))
    for mine, other in zip(graph.outputs(), eager.outputs(), strict=True):
        assert torch.equal(mine, other)
