"""The sum over gathered rows equals torch's index_add in float64, in one order."""

import pytest
import torch
from kernel_cases import gpu, interpreted, randn


def check(device: str, tokens: int, channels: int, most: int, dtype: torch.dtype) -> None:
    from rally.models.kernels.branch_sum import branch_sum, sources_of

    generator = torch.Generator().manual_seed(tokens)
    counts = torch.randint(0, most + 1, (tokens,), generator=generator)
    source = torch.repeat_interleave(torch.arange(tokens), counts)
    source = source[torch.randperm(len(source), generator=generator)].to(device)
    gathered = randn(len(source), channels, dtype=dtype, device=device, seed=1)
    ours = branch_sum(gathered, sources_of(source, tokens))
    exact = torch.zeros(tokens, channels, dtype=torch.float64, device=device)
    exact.index_add_(0, source, gathered.double())
    rounding = 1e-5 if dtype == torch.float32 else 8e-3
    torch.testing.assert_close(ours.double(), exact, rtol=rounding, atol=1e-5)
    assert torch.equal(ours, branch_sum(gathered, sources_of(source, tokens)))


CASES = [(5, 8, 3), (3, 24, 40), (1, 600, 17)]


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: tuple[int, int, int]) -> None:
    check("cpu", *case, torch.float32)


@gpu
@pytest.mark.parametrize("case", [*CASES, (5000, 256, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    check("cuda", *case, dtype)
