"""Sampling kernel: inverts the cumulative distribution of each row at a given uniform number, in two launches.

The first launch reduces each chunk of the vocabulary to its maximum, the index of that, and the sum of exponentials.
The second finds the chunk that the number falls into and reads only that one. Rows are independent. A logit of -inf
marks a forbidden token. A NaN, a +inf or a row of only -inf gives a NaN logprob, which the host checks.
Shapes: B rows, V vocabulary, N chunks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

# mypy: disallow-untyped-decorators=False


_CHUNK = 4096


def sample(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor, ids_B: Tensor, logprobs_B: Tensor) -> None:
    """Write a token for each row to `ids_B` and its log-probability under softmax(logits / temperature) to
    `logprobs_B`.

    Temperature 0 takes the first largest logit, and its log-probability at temperature 1.
    """
    rows, vocabulary = logits_BV.shape
    assert logits_BV.dtype == temperature_B.dtype == logprobs_B.dtype == torch.float32 and ids_B.dtype == torch.int64
    assert logits_BV.stride(1) == 1
    for vector_B in (temperature_B, uniform_B, ids_B, logprobs_B):
        assert vector_B.shape == (rows,) and vector_B.is_contiguous()
    chunks = triton.cdiv(vocabulary, _CHUNK)
    peaks_BN = torch.empty((rows, chunks), dtype=torch.float32, device=logits_BV.device)
    sums_BN = torch.empty_like(peaks_BN)
    places_BN = torch.empty_like(peaks_BN, dtype=torch.int32)
    partial = (peaks_BN, sums_BN, places_BN)
    shape = (logits_BV.stride(0), vocabulary)
    _reduce_kernel[(rows, chunks)](logits_BV, temperature_B, *partial, *shape, CHUNK=_CHUNK, num_warps=8)
    inputs, outputs = (logits_BV, temperature_B, uniform_B), (ids_B, logprobs_B)
    padded = triton.next_power_of_2(chunks)
    _choose_kernel[(rows,)](*inputs, *partial, *outputs, *shape, chunks, CHUNK=_CHUNK, CHUNKS=padded, num_warps=8)


@triton.jit
def _divisor(temperature_ptr: tl.tensor, row: tl.tensor) -> tl.tensor:
    temperature = tl.load(temperature_ptr + row)
    return tl.where(temperature == 0, 1.0, temperature)


@triton.jit
def _reduce_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    places_ptr: tl.tensor,
    row_stride: int,
    vocabulary: int,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + columns, mask=columns < vocabulary, other=-float("inf"))
    x = tl.div_rn(x, _divisor(temperature_ptr, row))
    peak = tl.max(x, axis=0)
    # An infinite peak would make the forbidden tokens of a wholly forbidden chunk NaN.
    total = tl.sum(tl.exp(x - tl.where(peak == -float("inf"), 0.0, peak)), axis=0)
    place = tl.min(tl.where(x == peak, columns, vocabulary - 1), axis=0)
    out = row * tl.num_programs(1) + chunk
    tl.store(peaks_ptr + out, peak)
    tl.store(sums_ptr + out, total)
    tl.store(places_ptr + out, place)


@triton.jit
def _choose_kernel(
    logits_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    peaks_ptr: tl.tensor,
    sums_ptr: tl.tensor,
    places_ptr: tl.tensor,
    ids_ptr: tl.tensor,
    logprobs_ptr: tl.tensor,
    row_stride: int,
    vocabulary: int,
    chunks: int,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    logits_row = logits_ptr + row * row_stride
    divisor = _divisor(temperature_ptr, row)
    index = tl.arange(0, CHUNKS)
    inside = index < chunks
    peaks = tl.load(peaks_ptr + row * chunks + index, mask=inside, other=-float("inf"))
    sums = tl.load(sums_ptr + row * chunks + index, mask=inside, other=0.0)
    peak = tl.max(peaks, axis=0)
    masses = (sums * tl.exp(peaks - peak)).to(tl.float64)
    total = tl.sum(masses, axis=0)

    target = tl.load(uniform_ptr + row).to(tl.float64) * total
    below = tl.cumsum(masses, axis=0)
    chunk = _first(below > target, masses > 0, index, CHUNKS)
    here = index == chunk
    mass = tl.sum(tl.where(here, masses, 0.0), axis=0)
    share = (target - (tl.sum(tl.where(here, below, 0.0), axis=0) - mass)) / mass

    offsets = tl.arange(0, CHUNK)
    columns = chunk * CHUNK + offsets
    x = tl.load(logits_row + columns, mask=columns < vocabulary, other=-float("inf"))
    chunk_peak = tl.max(tl.where(here, peaks, -float("inf")), axis=0)
    weights = tl.exp(tl.div_rn(x, divisor) - chunk_peak).to(tl.float64)
    inner = tl.cumsum(weights, axis=0)
    # Relative to this sum and not that of the first launch: they differ in rounding, and the end must be reachable.
    beyond = inner > share * tl.sum(weights, axis=0)
    drawn = chunk * CHUNK + _first(beyond, weights > 0, offsets, CHUNK)

    best = tl.minimum(tl.min(tl.where(peaks == peak, index, CHUNKS), axis=0), chunks - 1)
    greedy = tl.load(places_ptr + row * chunks + best)
    token = tl.where(tl.load(temperature_ptr + row) == 0, greedy, drawn)
    logit = tl.div_rn(tl.load(logits_row + token), divisor)
    tl.store(ids_ptr + row, token.to(tl.int64))
    tl.store(logprobs_ptr + row, ((logit - peak).to(tl.float64) - tl.log(total)).to(tl.float32))


@triton.jit
def _first(beyond: tl.tensor, possible: tl.tensor, index: tl.tensor, SIZE: tl.constexpr) -> tl.tensor:
    """The first possible index beyond the target; the last possible one if rounding left none."""
    first = tl.min(tl.where(beyond & possible, index, SIZE), axis=0)
    return tl.minimum(first, tl.max(tl.where(possible, index, 0), axis=0))
