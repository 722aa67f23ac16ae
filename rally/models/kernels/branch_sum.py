"""Sums the rows that were gathered from the same source: the gradient of a gather, in float32 and in a fixed order.

Shapes: S gathered rows, T sources, X channels.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

_ROWS = 16


class Sources(NamedTuple):
    """The gathered rows sorted by their source, and where those of each source end."""

    order_S: Tensor
    ends_T: Tensor


def sources_of(source_S: Tensor, tokens: int) -> Sources:
    """Does not wait for the device."""
    sorted_S, order_S = torch.sort(source_S, stable=True)
    numbers_T = torch.arange(tokens, device=source_S.device, dtype=source_S.dtype)
    return Sources(order_S, torch.searchsorted(sorted_S, numbers_T, right=True))


def branch_sum(gathered_SX: Tensor, sources: Sources) -> Tensor:
    """The sum of the rows of each source [T, X], added in float32 and rounded once."""
    tokens, channels = len(sources.ends_T), gathered_SX.shape[1]
    assert gathered_SX.stride(1) == 1 and sources.order_S.is_contiguous() and sources.ends_T.is_contiguous()
    out_TX = torch.empty((tokens, channels), dtype=gathered_SX.dtype, device=gathered_SX.device)
    block = min(512, triton.next_power_of_2(channels))
    if tokens:
        _branch_sum_kernel[(tokens, triton.cdiv(channels, block))](
            gathered_SX,
            sources.order_S,
            sources.ends_T,
            out_TX,
            gathered_SX.stride(0),
            channels,
            ROWS=_ROWS,
            BLOCK=block,
            num_warps=4,
        )
    return out_TX


@triton.jit
def _branch_sum_kernel(
    gathered_ptr: tl.tensor,
    order_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: int,
    channels: int,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < channels
    begin = tl.load(ends_ptr + token - 1, mask=token > 0, other=0)
    end = tl.load(ends_ptr + token)
    total = tl.zeros((BLOCK,), dtype=tl.float32)
    for first in range(begin, end, ROWS):
        places = first + tl.arange(0, ROWS)
        rows = tl.load(order_ptr + places, mask=places < end, other=0)
        mask = (places < end)[:, None] & inside[None, :]
        values = tl.load(gathered_ptr + rows[:, None] * row_stride + columns[None, :], mask=mask, other=0.0)
        total += tl.sum(values.to(tl.float32), axis=0)
    tl.store(out_ptr + token * channels + columns, total.to(out_ptr.dtype.element_ty), mask=inside)
