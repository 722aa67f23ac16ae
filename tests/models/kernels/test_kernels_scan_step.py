"""The decode step of linear attention equals its reference, in place."""

import pytest
import torch
from kernel_cases import gpu, interpreted, randn
from torch import Tensor

from rally.models.kernels import reference

CASES = [  # heads, key, value, decay per channel, delta rule
    (2, 16, 16, False, True),
    (3, 24, 40, False, False),
    (2, 16, 32, True, True),
    (4, 128, 64, False, False),
]


def step(function: object, case: tuple[int, int, int, bool, bool], device: str, dtype: torch.dtype) -> list[Tensor]:
    heads, key, value, channels, delta = case
    tokens, rows = 5, torch.tensor([6, 0, 3, 7, 1], device=device)
    q, k = (randn(tokens, heads, key, dtype=dtype, device=device, seed=i) for i in (1, 2))
    v = randn(tokens, heads, value, dtype=dtype, device=device, seed=3)
    g = -randn(*((tokens, heads, key) if channels else (tokens, heads)), dtype=torch.float32, device=device).abs()
    beta = randn(tokens, heads, dtype=torch.float32, device=device, seed=4).sigmoid() if delta else None
    states = randn(8, heads, key, value, dtype=torch.float32, device=device, seed=5)
    out = torch.zeros(tokens, heads, value, device=device)
    function(q, k / key**0.5, v, g, beta, states, rows, out)  # type: ignore[operator]
    return [states, out]


def check(case: tuple[int, int, int, bool, bool], device: str, dtype: torch.dtype) -> None:
    from rally.models.kernels.scan_step import scan_step

    for ours, theirs in zip(
        step(scan_step, case, device, dtype), step(reference.scan_step, case, device, dtype), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@interpreted
@pytest.mark.parametrize("case", CASES, ids=str)
def test_interpreted(case: tuple[int, int, int, bool, bool]) -> None:
    check(case, "cpu", torch.float32)


@gpu
@pytest.mark.parametrize("case", [*CASES, (32, 128, 128, False, True)], ids=str)
def test_on_a_gpu(case: tuple[int, int, int, bool, bool]) -> None:
    check(case, "cuda", torch.bfloat16)
