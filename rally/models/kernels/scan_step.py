"""One token of linear attention for each of many histories, with their states updated in place.

The state of a head is [K, V] in float32. A program computes some columns of one head of one token: it reads that part
of the state once and writes it once, which is all that limits the speed of a decode step. The grid follows from shapes
and nothing synchronizes, so a CUDA graph can capture the call.

Shapes: T tokens, one per history, H heads, K key size, V value size, S rows of states.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK_V = 32


def scan_step(
    q_THK: Tensor,
    k_THK: Tensor,
    v_THV: Tensor,
    g: Tensor,
    beta_TH: Tensor | None,
    states_SHKV: Tensor,
    rows_T: Tensor,
    out_THV: Tensor,
) -> None:
    """`S = exp(g) S + k v^T`, with `beta` `S = a S + beta k (v - (a S)^T k)^T`, a = exp(g); the output is `S^T q`. `g`
    is [T, H] or [T, H, K]. Row `rows_T` of the states is that of the token."""
    tokens, heads, key = q_THK.shape
    value = v_THV.shape[2]
    q, k, v, g = (x.contiguous() for x in (q_THK, k_THK, v_THV, g))
    beta = q if beta_TH is None else beta_TH.contiguous()
    assert states_SHKV.is_contiguous() and out_THV.is_contiguous() and states_SHKV.shape[1:] == (heads, key, value)
    block = min(BLOCK_V, triton.next_power_of_2(value))
    _scan_step_kernel[(tokens * heads, triton.cdiv(value, block))](
        q, k, v, g, beta, states_SHKV, rows_T, out_THV,
        HEADS=heads, KEY=key, KEY_PAD=triton.next_power_of_2(key), VALUE=value, BLOCK=block,
        CHANNELS=g.ndim == 3, DELTA=beta_TH is not None, num_warps=4,
    )  # fmt: skip


@triton.jit
def _scan_step_kernel(
    q: tl.tensor,
    k: tl.tensor,
    v: tl.tensor,
    g: tl.tensor,
    beta: tl.tensor,
    states: tl.tensor,
    rows: tl.tensor,
    out: tl.tensor,
    HEADS: tl.constexpr,
    KEY: tl.constexpr,
    KEY_PAD: tl.constexpr,
    VALUE: tl.constexpr,
    BLOCK: tl.constexpr,
    CHANNELS: tl.constexpr,
    DELTA: tl.constexpr,
) -> None:
    """Columns [BLOCK] of one head of one token."""
    at = tl.program_id(0).to(tl.int64)
    head = at % HEADS
    row = tl.load(rows + at // HEADS).to(tl.int64)
    i = tl.arange(0, KEY_PAD)
    j = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    key_mask, value_mask = i < KEY, j < VALUE
    place = states + (row * HEADS + head) * KEY * VALUE + i[:, None] * VALUE + j[None, :]
    mask = key_mask[:, None] & value_mask[None, :]
    state = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    q_K = tl.load(q + at * KEY + i, mask=key_mask, other=0.0).to(tl.float32)
    k_K = tl.load(k + at * KEY + i, mask=key_mask, other=0.0).to(tl.float32)
    v_V = tl.load(v + at * VALUE + j, mask=value_mask, other=0.0).to(tl.float32)
    if CHANNELS:
        state *= tl.exp(tl.load(g + at * KEY + i, mask=key_mask, other=0.0).to(tl.float32))[:, None]
    else:
        state *= tl.exp(tl.load(g + at).to(tl.float32))
    if DELTA:
        v_V = (v_V - tl.sum(state * k_K[:, None], 0)) * tl.load(beta + at).to(tl.float32)
    state += k_K[:, None] * v_V[None, :]
    tl.store(place, state, mask=mask)
    tl.store(out + at * VALUE + j, tl.sum(state * q_K[:, None], 0), mask=value_mask)
