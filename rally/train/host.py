"""What lies on a GPU comes into main memory piece by piece, by many threads, each through pinned memory of its own.

One thread that fills memory which nobody has touched yet waits for its pages, far below what the bus can do; and a bus
that writes to memory that may move goes by a detour.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import NamedTuple

import torch
from torch import Tensor

THREADS = 8
PIECE = 32 * 2**20
"""Bytes that a thread takes at once."""


def threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(THREADS, thread_name_prefix="rally-host")


def as_bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """The same on the CPU, each in memory of its own."""
    made = [
        torch.empty(one.shape, dtype=one.dtype) if _by_pieces(one) else one.detach().to("cpu", copy=True)
        for one in tensors
    ]
    fill([(one, copy) for one, copy in zip(tensors, made, strict=True) if _by_pieces(one)])
    return made


def _by_pieces(tensor: Tensor) -> bool:
    return tensor.device.type == "cuda" and tensor.is_contiguous()


def fill(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    """Write the first of each pair over the second, which is on the CPU; both are contiguous and alike."""
    with threads() as workers:
        for _ in workers.map(_copy, (piece for pair in pairs for piece in _pieces(*pair))):
            pass  # whoever failed is heard of here


class _Piece(NamedTuple):
    source: Tensor
    target: Tensor


def _pieces(source: Tensor, target: Tensor) -> Iterator[_Piece]:
    given, taken = as_bytes(source), as_bytes(target)
    for at in range(0, len(given), PIECE):
        yield _Piece(given[at : at + PIECE], taken[at : at + PIECE])


def _copy(piece: _Piece) -> None:
    piece.target.numpy()[:] = staged(piece.source).numpy()  # torch would start further threads for it


_of_thread = threading.local()


def staged(piece: Tensor) -> Tensor:
    """At most PIECE bytes in main memory, for this thread and until it stages the next."""
    if piece.device.type == "cpu":
        return piece
    with torch.cuda.device(piece.device):  # a new thread is at the first GPU, and would begin to use it
        if not hasattr(_of_thread, "pinned"):
            _of_thread.pinned = torch.empty(PIECE, dtype=torch.uint8, pin_memory=True)
        pinned: Tensor = _of_thread.pinned
        return pinned[: len(piece)].copy_(piece)
