"""A state becomes the file that `torch.save` makes, checksums included, while a second thread does the writing.

torch alone computes the checksum of a tensor, then writes it, then turns to the next. Here it hands over what is to be
written and goes on. More threads would not help: the file systems of Linux let one at a time write to a file.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    lasting = {tensor.untyped_storage().data_ptr() for tensor in tensors_in(state)}
    with path.open("wb") as file, _Handed(file, lasting) as handed:
        torch.save(state, cast(BinaryIO, handed))


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
    it lies; torch reuses all other as soon as `write` returns, so that is copied."""

    def __init__(self, file: BinaryIO, lasting: set[int]) -> None:
        self._file, self._lasting = file, lasting
        self._given: SimpleQueue[memoryview | bytes | None] = SimpleQueue()

    def __enter__(self) -> _Handed:
        self._writing = started(self._write_all, "rally-state")
        return self

    def __exit__(self, *failure: object) -> None:
        self._given.put(None)
        self._writing.result()

    def write(self, data: memoryview) -> int:
        lasts = len(data) > 0 and np.frombuffer(data, np.uint8).ctypes.data in self._lasting
        self._given.put(data if lasts else bytes(data))
        return len(data)

    def flush(self) -> None:
        """torch asks for it; all is written when this is left."""

    def _write_all(self) -> None:
        while (data := self._given.get()) is not None:
            self._file.write(data)
