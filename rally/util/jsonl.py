"""JSON-lines files of training steps: encoding, appending, repairing and following a file that grows.

Every line is an object with an integer `step`. A reader that follows a file reads each line once and leaves a line that
is still being written for the next read.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic_core import to_json

from rally.types import RallyError
from rally.util.atomic_files import names_file, write_atomic

_log = logging.getLogger(__name__)


def json_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """One JSON object a line. A nan raises: callers must have replaced it."""
    encoder = json.JSONEncoder(ensure_ascii=False, allow_nan=False)
    return (encoder.encode(row) + "\n" for row in rows)


def checked_lines(rows: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """The same, three times as fast, for rows that are known to be plain: a nan would become null."""
    return (to_json(row).decode() + "\n" for row in rows)


class StepLines:
    """A JSON-lines file of steps that one process writes."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def append(self, row: Mapping[str, Any]) -> None:
        with names_file(self.path), self.path.open("a", encoding="utf-8", newline="\n") as file:
            file.writelines(json_lines([row]))

    def rows(self) -> list[dict[str, Any]]:
        """The finished lines, in order."""
        return StepLinesTail(self.path, strict=True).read()

    def replace(self, rows: Iterable[Mapping[str, Any]]) -> None:
        write_atomic(self.path, json_lines(rows))

    def repair(self) -> None:
        """Drop a torn last line, or end one that lost its newline alone. Remove the NUL bytes that a file system leaves
        after a power loss in the place of what was not written yet."""
        if not self.path.exists():
            return
        content = self.path.read_bytes()
        keep = content
        if b"\0" in content:
            whole = (line.strip(b"\0") for line in content.split(b"\n"))
            keep = b"\n".join(line for line in whole if line) + b"\n" * content.endswith(b"\n")
            _log.warning("removed %d NUL bytes of a power loss from %s", len(content) - len(keep), self.path)
        before, _, torn = keep.rpartition(b"\n")
        if torn and _parse(torn) is not None:
            keep += b"\n"
        elif torn:
            keep = before + b"\n" if before else b""
            _log.warning("dropped the torn last line of %s (%d bytes)", self.path, len(torn))
        if keep != content:
            write_atomic(self.path, keep)


class StepLinesTail:
    """Follows a growing file of steps.

    By default `rows` are all rows read so far, an invalid line is skipped and counted in `bad`, and a file that was
    replaced or truncated is read again from its start. `strict`: the file is only appended to, rows are not kept, and
    an invalid line raises at every read until it is gone.
    """

    def __init__(self, path: Path, *, strict: bool = False) -> None:
        self.path = path
        self.rows: list[dict[str, Any]] = []
        self.bad = 0
        self._strict = strict
        self._inode = 0
        self._offset = 0
        self._lines = 0

    def read(self) -> list[dict[str, Any]]:
        """Read the lines that were finished since the last call, and return their rows."""
        try:
            stat = self.path.stat()
        except FileNotFoundError:
            if not self._strict:
                self._restart(0)
            return []
        if not self._strict and (stat.st_ino != self._inode or stat.st_size < self._offset):
            self._restart(stat.st_ino)
        if stat.st_size <= self._offset:
            return []
        try:
            with self.path.open("rb") as file:
                file.seek(self._offset)
                lines = file.read(stat.st_size - self._offset).split(b"\n")[:-1]
        except OSError:
            if self._strict:
                raise
            self.bad = 1  # a folder, or not readable for this user
            return []
        parsed = [_parse(line) for line in lines]
        if self._strict and None in parsed:
            n = self._lines + parsed.index(None) + 1
            raise RallyError(f"line {n} of {self.path} is not a JSON object with a step; remove that line")
        new = [row for row in parsed if row is not None]
        self._offset += sum(len(line) + 1 for line in lines)
        self._lines += len(lines)
        if not self._strict:
            self.rows += new
        self.bad += len(parsed) - len(new)
        return new

    def _restart(self, inode: int) -> None:
        self.rows, self.bad, self._inode, self._offset, self._lines = [], 0, inode, 0, 0


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return row if isinstance(row, dict) and type(row.get("step")) is int else None
