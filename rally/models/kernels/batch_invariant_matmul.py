"""Batch-invariant linear layer: a row of the result is bit for bit the same whatever other rows there are.

A library's matrix product chooses its tiles, and whether to split the inner dimension, by the number of rows, so a
token's logits depend on the size of its batch. Here the tile depends only on the weight, each output element is one
fp32 accumulator over the channels in a fixed order, and one compiled kernel serves every number of rows.
Shapes: T tokens, C channels in, F features out.
"""

# mypy: disallow-untyped-decorators=False
from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor


class _Tile(NamedTuple):
    rows: int
    features: int
    channels: int
    warps: int
    stages: int


_WIDE = _Tile(128, 128, 64, warps=8, stages=4)
_NARROW = _Tile(128, 64, 64, warps=4, stages=4)  # few features: more programs for the same work
_EXACT = _Tile(64, 64, 32, warps=4, stages=3)  # fp32 without tensor cores
_NARROW_FEATURES = 4096
_GROUP = 8  # rows of tiles that walk the features together and share them in L2


def linear(
    x_TC: Tensor, weight_FC: Tensor, bias_F: Tensor | None = None, out_dtype: torch.dtype | None = None
) -> Tensor:
    """x @ weight.T + bias, the bias added in fp32 before the one rounding. No gradient."""
    tokens, channels = x_TC.shape
    features = weight_FC.shape[0]
    assert weight_FC.shape == (features, channels) and x_TC.dtype == weight_FC.dtype
    assert x_TC.stride(1) == weight_FC.stride(1) == 1
    assert bias_F is None or (bias_F.shape == (features,) and bias_F.stride(0) == 1)
    out_TF = torch.empty((tokens, features), dtype=out_dtype or x_TC.dtype, device=x_TC.device)
    tile = _tile(weight_FC)
    _linear_kernel[(triton.cdiv(tokens, tile.rows) * triton.cdiv(features, tile.features),)](
        x_TC,
        weight_FC,
        bias_F,
        out_TF,
        tokens,
        features,
        x_TC.stride(0),
        weight_FC.stride(0),
        CHANNELS=channels,
        HAS_BIAS=bias_F is not None,
        ROWS=tile.rows,
        COLUMNS=tile.features,
        INNER=tile.channels,
        GROUP=_GROUP,
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return out_TF


def _tile(weight_FC: Tensor) -> _Tile:
    if weight_FC.dtype == torch.float32:
        return _EXACT
    return _NARROW if weight_FC.shape[0] <= _NARROW_FEATURES else _WIDE


@triton.jit(do_not_specialize=["tokens"])
def _linear_kernel(
    x_ptr: tl.tensor,
    weight_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    out_ptr: tl.tensor,
    tokens: int,
    features: int,
    x_stride: int,
    weight_stride: int,
    CHANNELS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    INNER: tl.constexpr,
    GROUP: tl.constexpr,
) -> None:
    row_tile, column_tile = _place(tl.cdiv(tokens, ROWS), tl.cdiv(features, COLUMNS), GROUP)
    rows = row_tile * ROWS + tl.arange(0, ROWS)
    columns = column_tile * COLUMNS + tl.arange(0, COLUMNS)
    inner = tl.arange(0, INNER)
    # Rows and columns past the edge read some that exist; only their stores are masked.
    x_tile = x_ptr + (rows % tokens).to(tl.int64)[:, None] * x_stride + inner[None, :]
    weight_tile = weight_ptr + (columns % features).to(tl.int64)[None, :] * weight_stride + inner[:, None]
    sums = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for start in range(0, CHANNELS, INNER):
        if CHANNELS % INNER == 0:
            x = tl.load(x_tile)
            weight = tl.load(weight_tile)
        else:
            x = tl.load(x_tile, mask=inner[None, :] < CHANNELS - start, other=0.0)
            weight = tl.load(weight_tile, mask=inner[:, None] < CHANNELS - start, other=0.0)
        sums = tl.dot(x, weight, sums, input_precision="ieee")
        x_tile += INNER
        weight_tile += INNER
    if HAS_BIAS:
        sums += tl.load(bias_ptr + columns, mask=columns < features, other=0.0).to(tl.float32)[None, :]
    out_tile = out_ptr + rows.to(tl.int64)[:, None] * features + columns[None, :]
    inside = (rows < tokens)[:, None] & (columns < features)[None, :]
    tl.store(out_tile, sums.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _place(row_tiles: tl.tensor, column_tiles: tl.tensor, GROUP: tl.constexpr) -> tuple[tl.tensor, tl.tensor]:
    """The program's tile: groups of GROUP rows of tiles, column by column within a group."""
    program = tl.program_id(0)
    first = program // (GROUP * column_tiles) * GROUP
    height = tl.minimum(row_tiles - first, GROUP)
    within = program % (GROUP * column_tiles)
    return first + within % height, within // height
