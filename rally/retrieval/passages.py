"""The passages of an index stay on disk, memory-mapped, as the very JSON that an answer carries.

Two files: `passages.jsonl`, one passage a line, and `offsets.npy`, where each begins (and, last, where the file ends).
"""

from __future__ import annotations

import json
import mmap
from array import array
from pathlib import Path
from types import TracebackType

import numpy as np

from rally.retrieval.corpus import Passage
from rally.retrieval.errors import RetrievalError

LINES, OFFSETS = "passages.jsonl", "offsets.npy"


class PassageWriter:
    """Appends passages; the offsets are written when the block ends."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._offsets = array("q", [0])

    def __enter__(self) -> PassageWriter:
        self._file = (self._folder / LINES).open("wb")
        return self

    def add(self, passage: Passage) -> None:
        self._file.write(passage.raw + b"\n")
        self._offsets.append(self._offsets[-1] + len(passage.raw) + 1)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        self._file.close()
        np.save(self._folder / OFFSETS, np.frombuffer(self._offsets, dtype=np.int64))


class Passages:
    """The passages by number, counted from 0. Safe to read from several threads."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        with (folder / LINES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._lines) != int(self._offsets[-1]):
            raise RetrievalError(f"the index {folder} is damaged ({LINES} has another length); build it again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def raw(self, number: int) -> bytes:
        """A passage as JSON."""
        return self._lines[int(self._offsets[number]) : int(self._offsets[number + 1]) - 1]

    def contents(self, number: int) -> str:
        contents: str = json.loads(self.raw(number))["contents"]
        return contents
