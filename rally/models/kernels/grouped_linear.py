"""Products of few rows with many experts' weights, as a decode step of a mixture of experts needs them.

Rows are sorted by expert and cut into blocks of one expert. A program multiplies one block by some columns of its
expert's weight, so that each weight is read about once, which is all that limits the speed of such a step. Nothing
synchronizes and the grid follows from shapes, so a CUDA graph can capture the call.

Shapes: S pairs of a token and an expert, sorted by expert, E experts, C inputs, F outputs, B blocks of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def grouped_linear(
    x: Tensor, weight_EFC: Tensor, rows_S: Tensor, ends_E: Tensor, blocks_B2: Tensor, out_SF: Tensor, block_m: int
) -> None:
    """`out[s] = weight[expert of s] @ x[rows[s]]`. `ends_E` are the ends of the experts' pairs. A block is an expert
    and its first pair, int32; the expert of padding is -1. The weight may have any strides."""
    _, outputs, inputs = weight_EFC.shape
    assert x.stride(1) == out_SF.stride(1) == 1 and x.shape[1] == inputs and out_SF.shape[1] == outputs
    block_n = min(128, triton.next_power_of_2(outputs)) if block_m < 64 else min(64, triton.next_power_of_2(outputs))
    block_k = min(64, max(16, triton.next_power_of_2(inputs)))
    _grouped_kernel[(triton.cdiv(outputs, block_n), len(blocks_B2))](
        x, weight_EFC, rows_S, ends_E, blocks_B2, out_SF, x.stride(0), *weight_EFC.stride(), out_SF.stride(0),
        inputs, outputs, BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=4,
    )  # fmt: skip


@triton.jit
def _grouped_kernel(
    x: tl.tensor,
    weight: tl.tensor,
    rows: tl.tensor,
    ends: tl.tensor,
    blocks: tl.tensor,
    out: tl.tensor,
    x_row: tl.tensor,
    weight_expert: tl.tensor,
    weight_out: tl.tensor,
    weight_in: tl.tensor,
    out_row: tl.tensor,
    inputs: tl.tensor,
    outputs: tl.tensor,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
) -> None:
    """One block of rows and BLOCK_N columns."""
    block = blocks + tl.program_id(1) * 2
    expert = tl.load(block)
    if expert < 0:
        return
    m = tl.load(block + 1) + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    real = m < tl.load(ends + expert)
    row = tl.load(rows + m, mask=real, other=0).to(tl.int64)
    x_place = x + row[:, None] * x_row + k[None, :]
    w_place = weight + expert.to(tl.int64) * weight_expert + n[:, None] * weight_out + k[None, :] * weight_in
    sums = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in range(0, inputs, BLOCK_K):
        inside = (start + k < inputs)[None, :]
        a = tl.load(x_place + start, mask=real[:, None] & inside, other=0.0)
        b = tl.load(w_place + start * weight_in, mask=(n < outputs)[:, None] & inside, other=0.0)
        sums = tl.dot(a, tl.trans(b), sums, input_precision="ieee")
    place = out + m.to(tl.int64)[:, None] * out_row + n[None, :]
    tl.store(place, sums.to(out.dtype.element_ty), mask=real[:, None] & (n < outputs)[None, :])
