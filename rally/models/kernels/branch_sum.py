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

_TOKENS = 8  # of one program: most tokens have one row, which is too little work for a program of its own
_CHANNELS = 256


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
    block = min(_CHANNELS, triton.next_power_of_2(channels))
    if tokens:
        _branch_sum_kernel[(triton.cdiv(tokens, _TOKENS), triton.cdiv(channels, block))](
            gathered_SX,
            sources.order_S,
            sources.ends_T,
            out_TX,
            gathered_SX.stride(0),
            tokens,
            channels,
            TOKENS=_TOKENS,
            BLOCK=block,
            num_warps=4,
        )
    return out_TX


# The number of tokens varies from micro-batch to micro-batch: specialised on it, a run would compile the kernel anew.
@triton.jit(do_not_specialize=["tokens"])
def _branch_sum_kernel(
    gathered_ptr: tl.tensor,
    order_ptr: tl.tensor,
    ends_ptr: tl.tensor,
    out_ptr: tl.tensor,
    row_stride: int,
    tokens: int,
    channels: int,
    TOKENS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    """Some columns of TOKENS sources. Each adds its own rows one after the other, so its sum does not depend on the
    other sources of the program."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    real = token < tokens
    inside = columns < channels
    place = tl.load(ends_ptr + token - 1, mask=real & (token > 0), other=0)
    left = tl.load(ends_ptr + token, mask=real, other=0)
    left = tl.where(real, left - place, 0).to(tl.int32)
    row = tl.load(order_ptr + place, mask=left > 0, other=0)
    total = tl.zeros((TOKENS, BLOCK), dtype=tl.float32)
    for done in range(tl.max(left, axis=0)):
        source = gathered_ptr + row[:, None] * row_stride + columns[None, :]
        mask = (done < left)[:, None] & inside[None, :]
        # Load the next rows' numbers now, so that their values need not wait for them.
        row = tl.load(order_ptr + place + done + 1, mask=done + 1 < left, other=0)
        total += tl.load(source, mask=mask, other=0.0).to(tl.float32)
    out = out_ptr + token[:, None] * channels + columns[None, :]
    tl.store(out, total.to(out_ptr.dtype.element_ty), mask=real[:, None] & inside[None, :])
