"""Paged attention for chunks of tokens (prefill). Batch-invariant: chunking does not change a bit of the result.

A program computes one tile: consecutive tokens of one request, for the heads of one key/value head. Blocks of keys
begin at fixed positions of the history, and a block of which a token sees nothing leaves that token's sums unchanged.
So for one `block_m` the result of a token depends only on its own history. It is bitwise the same in a tile of its own
(a decode), in any chunk, and in a packed forward over a pool whose pages are single tokens. It is not bitwise that of
`paged_decode`, which is faster for decodes: that kernel multiplies in other shapes and splits long histories.

The grid follows from shapes and nothing synchronizes, so a CUDA graph can capture the call.

Head sizes need not be powers of two: a key is read as its largest power of two and the rest. Values may be the first
part of the keys (latent attention); they are then read once.

Shapes: T packed tokens, H query heads, K key/value heads, G = H / K, D head size, R rows of the page table, P its
width, N tiles. A pool of keys or values is [slots, K, D]; slot = page * page_size + offset.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import triton
import triton.language as tl
from torch import Tensor

from rally.models.kernels.attention_tiles import BLOCK_M, group_parts

LOG2_E = math.log2(math.e)


class ExtendTuning(NamedTuple):
    """Launch parameters; `block` also determines rounding, so a run uses one value."""

    block: int
    warps: int
    stages: int


def tuning(head_size: int, block_m: int) -> ExtendTuning:
    """One warp per 16 rows, and as many keys as its registers hold. `block`, and with it rounding, follows from both
    arguments."""
    block = 32 if head_size > 128 or block_m <= 64 else 64
    if head_size > 256:  # the sums of a row are spread over more registers
        return ExtendTuning(block, block_m // 8, 2)
    return ExtendTuning(block, block_m // 16, 3 if head_size <= 128 else 2)


def paged_extend(
    q_THD: Tensor,
    keys: Tensor,
    values: Tensor,
    table_RP: Tensor,
    tiles_N4: Tensor,
    out_THD: Tensor,
    *,
    page_size: int,
    scale: float,
    window: int | None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    block_m: int = BLOCK_M,
    tuned: ExtendTuning | None = None,
) -> None:
    """Causal attention of tokens whose own keys and values, and those of their histories, are already in the pool.

    A tile is (row of the table, first token in q, tokens, position of that token in its history), int32, of at most
    `extend_tokens(G, block_m)` tokens; one of 0 tokens is padding. With a window w a token at position p sees
    positions > p - w.
    """
    heads, kv_heads, sizes = q_THD.shape[1], keys.shape[1], head_sizes(keys, values)
    assert keys.stride(2) == values.stride(2) == q_THD.stride(2) == out_THD.stride(2) == 1
    assert heads % kv_heads == 0 and table_RP.stride(1) == 1 and tiles_N4.is_contiguous()
    tuned = tuned or tuning(keys.shape[2], block_m)
    parts = group_parts(heads // kv_heads)
    _extend_kernel[(len(tiles_N4) * kv_heads * parts,)](
        q_THD, keys, values, table_RP, tiles_N4, out_THD, scale * LOG2_E,
        (softcap or 0.0) * LOG2_E, q_THD if sinks_H is None else sinks_H,
        *q_THD.stride()[:2], *keys.stride()[:2], *values.stride()[:2], *out_THD.stride()[:2], table_RP.stride(0),
        HEADS=kv_heads * parts, PARTS=parts, GROUP=heads // kv_heads // parts, **sizes, PAGE=page_size,
        BLOCK_M=block_m, BLOCK_N=tuned.block, WINDOW=window or 0, SOFTCAP=softcap is not None,
        SINKS=sinks_H is not None, num_warps=tuned.warps, num_stages=tuned.stages,
    )  # fmt: skip


def head_sizes(keys: Tensor, values: Tensor) -> dict[str, int | bool]:
    """How a program reads a head: the power of two at the start of a key (HEAD), the rest of it, whose size is padded
    to REST_PAD, and the size of a value, padded to VALUE_PAD. VALUES_IN_KEYS: the value is the first HEAD numbers of
    the key."""
    key, value = keys.shape[2], values.shape[2]
    head = max(16, 1 << (key.bit_length() - 1))
    rest = max(0, key - head)
    return {
        "KEY": key,
        "HEAD": head,
        "REST": rest,
        "REST_PAD": max(16, triton.next_power_of_2(rest)),
        "VALUE": value,
        "VALUE_PAD": max(16, triton.next_power_of_2(value)),
        "VALUES_IN_KEYS": keys.data_ptr() == values.data_ptr() and value == head,
    }


# A table's width varies from step to step: a kernel specialised on its divisibility would be compiled anew in a run.
@triton.jit(do_not_specialize=["table_row"])
def _extend_kernel(
    q: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    table: tl.tensor,
    tiles: tl.tensor,
    out: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    sinks: tl.tensor,
    q_token: tl.tensor,
    q_head: tl.tensor,
    key_slot: tl.tensor,
    key_head: tl.tensor,
    value_slot: tl.tensor,
    value_head: tl.tensor,
    out_token: tl.tensor,
    out_head: tl.tensor,
    table_row: tl.tensor,
    HEADS: tl.constexpr,
    PARTS: tl.constexpr,
    GROUP: tl.constexpr,
    KEY: tl.constexpr,
    HEAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    SOFTCAP: tl.constexpr,
    SINKS: tl.constexpr,
) -> None:
    """One tile for GROUP of the query heads of one key/value head. Row r of its products is token r // GROUP, head
    r % GROUP."""
    tile = tiles + tl.program_id(0) // HEADS * 4
    part = tl.program_id(0) % HEADS
    kv = part // PARTS
    tokens = tl.load(tile + 2)
    if tokens == 0:
        return
    pages = table + tl.load(tile) * table_row
    first = tl.load(tile + 1).to(tl.int64)
    position = tl.load(tile + 3)

    row = tl.arange(0, BLOCK_M)
    column = tl.arange(0, HEAD)
    rest = tl.arange(0, REST_PAD)
    value_column = tl.arange(0, VALUE_PAD)
    token = row // GROUP
    head = part * GROUP + row % GROUP
    real = (token < tokens)[:, None]
    q_place = (first + token)[:, None] * q_token + head[:, None] * q_head
    q_mask = real if KEY >= HEAD else real & (column < KEY)[None, :]
    q_tile = tl.load(q + q_place + column[None, :], mask=q_mask, other=0.0)
    q_rest = q_tile
    if REST:
        q_rest = tl.load(q + q_place + HEAD + rest[None, :], mask=real & (rest < REST)[None, :], other=0.0)
    query = position + token

    # Of the keys in [low, end), those in [inner, outer) are seen by every token and need no mask.
    end = position + tokens
    low = tl.maximum(position - WINDOW + 1, 0) if WINDOW else 0
    start = low // BLOCK_N * BLOCK_N
    inner = tl.maximum(tl.cdiv(end - WINDOW, BLOCK_N) * BLOCK_N, start) if WINDOW else 0
    outer = tl.maximum((position + 1) // BLOCK_N * BLOCK_N, inner)

    top = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, VALUE_PAD], tl.float32)
    place = start + tl.arange(0, BLOCK_N)
    page = tl.load(pages + place // PAGE, mask=(place >= low) & (place < end), other=0)
    keys += kv * key_head
    values += kv * value_head
    if WINDOW:
        page, top, total, sums = _attend(
            page, top, total, sums, q_tile, q_rest, query, keys, values, pages, start, inner, low, end, key_slot,
            value_slot, scale, softcap, KEY=KEY, HEAD=HEAD, REST=REST, REST_PAD=REST_PAD, VALUE=VALUE,
            VALUE_PAD=VALUE_PAD, VALUES_IN_KEYS=VALUES_IN_KEYS, SOFTCAP=SOFTCAP,
            PAGE=PAGE, BLOCK_N=BLOCK_N, WINDOW=WINDOW, MASKED=True,
        )  # fmt: skip
    page, top, total, sums = _attend(
        page, top, total, sums, q_tile, q_rest, query, keys, values, pages, inner, outer, low, end, key_slot,
        value_slot, scale, softcap, KEY=KEY, HEAD=HEAD, REST=REST, REST_PAD=REST_PAD, VALUE=VALUE, VALUE_PAD=VALUE_PAD,
        VALUES_IN_KEYS=VALUES_IN_KEYS, SOFTCAP=SOFTCAP,
        PAGE=PAGE, BLOCK_N=BLOCK_N, WINDOW=WINDOW, MASKED=False,
    )  # fmt: skip
    page, top, total, sums = _attend(
        page, top, total, sums, q_tile, q_rest, query, keys, values, pages, outer, end, low, end, key_slot,
        value_slot, scale, softcap, KEY=KEY, HEAD=HEAD, REST=REST, REST_PAD=REST_PAD, VALUE=VALUE, VALUE_PAD=VALUE_PAD,
        VALUES_IN_KEYS=VALUES_IN_KEYS, SOFTCAP=SOFTCAP,
        PAGE=PAGE, BLOCK_N=BLOCK_N, WINDOW=WINDOW, MASKED=True,
    )  # fmt: skip

    if SINKS:
        total, sums = add_sink(top, total, sums, tl.load(sinks + head).to(tl.float32))
    out_place = (first + token)[:, None] * out_token + head[:, None] * out_head + value_column[None, :]
    out_mask = real if VALUE == VALUE_PAD else real & (value_column < VALUE)[None, :]
    tl.store(out + out_place, (sums / total[:, None]).to(out.dtype.element_ty), mask=out_mask)


@triton.jit
def add_sink(top: tl.tensor, total: tl.tensor, sums: tl.tensor, sink: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """A score per row that takes part in the softmax without a value."""
    sink = sink * 1.4426950408889634
    new_top = tl.maximum(top, sink)
    fade = tl.exp2(top - new_top)
    return total * fade + tl.exp2(sink - new_top), sums * fade[:, None]


@triton.jit
def capped(scores: tl.tensor, scale: tl.tensor, softcap: tl.tensor) -> tl.tensor:
    """softcap * tanh(scores * scale / softcap). `scale` and `softcap` hold the factor log2(e)."""
    doubled = tl.exp2(scores * (scale / softcap) * 2.8853900817779268)
    return softcap * (1.0 - 2.0 / (doubled + 1.0))


@triton.jit
def _attend(
    page: tl.tensor,
    top: tl.tensor,
    total: tl.tensor,
    sums: tl.tensor,
    q_tile: tl.tensor,
    q_rest: tl.tensor,
    query: tl.tensor,
    keys: tl.tensor,
    values: tl.tensor,
    pages: tl.tensor,
    start: tl.tensor,
    stop: tl.tensor,
    low: tl.tensor,
    end: tl.tensor,
    key_slot: tl.tensor,
    value_slot: tl.tensor,
    scale: tl.tensor,
    softcap: tl.tensor,
    KEY: tl.constexpr,
    HEAD: tl.constexpr,
    REST: tl.constexpr,
    REST_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    VALUE_PAD: tl.constexpr,
    VALUES_IN_KEYS: tl.constexpr,
    SOFTCAP: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOW: tl.constexpr,
    MASKED: tl.constexpr,
) -> tuple[tl.tensor, tl.tensor, tl.tensor, tl.tensor]:
    """Add the blocks in [start, stop) to the running softmax: greatest score, sum of weights, weighted values.

    The mask goes on before the scale, so that masked and unmasked blocks round in the same way (`scores * scale - top`
    is one operation in both).
    """
    for block in range(start, stop, BLOCK_N):
        place = block + tl.arange(0, BLOCK_N)
        slot = (page.to(tl.int64) * PAGE + place % PAGE)[:, None]
        # Load the next block's page numbers now, so that its keys need not wait for them.
        page = tl.load(pages + (place + BLOCK_N) // PAGE, mask=place + BLOCK_N < end, other=0)
        # What no token sees is loaded as zeros: a weight of zero would not keep out a NaN of a free slot.
        held = ((place >= low) & (place < end))[:, None]
        k = load_head(keys + slot * key_slot, held, KEY, HEAD, MASKED)
        v = k
        if not VALUES_IN_KEYS:
            v = load_head(values + slot * value_slot, held, VALUE, VALUE_PAD, MASKED)
        scores = tl.dot(q_tile, tl.trans(k), input_precision="ieee")
        if REST:
            k_rest = load_head(keys + slot * key_slot + HEAD, held, REST, REST_PAD, MASKED)
            scores = tl.dot(q_rest, tl.trans(k_rest), scores, input_precision="ieee")
        if SOFTCAP:
            scores = capped(scores, scale, softcap) / scale
        if MASKED:
            seen = place[None, :] <= query[:, None]
            if WINDOW:
                seen = seen & (place[None, :] > query[:, None] - WINDOW)
            scores = tl.where(seen, scores, float("-inf"))
        new_top = tl.maximum(top, tl.max(scores, 1) * scale)
        # A row that has seen nothing yet, which a window allows, subtracts 0: infinity minus infinity would be NaN.
        shift = tl.where(new_top == float("-inf"), 0.0, new_top) if WINDOW else new_top
        weights = tl.exp2(scores * scale - shift[:, None])
        fade = tl.exp2(top - shift)
        total = total * fade + tl.sum(weights, 1)
        sums = tl.dot(weights.to(v.dtype), v, sums * fade[:, None], input_precision="ieee")
        top = new_top
    return page, top, total, sums


@triton.jit
def load_head(
    pointers: tl.tensor, held: tl.tensor, SIZE: tl.constexpr, PADDED: tl.constexpr, MASKED: tl.constexpr
) -> tl.tensor:
    """SIZE numbers of each row, zeros up to PADDED. With MASKED, rows that are not `held` are zeros."""
    column = tl.arange(0, PADDED)[None, :]
    if SIZE < PADDED:
        if MASKED:
            return tl.load(pointers + column, mask=held & (column < SIZE), other=0.0)
        return tl.load(pointers + column, mask=column < SIZE, other=0.0)
    if MASKED:
        return tl.load(pointers + column, mask=held, other=0.0)
    return tl.load(pointers + column)
