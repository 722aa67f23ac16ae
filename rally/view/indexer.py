"""New episode files are in the index within a second of being written, without anybody waiting for it."""

from __future__ import annotations

import logging
import sqlite3
import threading
from contextlib import closing
from typing import Any

from rally.types import RallyError
from rally.view.index import EpisodeFile, Index, list_files

EVERY = 0.5  # seconds between looks at the folder

_log = logging.getLogger(__name__)


class Indexer:
    """A thread that keeps an index in step with its folder."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._spoiled: dict[EpisodeFile, str] = {}
        self._progress: dict[str, Any] = {"revision": 0, "episodes": 0, "bytes": 0, "read": 0, "problems": []}
        with closing(index.connect()) as db:
            self._measure(db, list_files(index.episodes))

    def start(self) -> None:
        assert self._thread is None, "an indexer is started once"
        self._thread = threading.Thread(target=self._follow, name="rally-view-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def progress(self) -> dict[str, Any]:
        """How many episodes there are, how many bytes of how many are read, and what could not be."""
        return dict(self._progress)

    def catch_up(self) -> None:
        """Read all that is there now."""
        with closing(self._index.connect()) as db:
            while self._read_some(db):
                pass

    def _follow(self) -> None:
        try:
            with closing(self._index.connect()) as db:
                while not self._stop.is_set():
                    if not self._read_some(db):
                        self._stop.wait(EVERY)
        except sqlite3.DatabaseError as problem:
            told = f"The index {self._index.path} failed ({problem}); remove that file and start the viewer again."
            self._progress["problems"] = [*self._progress["problems"], told]

    def _read_some(self, db: sqlite3.Connection) -> bool:
        """One piece of the newest file that is not read to its end; whether there may be more to read."""
        files = list_files(self._index.episodes)
        changed = self._index.forget_gone(db, files)
        left = [file for file in self._index.unread(db, files) if file not in self._spoiled]
        if left:
            changed = True
            self._read_piece(db, left[0])
        if changed:
            self._measure(db, files)
        return bool(left)

    def _read_piece(self, db: sqlite3.Connection, file: EpisodeFile) -> None:
        try:
            self._index.read_piece(db, file)
        except FileNotFoundError:
            pass  # set aside by a resumed run since it was listed; the next look forgets it
        except RallyError as problem:
            _log.warning("%s", problem)
            self._spoiled[file] = str(problem)

    def _measure(self, db: sqlite3.Connection, files: list[EpisodeFile]) -> None:
        (episodes,) = db.execute("SELECT count(*) FROM episodes").fetchone()
        (read,) = db.execute("SELECT ifnull(sum(done), 0) FROM files").fetchone()
        self._progress = {
            "revision": self._progress["revision"] + 1,
            "episodes": episodes,
            "bytes": sum(file.size for file in files),
            "read": read,
            "problems": list(self._spoiled.values()),
        }
