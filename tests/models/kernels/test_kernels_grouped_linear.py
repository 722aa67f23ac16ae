"""Experts of a decode step equal those that transformers computes, whatever the loads."""

import pytest
import torch
from kernel_cases import gpu, interpreted, randn
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from benchmarks.architectures import small_model
from rally.models import experts
from rally.models.kernels import reference


def modules(name: str) -> list[torch.nn.Module]:
    return [module for module in small_model(name).modules() if hasattr(module, "_is_expert_parallel")]


@pytest.mark.parametrize("name", ["qwen3_moe", "gpt_oss", "nemotron_h"])
@pytest.mark.parametrize("tokens", [1, 7, 300])
def test_experts_by_kernel_are_those_of_transformers(name: str, tokens: int) -> None:
    """The reference of the kernel: gated or not, with biases, transposed."""
    module = modules(name)[0]
    experts_, hidden = module.num_experts, (module.down_proj.shape[1:])[1 if module.is_transposed else 0]
    x = randn(tokens, hidden, dtype=torch.float32, seed=1)
    scores = randn(tokens, experts_, dtype=torch.float32, seed=2).softmax(-1)
    scores[:, 0] += 1  # one expert gets every token
    weights, index = scores.topk(min(2, experts_), -1)
    with torch.no_grad():
        theirs = ALL_EXPERTS_FUNCTIONS["grouped_mm"](module, x, index, weights)
        ours = experts.experts_by_kernel(module, x, index, weights)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def check(device: str, dtype: torch.dtype) -> None:
    from rally.models.kernels.grouped_linear import grouped_linear

    for number, inputs, outputs, pairs in ((4, 64, 96, 40), (8, 80, 24, 9), (3, 32, 160, 200)):
        index = torch.randint(0, number, (pairs, 1), generator=torch.Generator().manual_seed(3)).to(device)
        blocks = experts.blocks_of(index, number)
        assert sorted(blocks.order_S.tolist()) == list(range(pairs))
        x = randn(pairs, inputs, dtype=dtype, device=device, seed=1)
        weight = randn(number, outputs, inputs, dtype=dtype, device=device, seed=2)
        for layout in (weight, weight.transpose(1, 2).contiguous().transpose(1, 2)):
            ours, theirs = (torch.full((pairs, outputs), torch.nan, dtype=dtype, device=device) for _ in range(2))
            arguments = (x, layout, blocks.order_S, blocks.ends_E, blocks.blocks_B2)
            grouped_linear(*arguments, ours, blocks.block_m)
            reference.grouped_linear(*arguments, theirs, blocks.block_m)
            torch.testing.assert_close(ours, theirs, rtol=2e-2 if dtype != torch.float32 else 1e-5, atol=1e-2)


@interpreted
def test_interpreted() -> None:
    check("cpu", torch.float32)


@gpu
def test_on_a_gpu() -> None:
    check("cuda", torch.bfloat16)
