"""A growing file of JSON lines is read once: each look takes only what was added, and a file made anew is read anew."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


class JsonLines:
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
