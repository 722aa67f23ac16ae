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


CASES = [(5, 8, 3), (3, 24, 40), (1, 600, 17), (37, 300, 9)]


@interpreted
@pytest.mark.parametrize("case", CASES)
def test_interpreted(case: tuple[int, int, int]) -> None:
    check("cpu", *case, torch.float32)


def check_alone(device: str, dtype: torch.dtype) -> None:
    """The sum of a token has the same bits whatever its neighbours are."""
    from rally.models.kernels.branch_sum import branch_sum, sources_of

    counts = torch.tensor([1, 0, 13, 1, 2, 0, 1, 1, 5, 1])
    source = torch.repeat_interleave(torch.arange(len(counts)), counts).to(device)
    gathered = randn(len(source), 24, dtype=dtype, device=device, seed=2)
    together = branch_sum(gathered, sources_of(source, len(counts)))
    for token in range(len(counts)):
        own = gathered[source == token]
        alone = branch_sum(own, sources_of(source.new_zeros(len(own)), 1))
        assert torch.equal(together[token], alone[0])
    assert (together[counts == 0] == 0).all()


@interpreted
def test_alone_interpreted() -> None:
    check_alone("cpu", torch.float32)


@gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_alone_compiled(dtype: torch.dtype) -> None:
    check_alone("cuda", dtype)


@gpu
@pytest.mark.parametrize("case", [*CASES, (5000, 256, 20)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compiled(case: tuple[int, int, int], dtype: torch.dtype) -> None:
    check("cuda", *case, dtype)
