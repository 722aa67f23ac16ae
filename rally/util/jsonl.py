"""A growing file of JSON lines is read once: each look takes only what was added, and a file made anew is read anew."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from rally.types import RallyError

_log = logging.getLogger(__name__)


def write_atomic(path: Path, text: str | Iterable[str]) -> None:
    """The file has all of its old content or all of its new content, never a part."""
    part = path.with_name(f".{path.name}.part")
    with _named(path), part.open("w", encoding="utf-8", newline="\n") as file:
        file.writelines([text] if isinstance(text, str) else text)
    os.replace(part, path)


@contextmanager
def _named(path: Path) -> Iterator[None]:
    """A full disk says which file it could not hold."""
    try:
        yield
    except OSError as refusal:
        refusal.filename = refusal.filename or str(path)
        raise


def json_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One JSON object a line; a nan that slipped through is our bug and raises."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
    return (encoder.encode(row) + "\n" for row in rows)


def checked_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The same, three times as fast, for rows that are known to be plain: a nan would become null."""
    return (to_json(row).decode() + "\n" for row in rows)


class StepLines:
    """The lines of one file; each is an object with the number of its `step`."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        with _named(self.path), self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(json_lines([row]))

    def rows(self) -> list[dict[str, Any]]:
        """The finished lines, in order."""
        if not self.path.exists():
            return []
        rows = []
        for n, line in enumerate(self.path.read_bytes().split(b"\n")[:-1], start=1):
            row = _parse(line)
            if row is None:
                raise RallyError(f"line {n} of {self.path} is not a line with a step; remove that line to go on")
            rows.append(row)
        return rows

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        write_atomic(self.path, json_lines(rows))

    def repair(self) -> None:
        """Drop a torn last line, or end one that lost its newline alone."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        whole, _, torn = content.rpartition(b"\n")
        if not torn:
            return
        if _parse(torn) is not None:
            keep = content + b"\n"
        else:
            keep = whole + b"\n" if whole else b""
            _log.warning("dropped the torn last line of %s (%d bytes)", self.path, len(torn))
        write_atomic(self.path, keep.decode())


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) and isinstance(row.get("step"), int) else None


class JsonLinesTail:
    """The objects of a file so far. A line still being written is left for the next look; one that is no object is
    counted in `bad`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.bad = 0
        self._inode = 0
        self._read = 0

    def look(self) -> bool:
        """Take what was added; whether anything changed."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            changed = bool(self.rows)
            self._restart(0)
            return changed
        renewed = stat.st_ino != self._inode or stat.st_size < self._read
        if renewed:
            self._restart(stat.st_ino)
        if stat.st_size == self._read:
            return renewed
        with self.path.open("rb") as file:
            file.seek(self._read)
            whole, newline, _ = file.read(stat.st_size - self._read).rpartition(b"\n")
        self._read += len(whole) + len(newline)
        for line in whole.split(b"\n") if newline else ():
            self._take(line)
        return bool(newline) or renewed

    def _restart(self, inode: int) -> None:
        self.rows, self.bad, self._inode, self._read = [], 0, inode, 0

    def _take(self, line: bytes) -> None:
        try:
            row = json.loads(line)
        except ValueError:
            row = None
        if isinstance(row, dict) and isinstance(row.get("step"), int):
            self.rows.append(row)
        else:
            self.bad += 1
