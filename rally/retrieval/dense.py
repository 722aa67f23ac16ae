"""Dense search by the inner product of vectors: exact (flat) or approximate (HNSW).

On the CPU faiss searches a memory-mapped file. On a GPU a flat index is a half-precision matrix in GPU memory, searched
with torch, so that faiss-gpu is not needed. Shapes: N passages, Q queries, K hits, H vector width.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from rally.retrieval.encoder import Encoder
from rally.retrieval.hits import Hit, RetrievalError, best_first, require

Vectors = Literal["flat", "hnsw"]

NEIGHBOURS, BUILD_BREADTH, SEARCH_BREADTH = 32, 128, 128
"""HNSW parameters: links per passage (M), efConstruction and efSearch."""
CHUNK = 1_000_000
"""Rows of the matrix that a GPU scores at once: the scores of 21 million passages and 64 queries would be 2.7 GB."""

Floats = np.ndarray[Any, Any]


class Nearest(NamedTuple):
    """The nearest passages; `numbers_QK` is -1 where there is no K-th one."""

    scores_QK: Floats
    numbers_QK: Floats


def write_vectors(path: Path, chunks: Iterable[Floats], width: int, kind: Vectors) -> None:
    """Build a faiss index from chunks of vectors, and write it."""
    faiss = require("faiss", "faiss-cpu")
    if kind == "flat":
        index = faiss.IndexFlatIP(width)
    else:
        index = faiss.IndexHNSWFlat(width, NEIGHBOURS, faiss.METRIC_INNER_PRODUCT)
        index.hnsw.efConstruction = BUILD_BREADTH
    for chunk_NH in chunks:
        index.add(chunk_NH)
    faiss.write_index(index, str(path))


def import_vectors(file: Path, path: Path, passages: int) -> Vectors:
    """Link or copy an existing faiss file to `path`; returns its kind. RetrievalError if it cannot be used."""
    faiss = require("faiss", "faiss-cpu")
    try:
        index = faiss.read_index(str(file), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
    except RuntimeError as error:
        raise RetrievalError(f"{file} cannot be read as a faiss index ({str(error).splitlines()[0]})") from None
    if index.metric_type != faiss.METRIC_INNER_PRODUCT or not isinstance(index, (faiss.IndexFlat, faiss.IndexHNSW)):
        kind = type(index).__name__
        raise RetrievalError(
            f"{file} is a {kind}; only flat and HNSW indexes by inner product can be used, so build one without it"
        )
    if index.ntotal != passages:
        raise RetrievalError(
            f"{file} has {index.ntotal:,} vectors and the corpus {passages:,} passages; the numbers must be equal"
        )
    try:
        os.link(file.resolve(), path)
    except OSError:  # another disk
        shutil.copyfile(file, path)
    return "flat" if isinstance(index, faiss.IndexFlat) else "hnsw"


class Dense:
    """A `Ranker` over vectors."""

    def __init__(self, path: Path, encoder: Encoder, kind: Vectors, device: str) -> None:
        faiss = require("faiss", "faiss-cpu")
        index = faiss.read_index(str(path), faiss.IO_FLAG_MMAP_IFC | faiss.IO_FLAG_READ_ONLY)
        if index.d != encoder.width:
            raise RetrievalError(
                f"the vectors in {path} have {index.d} dimensions, the encoder's {encoder.width}; build the index again"
            )
        self._encoder = encoder
        on_gpu = kind == "flat" and device != "cpu"
        self._vectors: OnGpu | OnCpu = OnGpu(index, device) if on_gpu else OnCpu(index, kind)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        if not queries:
            return []
        scores_QK, numbers_QK = self._vectors.nearest(self._encoder.queries(queries).vectors, topk)
        return [
            best_first([Hit(int(n), float(s)) for n, s in zip(numbers_K, scores_K, strict=True) if n >= 0])
            for numbers_K, scores_K in zip(numbers_QK, scores_QK, strict=True)
        ]


class OnCpu:
    """Search with faiss."""

    def __init__(self, index: Any, kind: Vectors) -> None:
        self._index = index
        self._kind = kind

    def nearest(self, queries_QH: Floats, topk: int) -> Nearest:
        if self._kind == "flat":
            return Nearest(*self._index.search(queries_QH, topk))
        breadth = require("faiss", "faiss-cpu").SearchParametersHNSW(efSearch=max(SEARCH_BREADTH, topk))
        return Nearest(*self._index.search(queries_QH, topk, params=breadth))


class OnGpu:
    """Search with torch. Scores are half-precision products, so passages with equal scores to three digits may swap."""

    def __init__(self, index: Any, device: str) -> None:
        import torch

        starts = range(0, index.ntotal, CHUNK)
        read = (torch.from_numpy(index.reconstruct_n(n, min(CHUNK, index.ntotal - n))) for n in starts)
        self._chunks = [chunk_NH.to(device, torch.float16) for chunk_NH in read]
        self._device = device

    def nearest(self, queries_QH: Floats, topk: int) -> Nearest:
        import torch

        queries = torch.from_numpy(queries_QH).to(self._device, torch.float16)
        best: list[torch.Tensor] = []
        numbers: list[torch.Tensor] = []
        first = 0
        for chunk_NH in self._chunks:
            top_here = (queries @ chunk_NH.T).topk(min(topk, len(chunk_NH)), dim=1)
            best.append(top_here.values.float())
            numbers.append(top_here.indices + first)
            first += len(chunk_NH)
        scores_QM, numbers_QM = torch.cat(best, dim=1), torch.cat(numbers, dim=1)
        top = scores_QM.topk(min(topk, scores_QM.shape[1]), dim=1)
        return Nearest(top.values.cpu().numpy(), numbers_QM.gather(1, top.indices).cpu().numpy())
