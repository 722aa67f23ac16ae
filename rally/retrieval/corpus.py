"""Reads a corpus, and stores its passages for an index: memory-mapped, in the JSON form that responses contain.

Two files: `passages.jsonl`, one passage per line, and `offsets.npy`, the offset of each line and of the end.
"""

from __future__ import annotations

import gzip
import json
import mmap
import zlib
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, NamedTuple, NoReturn, cast

import numpy as np

from rally.retrieval.hits import RetrievalError


class Passage(NamedTuple):
    """A line of the corpus as JSON, which always has `contents`, and its contents."""

    raw: bytes
    contents: str


def count_passages(path: Path) -> int:
    """The number of lines that are not blank."""
    with _opened(path) as lines:
        return sum(not line.isspace() for line in lines)


def read_passages(path: Path) -> Iterator[Passage]:
    """The passages in order. Error messages count lines from 1."""
    with _opened(path) as lines:
        for number, line in enumerate(lines, start=1):
            if not line.isspace():
                yield _passage(line, f"{path}, line {number}")


@contextmanager
def _opened(path: Path) -> Iterator[BinaryIO]:
    try:
        with gzip.open(path, "rb") if path.suffix == ".gz" else path.open("rb") as file:
            yield cast(BinaryIO, file)
    except (OSError, EOFError, zlib.error) as error:
        raise RetrievalError(f"the corpus {path} cannot be read ({error})") from None


def _passage(line: bytes, where: str) -> Passage:
    try:
        row = json.loads(line, parse_constant=_reject_constant)
    except UnicodeDecodeError:
        raise RetrievalError(f"{where}: this is not UTF-8; write the corpus in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise RetrievalError(f"{where}: this is not JSON ({error}); write one object a line") from None
    if not isinstance(row, dict):
        raise RetrievalError(f"{where}: a passage must be a JSON object, not {type(row).__name__}")
    if "contents" not in row:
        row["contents"] = _joined(row, where)
    if not isinstance(row["contents"], str) or not row["contents"].strip():
        raise RetrievalError(f"{where}: `contents` must be a non-empty string")
    try:
        return Passage(json.dumps(row, ensure_ascii=False).encode(), row["contents"])
    except UnicodeEncodeError:
        raise RetrievalError(f"{where}: half of a surrogate pair is not valid text; write whole characters") from None


def _joined(row: dict[str, Any], where: str) -> str:
    title, text = row.get("title", ""), row.get("text")
    if not isinstance(text, str) or not isinstance(title, str) or not text.strip():
        raise RetrievalError(f"{where}: a passage needs `contents`, or `title` and `text`, as non-empty strings")
    return f'"{title}"\n{text}'


def _reject_constant(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is not a JSON value")


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
    """The passages by number, from 0. They may be read from several threads."""

    def __init__(self, folder: Path) -> None:
        self._offsets = np.load(folder / OFFSETS, mmap_mode="r")
        with (folder / LINES).open("rb") as file:
            self._lines = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        if len(self._lines) != int(self._offsets[-1]):
            raise RetrievalError(f"the index {folder} is damaged ({LINES} has a wrong length); build it again")

    def __len__(self) -> int:
        return len(self._offsets) - 1

    def raw(self, number: int) -> bytes:
        """A passage as JSON."""
        return self._lines[int(self._offsets[number]) : int(self._offsets[number + 1]) - 1]

    def contents(self, number: int) -> str:
        contents: str = json.loads(self.raw(number))["contents"]
        return contents
