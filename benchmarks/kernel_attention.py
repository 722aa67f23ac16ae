"""Checks the paged attention kernels against their reference, then times them on this GPU.

    python -m benchmarks.kernel_attention

Takes about a minute, most of it compilation. Every time is the median of replays of a CUDA graph that holds one call,
with the L2 cache cleared before each: milliseconds of one layer. Change the constants to measure other shapes; the
first entry of a sweep is the default of the kernels.

Shapes: B requests, T packed tokens, H query heads, K key/value heads, D head size, P width of the page table, N tiles.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton.testing
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from rally.models.kernels import paged_decode as decode
from rally.models.kernels import paged_extend as extend
from rally.models.kernels import reference
from rally.models.kernels.attention_tiles import extend_tiles

HEADS, KV_HEADS, HEAD_SIZE, PAGE = 12, 2, 128, 16
DTYPE = torch.bfloat16
WINDOW: int | None = None
BATCH, CONTEXTS, RAGGED = 256, (330, 801), 0.3
DECODE_SWEEP = (
    decode.tuning(HEAD_SIZE),  # block, warps, stages, split
    decode.DecodeTuning(64, 4, 2),
    decode.DecodeTuning(64, 8, 3),
    decode.DecodeTuning(32, 2, 3),
    decode.DecodeTuning(32, 4, 3),
    decode.DecodeTuning(32, 4, 4),
    decode.DecodeTuning(128, 4, 2),
    decode.DecodeTuning(128, 8, 2),
    decode.DecodeTuning(64, 4, 3, split=256),
    decode.DecodeTuning(64, 4, 3, split=1024),
)
EXTEND_SWEEP = (
    (128, extend.tuning(HEAD_SIZE, 128)),  # rows of a tile; block, warps, stages
    (128, extend.ExtendTuning(64, 8, 2)),
    (128, extend.ExtendTuning(128, 8, 2)),
    (128, extend.ExtendTuning(32, 8, 3)),
    (64, extend.tuning(HEAD_SIZE, 64)),
    (64, extend.ExtendTuning(64, 4, 2)),
    (64, extend.ExtendTuning(32, 4, 3)),
)
OPTIONS: dict[str, Any] = {"page_size": PAGE, "scale": HEAD_SIZE**-0.5, "window": WINDOW}


@dataclass(frozen=True)
class Chunks:
    """Rows of the same kind: their number, new tokens of each, and cached tokens of each."""

    name: str
    rows: int
    tokens: int
    cached: int

    @property
    def flops(self) -> float:
        seen = self.rows * sum(self.cached + i + 1 for i in range(self.tokens))
        return 4.0 * HEADS * HEAD_SIZE * seen


EXTENDS = (
    Chunks("2 x 64 tokens on 800", 2, 64, 800),
    Chunks("20 x 400 fresh tokens", 20, 400, 0),
    Chunks("1 x 8192 fresh tokens", 1, 8192, 0),
)


@dataclass(frozen=True)
class Work:
    """A randomly filled pool, the pages of every row in random order, and one query for each of `tokens` tokens."""

    keys: Tensor
    values: Tensor
    table_BP: Tensor
    lengths_B: Tensor
    q_THD: Tensor
    out_THD: Tensor

    @property
    def arguments(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.q_THD, self.keys, self.values, self.table_BP


def make_work(lengths: Sequence[int], tokens: int) -> Work:
    torch.manual_seed(0)
    width = -(-max(lengths) // PAGE)
    pages = len(lengths) * width
    pool = (pages * PAGE, KV_HEADS, HEAD_SIZE)
    keys, values = (torch.randn(pool, device="cuda", dtype=DTYPE) for _ in range(2))
    table_BP = torch.randperm(pages, device="cuda").int().view(len(lengths), width)
    q_THD = torch.randn(tokens, HEADS, HEAD_SIZE, device="cuda", dtype=DTYPE)
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device="cuda")
    return Work(keys, values, table_BP, lengths_B, q_THD, torch.full_like(q_THD, float("nan")))


def ragged(context: int) -> list[int]:
    generator = torch.Generator().manual_seed(0)
    spread = (torch.rand(BATCH, generator=generator) * 2 - 1) * RAGGED
    return (context * (1 + spread)).int().tolist()


def make_tiles(chunks: Sequence[tuple[int, int, int, int]], block_m: int) -> Tensor:
    return torch.from_numpy(extend_tiles(chunks, HEADS // KV_HEADS, block_m)).cuda()


def milliseconds(call: Callable[[], Any]) -> float:
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return float(triton.testing.do_bench(graph.replay, warmup=10, rep=60, return_mode="median"))


def compare(name: str, got: Tensor, want: Tensor) -> None:
    error = float((got.float() - want).norm() / want.norm())
    print(f"  {name}: relative error {error:.1e}")
    if not error < 1e-2:
        sys.exit(f"{name} does not compute what its reference says")


def check() -> None:
    """Both kernels on a ragged batch, one row of it padding, with several splits."""
    lengths = [0, 1, 17, 330, 801, 2000]
    work = make_work(lengths, len(lengths))
    settings = OPTIONS | {"max_length": max(lengths)}
    want = torch.zeros_like(work.q_THD, dtype=torch.float32)
    decode.paged_decode(*work.arguments, work.lengths_B, work.out_THD, **settings)
    reference.paged_decode(*work.arguments, work.lengths_B, want, **settings)
    compare("decode", work.out_THD, want)
    chunks = [(row, 100 * row, 100, length) for row, length in enumerate([0, 64, 700, 1900])]
    work = make_work([100, 164, 800, 2000], 400)
    want = torch.zeros_like(work.q_THD, dtype=torch.float32)
    extend.paged_extend(*work.arguments, make_tiles(chunks, extend.BLOCK_M), work.out_THD, **OPTIONS)
    reference.paged_extend(*work.arguments, torch.tensor(chunks), want, block_m=2**20, **OPTIONS)
    compare("extend", work.out_THD, want)


def time_decode(context: int) -> None:
    lengths = ragged(context)
    work = make_work(lengths, BATCH)
    terabytes = sum(lengths) * KV_HEADS * HEAD_SIZE * 2 * DTYPE.itemsize / 1e12
    settings = OPTIONS | {"max_length": max(lengths)}
    print(f"decode, {BATCH} rows of about {context} tokens, {terabytes * 1e6:.0f} MB of keys and values")
    for tuned in DECODE_SWEEP:
        took = milliseconds(
            lambda tuned=tuned: decode.paged_decode(  # type: ignore[misc]
                *work.arguments, work.lengths_B, work.out_THD, tuned=tuned, **settings
            )
        )
        print(f"  {took:.4f} ms  {terabytes / took * 1e3:.2f} TB/s  {tuned}")
    for block_m in (64, 128):
        tiles = make_tiles([(row, row, 1, length - 1) for row, length in enumerate(lengths)], block_m)
        took = milliseconds(
            lambda tiles=tiles, block_m=block_m: extend.paged_extend(  # type: ignore[misc]
                *work.arguments, tiles, work.out_THD, block_m=block_m, **OPTIONS
            )
        )
        print(f"  {took:.4f} ms  {terabytes / took * 1e3:.2f} TB/s  by paged_extend, block_m={block_m}")


def time_extend(kind: Chunks) -> None:
    lengths = [kind.cached + kind.tokens] * kind.rows
    work = make_work(lengths, kind.rows * kind.tokens)
    chunks = [(row, row * kind.tokens, kind.tokens, kind.cached) for row in range(kind.rows)]
    print(f"extend, {kind.name}, {kind.flops / 1e9:.1f} GFLOP")
    for block_m, tuned in EXTEND_SWEEP:
        tiles = make_tiles(chunks, block_m)
        took = milliseconds(
            lambda tiles=tiles, block_m=block_m, tuned=tuned: extend.paged_extend(  # type: ignore[misc]
                *work.arguments, tiles, work.out_THD, block_m=block_m, tuned=tuned, **OPTIONS
            )
        )
        print(f"  {took:.4f} ms  {kind.flops / took / 1e9:.0f} TFLOP/s  block_m={block_m} {tuned}")


def time_varlen(kind: Chunks) -> None:
    """The same work by torch, whose keyword arguments differ between versions."""
    known = inspect.signature(varlen_attn).parameters
    q_THD, k_TKD, v_TKD = (
        torch.randn(kind.rows * kind.tokens, heads, HEAD_SIZE, device="cuda", dtype=DTYPE)
        for heads in (HEADS, KV_HEADS, KV_HEADS)
    )
    causal: dict[str, Any] = {"window_size": (-1, 0)} if "window_size" in known else {"is_causal": True}
    if "enable_gqa" in known:
        causal["enable_gqa"] = True
    else:
        k_TKD, v_TKD = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (k_TKD, v_TKD))
    starts = torch.arange(kind.rows + 1, device="cuda", dtype=torch.int32) * kind.tokens
    took = milliseconds(lambda: varlen_attn(q_THD, k_TKD, v_TKD, starts, starts, kind.tokens, kind.tokens, **causal))
    print(f"torch varlen_attn, {kind.name}\n  {took:.4f} ms  {kind.flops / took / 1e9:.0f} TFLOP/s")


def show_bits() -> None:
    """Whether a token computed alone, as a decode, equals the token of a chunk bit for bit."""
    rows, tokens, cached = 4, 150, 700
    work = make_work([cached + tokens] * rows, rows * tokens)
    chunks = [(row, row * tokens, tokens, cached) for row in range(rows)]
    single = [(row, first + i, 1, position + i) for row, first, _, position in chunks for i in range(tokens)]
    outputs = {}
    for name, cut, block_m in (
        ("chunks, block_m=64", chunks, 64),
        ("single tokens, block_m=64", single, 64),
        ("chunks, block_m=128", chunks, 128),
        ("single tokens, block_m=128", single, 128),
    ):
        outputs[name] = torch.empty_like(work.q_THD)
        extend.paged_extend(*work.arguments, make_tiles(cut, block_m), outputs[name], block_m=block_m, **OPTIONS)
    last = torch.arange(rows, device="cuda") * tokens + tokens - 1
    outputs["paged_decode"] = outputs["chunks, block_m=64"].clone()
    decoded = torch.empty(rows, HEADS, HEAD_SIZE, device="cuda", dtype=DTYPE)
    queries = (work.q_THD[last], *work.arguments[1:])
    decode.paged_decode(*queries, work.lengths_B, decoded, max_length=cached + tokens, **OPTIONS)
    outputs["paged_decode"][last] = decoded
    print("bitwise equal to chunks with block_m=64")
    for name, out in outputs.items():
        print(f"  {torch.equal(out, outputs['chunks, block_m=64'])!s:5}  {name}")


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("these kernels need a CUDA device, and torch finds none here")
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, H={HEADS} K={KV_HEADS} D={HEAD_SIZE} {DTYPE}")
    check()
    show_bits()
    for context in CONTEXTS:
        time_decode(context)
    for kind in EXTENDS:
        time_extend(kind)
    for kind in EXTENDS:
        if not kind.cached:
            time_varlen(kind)


if __name__ == "__main__":
    main()
