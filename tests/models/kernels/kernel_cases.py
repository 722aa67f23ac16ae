"""Helpers of the kernel tests: where a kernel can run, and which results count as equal."""

import os
from collections.abc import Callable
from importlib.util import find_spec
from typing import TypeVar

import pytest
import torch
from torch import Tensor

Result = TypeVar("Result")

INTERPRET = "TRITON_INTERPRET"
INTERPRETED = os.environ.get(INTERPRET) == "1"
HAS_TRITON = find_spec("triton") is not None

# Triton reads the variable when it is imported, so test_kernels_interpreter.py starts a process of its own for these.
# fp16 and fp32 only: the interpreter truncates bf16 instead of rounding it.
interpreted = pytest.mark.skipif(not INTERPRETED, reason="runs inside test_kernels_interpreter.py")


def gpu(test: Callable[..., None]) -> Callable[..., None]:
    needs = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
    marked: Callable[..., None] = pytest.mark.gpu(needs(test))
    return marked


def randn(*shape: int, dtype: torch.dtype, device: str = "cpu", seed: int = 0) -> Tensor:
    values = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return values.to(dtype).to(device)


def assert_rounds_alike(ours: Tensor, theirs: Tensor) -> None:
    """Equal up to the rounding of fp32 sums in another order: one unit in the last place, one element in 1000."""
    assert ours.dtype == theirs.dtype and ours.shape == theirs.shape
    if ours.dtype == torch.float32:
        torch.testing.assert_close(ours, theirs, rtol=2e-6, atol=2e-6)
        return
    steps = (_ordered(ours) - _ordered(theirs)).abs()
    assert steps.max() <= 1
    assert (steps > 0).sum() <= max(1, steps.numel() // 1000)


def _ordered(x: Tensor) -> Tensor:
    """Sixteen-bit floats as integers of the same order, in which neighbours differ by one."""
    bits = x.contiguous().view(torch.int16).int()
    return torch.where(bits < 0, -(bits & 0x7FFF), bits)


def replayed(work: Callable[[], Result]) -> Result:
    """The result of `work` from a CUDA graph; `work` may run more than once."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        work()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = work()
    graph.replay()
    torch.cuda.synchronize()
    return result
