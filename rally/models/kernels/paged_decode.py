"""Paged attention for one new token per request (decode). Batch-invariant: a result depends only on its own history.

Each program computes the heads of one key/value head for one split of one request's history, so keys and values are
read once. Splits have a fixed size and begin at fixed positions, so the splits of a row and the order in which they are
added follow from its own length, not from the rest of the batch or `max_length`. The result is not bitwise that of
`paged_extend` for the same token, whose tiles have another shape. A caller that needs decode, chunks and training to
agree to the last bit uses `paged_extend` for all of them.

The grid follows from shapes and `max_length` and nothing synchronizes, so a CUDA graph can capture the call.

Shapes: B requests, H query heads, K key/value heads, G = H / K, D head size, P width of the page table, S splits.
A pool of keys or values is [slots, K, D]; slot = page * page_size + offset.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from rally.models.kernels.attention_tiles import SPLIT, group_parts
from rally.models.kernels.paged_extend import add_sink, capped, head_sizes, load_head

LOG2_E = math.log2(math.e)
MERGED = 8  # splits that the merging kernel reads at once


class DecodeTuning(NamedTuple):
    """Launch parameters; `split` also determines rounding, so a run uses one value."""

    block: int
    warps: int
    stages: int
    split: int = SPLIT


def tuning(head_size: int) -> DecodeTuning:
    """Blocks of which three programs, each with two in flight, fit into the shared memory of an H200 multiprocessor."""
    return DecodeTuning(block=64 if head_size <= 128 else 32, warps=4, stages=3 if head_size <= 256 else 2)


def paged_decode(
    q_BHD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_BP: Tensor,
    lengths_B: Tensor,
    out_BHD: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None,
    max_length: int,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    workspace: Tensor | None = None,
    tuned: DecodeTuning | None = None,
) -> None:
    """One query token per request, at position length - 1, its key and value already in the pool.

    A row of length 0 is padding and becomes zeros. `table_BP` and `lengths_B` are int32; `max_length` bounds the
    lengths. With a window w the query sees positions > length - 1 - w.
    """
    (batch, heads, head_size), kv_heads, value_size = q_BHD.shape, keys.shape[1], values.shape[2]
    assert keys.stride(2) == values.stride(2) == q_BHD.stride(2) == out_BHD.stride(2) == 1
    assert heads % kv_heads == 0 and table_BP.stride(1) == 1
    tuned = tuned or tuning(head_size)
    splits = _splits(max_length, tuned.split)
    rows = batch * heads * splits
    if splits == 1:
        partial, lse = out_BHD, out_BHD
    else:
        if workspace is None:
            workspace = q_BHD.new_empty(rows * (value_size + 1), dtype=torch.float32)
        assert workspace.numel() >= rows * (value_size + 1), "the workspace was made for fewer or shorter rows"
        partial, lse = workspace[: rows * value_size], workspace[rows * value_size :]
    parts = group_parts(heads // kv_heads)
    group = heads // kv_heads // parts
    sizes, sinks = head_sizes(keys, values), q_BHD if sinks_H is None else sinks_H
    _decode_kernel[(kv_heads * parts, batch, splits)](
        q_BHD, keys, values, table_BP, lengths_B, out_BHD, partial, lse, scale * LOG2_E,
        (softcap or 0.0) * LOG2_E, sinks,
        *q_BHD.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *out_BHD.stride()[:2], table_BP.stride(0),
        PARTS=parts, GROUP=group, ROWS=max(16, triton.next_power_of_2(group)), **sizes, PAGE=page_size,
        SPLIT=tuned.split, BLOCK=tuned.block, WINDOW=window or 0, DIRECT=splits == 1, SOFTCAP=softcap is not None,
        SINKS=sinks_H is not None, num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip
    if splits > 1:
        _merge_kernel[(heads, batch)](
            partial, lse, lengths_B, out_BHD, sinks, *out_BHD.stride()[:2], splits,
            VALUE=value_size, VALUE_PAD=sizes["VALUE_PAD"], SPLIT=tuned.split, WINDOW=window or 0, MERGED=MERGED,
            SINKS=sinks_H is not None, num_warps=4,
        )  # fmt: skip


def _splits(max_length: int, split: int) -> int:
    return max(1, -(-max_length // split))


# A table's width varies from step to step: a kernel specialised on its divisibility would be compiled anew in a run.
@triton.jit(do_not_specialize=["table_row"])
def _decode_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    partial: tl.tensor,
    lse: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    sinks: tl.tensor,
    q_row: tl.tensor,
    q_head: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    table_row: tl.tensor,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    KEY: tl.constexpr,
    HEAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    SPLIT: tl.constexpr,
    BLOCK: tl.constexpr,
    WINDOW: tl.constexpr,
    DIRECT: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """One split of one request for GROUP of the heads of one key/value head, which are the rows of its products."""
    part, row, split = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    kv = part // PARTS
    length = tl.load(lengths + row)
    low = tl.maximum(length - WINDOW, 0) if WINDOW else 0
    start = tl.maximum(split * SPLIT, low // BLOCK * BLOCK)
    end = tl.minimum(split * SPLIT + SPLIT, length)
    if (start >= end) & (split > 0):
        return

    member = tl.arange(0, ROWS)
    column = tl.arange(0, HEAD)
    rest = tl.arange(0, REST_PAD)
    head = part * GROUP + member
    real = (member < GROUP)[:, None]
    q_place = row * q_row + head[:, None] * q_head
    q_mask = real if KEY >= HEAD else real & (column < KEY)[None, :]
    q_tile = tl.load(q + q_place + column[None, :], mask=q_mask, other=0.0)
    q_rest = q_tile
    if REST:
        q_rest = tl.load(q + q_place + HEAD + rest[None, :], mask=real & (rest < REST)[None, :], other=0.0)
    keys += kv * key_head
    values += kv * value_head
    top = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    sums = tl.zeros([ROWS, VALUE_PAD], tl.float32)
    pages = table + row * table_row
    position = start + tl.arange(0, BLOCK)
    page = tl.load(pages + position // PAGE, mask=(position >= low) & (position < end), other=0)
    for block in range(start, end, BLOCK):
        position = block + tl.arange(0, BLOCK)
        seen = position < end
        if WINDOW:
            seen = seen & (position >= low)
        slot = (page.to(tl.int64) * PAGE + position % PAGE)[:, None]
        # Load the next block's page numbers now, so that its keys need not wait for them.
        page = tl.load(pages + (position + BLOCK) // PAGE, mask=position + BLOCK < end, other=0)
        # What is not seen is loaded as zeros: a weight of zero would not keep out a NaN of a free slot.
        k = load_head(keys + slot * key_slot, seen[:, None], KEY, HEAD, True)
        v = k
        if not VALUES_IN_KEYS:
            v = load_head(values + slot * value_slot, seen[:, None], VALUE, VALUE_PAD, True)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        if REST:
            k_rest = load_head(keys + slot * key_slot + HEAD, seen[:, None], REST, REST_PAD, True)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if SOFTCAP:
            scores = capped(scores, scale, softcap) / scale
        scores = tl.where(seen[None, :], scores, float("-inf"))
        # Every block visited holds a position that is seen, so `new_top` is finite.
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        weights = tl.exp2(scores * scale - new_top[:, None])
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
        top = new_top

    value_column = tl.arange(0, VALUE_PAD)
    value_mask = real if VALUE == VALUE_PAD else real & (value_column < VALUE)[None, :]
    if DIRECT and SINKS:
        sink = tl.load(sinks + head, mask=member < GROUP, other=0.0).to(tl.float32)
        total, sums = add_sink(top, total, sums, sink)
    result = sums / tl.where(total > 0, total, 1.0)[:, None]
    if DIRECT:
        place = row * out_row + head[:, None] * out_head + value_column[None, :]
        tl.store(out + place, result.to(out.dtype.element_ty), mask=value_mask)
    else:
        at = (row * tl.num_programs(0) * GROUP + head) * tl.num_programs(2) + split
        tl.store(partial + at[:, None] * VALUE + value_column[None, :], result, mask=value_mask)
        tl.store(lse + at, top + tl.log2(total), mask=member < GROUP)


@triton.jit(do_not_specialize=["splits"])
def _merge_kernel(
    partial: tl.tensor,
    lse: tl.tensor,
    lengths: tl.tensor,
    out: tl.tensor,
    sinks: tl.tensor,
    out_row: tl.tensor,
    out_head: tl.tensor,
    splits: tl.tensor,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
    MERGED: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """One head of one request: its own splits, MERGED at a time; a single one passes through unchanged."""
    head, row = tl.program_id(0), tl.program_id(1)
    length = tl.load(lengths + row)
    first = tl.maximum(length - WINDOW, 0) // SPLIT if WINDOW else 0
    last = tl.cdiv(length, SPLIT)
    base = (row * tl.num_programs(0) + head) * splits
    column = tl.arange(0, VALUE_PAD)
    top = tl.full([], float("-inf"), tl.float32)
    total = tl.zeros([], tl.float32)
    sums = tl.zeros([VALUE_PAD], tl.float32)
    for some in range(first, last, MERGED):
        split = some + tl.arange(0, MERGED)
        valid = split < last
        weights = tl.load(lse + base + split, mask=valid, other=float("-inf"))
        place = (base + split)[:, None] * VALUE + column[None, :]
        results = tl.load(partial + place, mask=valid[:, None] & (column < VALUE)[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(weights, 0))
        weights = tl.exp2(weights - new_top)
        fade = tl.exp2(top - new_top)
        total = total * fade + tl.sum(weights, 0)
        sums = sums * fade + tl.sum(weights[:, None] * results, 0)
        top = new_top
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * 1.4426950408889634
        new_top = tl.maximum(top, sink)
        fade = tl.exp2(top - new_top)
        total = tl.where(total > 0, total * fade + tl.exp2(sink - new_top), 0.0)
        sums = sums * fade
    result = tl.div_rn(sums, tl.where(total > 0, total, 1.0))
    tl.store(out + row * out_row + head * out_head + column, result.to(out.dtype.element_ty), mask=column < VALUE)
