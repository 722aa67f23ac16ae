"""The paged attention kernels equal their reference, and the reference equals a dense softmax.

Kernel tests run on a CUDA device if there is one. `test_kernels_interpreter.py` runs the same tests on the CPU, in its
own process because triton decides at import how it runs kernels.

Shapes: B requests, t tokens of one request, H query heads, K key/value heads, G = H / K, D head size, L history.
"""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from kernel_cases import INTERPRETED
from torch import Tensor

from rally.models.kernels import reference
from rally.models.kernels.attention_tiles import BLOCK_M

DEVICE = torch.device("cpu" if INTERPRETED or not torch.cuda.is_available() else "cuda")
PAGE = 16
KV_HEADS = 2
NO_PAGE = 2**31 - 1
NAN = float("nan")


@dataclass(frozen=True)
class Case:
    group: int
    head_size: int
    window: int | None
    dtype: torch.dtype = torch.bfloat16
    value_size: int | None = None  # None: as the keys
    values_in_keys: bool = False
    softcap: float | None = None
    sinks: bool = False

    def __str__(self) -> str:
        variant = [f"V{self.value_size}" if self.value_size else "", "latent" if self.values_in_keys else ""]
        variant += [f"cap{self.softcap}" if self.softcap else "", "sinks" if self.sinks else ""]
        kind = str(self.dtype).removeprefix("torch.")
        return "-".join(filter(None, [f"G{self.group}-D{self.head_size}-w{self.window}", *variant, kind]))

    @property
    def values(self) -> int:
        return self.value_size or self.head_size

    @property
    def sinks_H(self) -> Tensor | None:
        return torch.linspace(-1, 3, KV_HEADS * self.group, device=DEVICE) if self.sinks else None


CASES = [
    Case(1, 64, None, torch.float16),
    Case(4, 128, 100, torch.float16),
    Case(6, 128, None),
    Case(7, 64, 5),
    Case(7, 256, None),
    Case(4, 256, 33),
    Case(6, 64, 600),
    Case(4, 80, None),
    Case(2, 96, 33),
    Case(2, 24, None),
    Case(4, 192, None, value_size=128),
    Case(24, 32, None),
    Case(32, 576, None, value_size=512, values_in_keys=True),
    Case(4, 80, 40, value_size=64, values_in_keys=True),
    Case(8, 64, 100, sinks=True),
    Case(2, 128, None, softcap=2.0, sinks=True),
    Case(2, 256, 50, softcap=5.0),
]
LENGTHS = [197, 0, 20] if DEVICE.type == "cpu" else [1, 0, 16, 511, 513, 700, 1025, 8192, 3001]
every_case = pytest.mark.parametrize("case", CASES, ids=str)
on_device = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(),
    reason="no CUDA device; test_kernels_in_the_interpreter runs this on the CPU",
)


@dataclass(frozen=True)
class History:
    """A pool in which only the slots of the given lengths are set, and the same keys and values row by row."""

    keys: Tensor
    values: Tensor
    table: Tensor
    k_LKD: list[Tensor]
    v_LKD: list[Tensor]


def make_history(lengths: list[int], case: Case, page_size: int = PAGE, seed: int = 0) -> History:
    generator = torch.Generator().manual_seed(seed)
    dtype = torch.float32 if DEVICE.type == "cpu" else case.dtype
    counts = [-(-length // page_size) for length in lengths]
    # Page 0 stays free: a kernel that masks a page number but not its key would read it.
    free = torch.randperm(sum(counts) + 2, generator=generator).to(torch.int32) + 1
    shape = ((len(free) + 1) * page_size, KV_HEADS)
    keys = torch.full((*shape, case.head_size), NAN, dtype=dtype)
    values = torch.full((*shape, case.values), NAN, dtype=dtype)
    table = torch.full((len(lengths), max(counts) + 2), NO_PAGE, dtype=torch.int32)
    k_LKD, v_LKD = [], []
    for row, (length, pages) in enumerate(zip(lengths, free.split([*counts, 2]), strict=False)):
        table[row, : counts[row]] = pages
        slots = (pages.long()[:, None] * page_size + torch.arange(page_size)).flatten()[:length]
        for pool, dense in ((keys, k_LKD), (values, v_LKD)):
            pool[slots] = torch.randn(length, *pool.shape[1:], generator=generator).to(dtype)
            dense.append(pool[slots].to(DEVICE))
    keys, values = keys.to(DEVICE), values.to(DEVICE)
    if case.values_in_keys:
        values, v_LKD = keys[..., : case.values], [k[..., : case.values] for k in k_LKD]
    return History(keys, values, table.to(DEVICE), k_LKD, v_LKD)


def make_queries(tokens: int, case: Case, like: Tensor) -> tuple[Tensor, Tensor]:
    """Queries, and an output full of NaN, which shows elements that are not written."""
    generator = torch.Generator().manual_seed(1)
    q_THD = torch.randn(tokens, KV_HEADS * case.group, case.head_size, generator=generator).to(like)
    return q_THD, q_THD.new_full((*q_THD.shape[:2], case.values), NAN)


def options(case: Case, page_size: int = PAGE) -> dict[str, Any]:
    scores = {"scale": case.head_size**-0.5, "window": case.window, "softcap": case.softcap, "sinks_H": case.sinks_H}
    return {"page_size": page_size, **scores}


def make_chunks(lengths: list[int], most: int) -> list[tuple[int, int, int, int]]:
    """The last `most` tokens of every row: (row, first token, tokens, position)."""
    chunks, first = [], 0
    for row, length in enumerate(lengths):
        tokens = min(length, most)
        chunks.append((row, first, tokens, length - tokens))
        first += tokens
    return chunks


def dense(q_tHD: Tensor, k_LKD: Tensor, v_LKD: Tensor, case: Case) -> Tensor:
    """The last t tokens of a history attend to it, by a softmax over all of it in double precision."""
    (t, h, d), length = q_tHD.shape, len(k_LKD)
    k, v = (x.double().repeat_interleave(h // KV_HEADS, 1).transpose(0, 1) for x in (k_LKD, v_LKD))
    scores = q_tHD.double().transpose(0, 1) @ k.transpose(1, 2) * d**-0.5
    if case.softcap:
        scores = (scores / case.softcap).tanh() * case.softcap
    distance = torch.arange(length - t, length)[:, None] - torch.arange(length)
    hidden = (distance < 0) | (distance >= (case.window or length))
    scores = scores.masked_fill(hidden.to(q_tHD.device), float("-inf"))
    if case.sinks_H is not None:
        scores = torch.cat((scores, case.sinks_H.double().view(-1, 1, 1).expand(h, t, 1)), dim=-1)
    return (scores.softmax(-1)[..., :length] @ v).transpose(0, 1)


def error(got: Tensor, want: Tensor) -> float:
    assert got.isfinite().all()
    return float((got.double() - want.double()).norm() / want.double().norm())


def tolerance(dtype: torch.dtype) -> float:
    return 1e-5 if dtype == torch.float32 else 1e-2


@every_case
def test_reference_decode_is_a_dense_softmax(case: Case) -> None:
    made = make_history(LENGTHS, case)
    q, out = make_queries(len(LENGTHS), case, made.keys)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    reference.paged_decode(
        q, made.keys, made.values, made.table, lengths, out, max_length=max(LENGTHS), **options(case)
    )
    for row, length in enumerate(LENGTHS):
        if length == 0:
            assert not out[row].any()
        else:
            want = dense(q[row : row + 1], made.k_LKD[row], made.v_LKD[row], case)
            assert error(out[row : row + 1], want) < tolerance(q.dtype)


@every_case
def test_reference_extend_is_a_dense_softmax(case: Case) -> None:
    made = make_history(LENGTHS, case)
    chunks = make_chunks(LENGTHS, most=16)
    q, out = make_queries(sum(tokens for _, _, tokens, _ in chunks), case, made.keys)
    tiles = torch.tensor([*chunks, (0, 0, 0, 0)], dtype=torch.int32)
    reference.paged_extend(q, made.keys, made.values, made.table, tiles, out, block_m=2**20, **options(case))
    for row, first, tokens, _ in chunks:
        part = slice(first, first + tokens)
        if tokens:
            want = dense(q[part], made.k_LKD[row], made.v_LKD[row], case)
            assert error(out[part], want) < tolerance(q.dtype)


def decode(made: History, q: Tensor, out: Tensor, lengths: list[int], max_length: int, case: Case) -> Tensor:
    """The kernel, in a workspace full of NaN; in the interpreter with small splits, so that short rows have several."""
    from rally.models.kernels.paged_decode import DecodeTuning, paged_decode

    tuned = DecodeTuning(block=32, warps=4, stages=2, split=64) if INTERPRETED else None
    lengths_B = torch.tensor(lengths, dtype=torch.int32, device=DEVICE)
    settings = options(case) | {"max_length": max_length, "tuned": tuned}
    settings["workspace"] = torch.full((2 * q.numel() * (max_length // 64 + 1),), NAN, device=DEVICE)
    paged_decode(q, made.keys, made.values, made.table, lengths_B, out, **settings)
    return out


@pytest.mark.gpu
@on_device
@every_case
def test_decode_kernel_is_its_reference(case: Case) -> None:
    made = make_history(LENGTHS, case)
    q, out = make_queries(len(LENGTHS), case, made.keys)
    want = torch.zeros_like(out, dtype=torch.float32)
    lengths = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    reference.paged_decode(
        q, made.keys, made.values, made.table, lengths, want, max_length=max(LENGTHS), **options(case)
    )
    decode(made, q, out, LENGTHS, max(LENGTHS) + 100, case)
    assert error(out, want) < tolerance(q.dtype)
    for row, length in enumerate(LENGTHS):
        assert error(out[row], want[row]) < tolerance(q.dtype) if length else not out[row].any()


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("case", [CASES[2], CASES[3]], ids=str)
def test_decode_of_a_row_ignores_its_batch_mates(case: Case) -> None:
    made = make_history(LENGTHS, case)
    q, out = make_queries(len(LENGTHS), case, made.keys)
    decode(made, q, out, LENGTHS, max(LENGTHS), case)
    for row in range(len(LENGTHS)):
        alone = History(made.keys, made.values, made.table[row : row + 1], [], [])
        got = decode(alone, q[row : row + 1], torch.full_like(q[:1], NAN), LENGTHS[row : row + 1], LENGTHS[row], case)
        assert torch.equal(got[0], out[row])


def extend(
    made: History, q: Tensor, out: Tensor, chunks: list[tuple[int, int, int, int]], case: Case, **changed: Any
) -> Tensor:
    """The kernel, with small blocks in the interpreter; tiles of padding at the end, as a captured graph has them."""
    from rally.models.kernels.attention_tiles import extend_tiles
    from rally.models.kernels.paged_extend import ExtendTuning, paged_extend

    tuned = ExtendTuning(block=32, warps=4, stages=2) if INTERPRETED else None
    block_m = changed.pop("block_m", BLOCK_M)
    tiles = torch.from_numpy(extend_tiles(chunks, case.group, block_m))
    tiles = torch.cat([tiles, torch.zeros(2, 4, dtype=torch.int32)]).to(DEVICE)
    paged_extend(
        q, made.keys, made.values, made.table, tiles, out, block_m=block_m, tuned=tuned, **(options(case) | changed)
    )
    return out


@pytest.mark.gpu
@on_device
@every_case
def test_extend_kernel_is_its_reference(case: Case) -> None:
    made = make_history(LENGTHS, case)
    chunks = make_chunks(LENGTHS, most=24 if INTERPRETED else 1000)
    q, out = make_queries(sum(tokens for _, _, tokens, _ in chunks), case, made.keys)
    want = torch.full_like(out, NAN, dtype=torch.float32)
    one_tile_each = torch.tensor(chunks, dtype=torch.int32)
    reference.paged_extend(q, made.keys, made.values, made.table, one_tile_each, want, block_m=2**20, **options(case))
    extend(made, q, out, chunks, case)
    assert error(out, want) < tolerance(q.dtype)
    for _, first, tokens, _ in chunks:
        if tokens:
            assert error(out[first : first + tokens], want[first : first + tokens]) < tolerance(q.dtype)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("case", [CASES[2], CASES[5]], ids=str)
def test_extend_of_a_token_ignores_how_chunks_are_cut(case: Case) -> None:
    """Alone, in a chunk, or packed in a pool with pages of one token: the same bits on a GPU."""
    lengths = [70, 33] if INTERPRETED else [700, 133]
    made = make_history(lengths, case)
    chunks = make_chunks(lengths, most=3 if INTERPRETED else 100)
    q, out = make_queries(sum(tokens for _, _, tokens, _ in chunks), case, made.keys)
    extend(made, q, out, chunks, case, block_m=64)
    single = [(row, first + i, 1, position + i) for row, first, tokens, position in chunks for i in range(tokens)]
    alone = extend(made, q, torch.full_like(q, NAN), single, case, block_m=64)
    starts = torch.tensor([0, lengths[0]], dtype=torch.int32, device=DEVICE)
    packed = History(
        torch.cat(made.k_LKD),
        torch.cat(made.v_LKD),
        starts[:, None] + torch.arange(lengths[0], device=DEVICE).int(),
        [],
        [],
    )
    whole = extend(packed, q, torch.full_like(q, NAN), chunks, case, block_m=64, page_size=1)
    for other in (alone, whole):
        torch.testing.assert_close(other, out, atol=3e-6 if INTERPRETED else 0, rtol=0)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("group", [1, 6, 7])
def test_tiles_hold_every_token_once(group: int) -> None:
    from rally.models.kernels.attention_tiles import extend_tiles, extend_tokens

    chunks = [(3, 0, 300, 17), (0, 300, 1, 0), (5, 301, 0, 9), (1, 301, extend_tokens(group), 4000)]
    tiles = extend_tiles(chunks, group).tolist()
    got = sorted((row, first + i, position + i) for row, first, tokens, position in tiles for i in range(tokens))
    want = sorted((row, first + i, position + i) for row, first, tokens, position in chunks for i in range(tokens))
    assert got == want
    assert all(0 < tokens <= extend_tokens(group) for _, _, tokens, _ in tiles)
    assert [tile[3] for tile in tiles] == sorted((tile[3] for tile in tiles), reverse=True)
    assert extend_tiles([], group).shape == (0, 4)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE.type == "cpu", reason="CUDA graphs need a CUDA device")
def test_a_captured_graph_follows_the_lengths() -> None:
    from rally.models.kernels.paged_decode import paged_decode

    case, longest = CASES[2], [900, 2000, 40]
    made = make_history(longest, case)
    q, out = make_queries(3, case, made.keys)
    lengths = torch.tensor(longest, dtype=torch.int32, device=DEVICE)
    settings = options(case) | {"max_length": 2000}
    paged_decode(q, made.keys, made.values, made.table, lengths, out, **settings)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        paged_decode(q, made.keys, made.values, made.table, lengths, out, **settings)
    lengths.copy_(torch.tensor([600, 0, 17], dtype=torch.int32))
    out.fill_(NAN)
    graph.replay()
    want = torch.zeros_like(out, dtype=torch.float32)
    reference.paged_decode(q, made.keys, made.values, made.table, lengths, want, **settings)
    assert error(out, want) < tolerance(q.dtype)


@pytest.mark.skipif(INTERPRETED, reason="this is the run that it starts")
@pytest.mark.skipif(importlib.util.find_spec("triton") is None, reason="triton is not installed")
def test_kernels_in_the_interpreter() -> None:
    command = [sys.executable, "-m", "pytest", "-q", "--numprocesses=0", "-m", "gpu", "-W", "ignore", __file__]
    environment = os.environ | {"TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-4000:]
