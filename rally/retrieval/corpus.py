"""Every line of a corpus becomes a passage with `contents`, or one sentence says which line is damaged and how.

A line is a JSON object, either `{"id": ..., "contents": "\\"Title\\"\\ntext"}`, as Search-R1 writes it, or
`{"id": ..., "title": ..., "text": ...}`, whose `contents` are then put together in that shape. Other fields are kept
as they are. Lines of white space are no passages. A name that ends in `.gz` is read through gzip.
"""

from __future__ import annotations

import gzip
import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn, cast

from rally.retrieval.errors import RetrievalError


class Passage(NamedTuple):
    """A line of the corpus as JSON, with `contents`, and what is searched."""

    raw: bytes
    contents: str


def count_passages(path: Path) -> int:
    """How many lines hold something; a progress bar wants to know before the first is read."""
    with _opened(path) as lines:
        return sum(not line.isspace() for line in lines)


def read_passages(path: Path) -> Iterator[Passage]:
    """The passages in order; lines are counted from 1, as editors do."""
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
        row = json.loads(line, parse_constant=_refuse)
    except UnicodeDecodeError:
        raise RetrievalError(f"{where}: this is not UTF-8; write the corpus in UTF-8") from None
    except (ValueError, RecursionError) as error:
        raise RetrievalError(f"{where}: this is not JSON ({error}); write one object a line") from None
    if not isinstance(row, dict):
        raise RetrievalError(f"{where}: a passage must be a JSON object, not {type(row).__name__}")
    if "contents" not in row:
        row["contents"] = _joined(row, where)
    if not isinstance(row["contents"], str) or not row["contents"].strip():
        raise RetrievalError(f"{where}: `contents` must be text that is not empty")
    try:
        return Passage(json.dumps(row, ensure_ascii=False).encode(), row["contents"])
    except UnicodeEncodeError:
        raise RetrievalError(f"{where}: half a surrogate pair is no text; write whole characters") from None


def _joined(row: dict[str, Any], where: str) -> str:
    title, text = row.get("title", ""), row.get("text")
    if not isinstance(text, str) or not isinstance(title, str) or not text.strip():
        raise RetrievalError(f"{where}: a passage needs `contents`, or `title` and `text`, as text that is not empty")
    return f'"{title}"\n{text}'


def _refuse(constant: str) -> NoReturn:
    raise ValueError(f"{constant} is no JSON value")
