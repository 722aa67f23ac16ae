"""A state becomes the file that `torch.save` makes, checksums included, while a second thread computes those.

torch alone computes the checksum of a tensor, then writes it, then turns to the next. Here it hands over what is to be
written and goes on. More threads would not help: the file systems of Linux let one at a time write to a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import wait
from pathlib import Path
from queue import SimpleQueue
from typing import Any, BinaryIO, cast

import numpy as np
import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from rally.train.background import started


def write_state(state: Any, path: Path) -> None:
    """`state` must not change until this returns. What the disk refuses is an OSError, where torch would raise a
    RuntimeError about positions in a file."""
    handed = _Handed({tensor.untyped_storage().data_ptr() for tensor in tensors_in(state)})
    with path.open("wb") as file:
        saving = started(lambda: handed.take(state), "rally-state")
        try:
            while (data := handed.given.get()) is not None:
                file.write(data)
        finally:
            wait([saving])
    saving.result()


def tensors_in(value: Any) -> Iterator[Tensor]:
    """Those of mappings, lists and tuples in it, but for those that are spread over ranks."""
    if isinstance(value, Tensor) and not isinstance(value, DTensor):
        yield value
    elif isinstance(value, Mapping):
        for inner in value.values():
            yield from tensors_in(inner)
    elif isinstance(value, (list, tuple)):
        for inner in value:
            yield from tensors_in(inner)


class _Handed:
    """What torch.save takes for a file. Memory whose address is `lasting` outlives the saving and is written from where
    it lies; torch reuses all other as soon as `write` returns, so that is copied. The last thing given is None."""

    def __init__(self, lasting: set[int]) -> None:
        self._lasting = lasting
        self.given: SimpleQueue[memoryview | bytes | None] = SimpleQueue()

    def take(self, state: Any) -> None:
        try:
            torch.save(state, cast(BinaryIO, self))
        finally:
            self.given.put(None)

    def write(self, data: memoryview) -> int:
        lasts = len(data) > 0 and np.frombuffer(data, np.uint8).ctypes.data in self._lasting
        self.given.put(data if lasts else bytes(data))
        return len(data)

    def flush(self) -> None:
        """torch asks for it; the file is flushed by who writes it."""
