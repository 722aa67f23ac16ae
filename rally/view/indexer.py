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
        self._spoiled: dict[EpisodeFile, str] = {}  # not asked again until they are written anew
        self._unreadable: dict[EpisodeFile, str] = {}  # asked again at every look
        self._trouble: list[str] = []
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
        now = self._progress
        return {**now, "problems": [*now["problems"], *self._trouble]}

    def catch_up(self) -> None:
        """Read all that is there now."""
        with closing(self._index.connect()) as db:
            while self._read_some(db):
                pass

    def _follow(self) -> None:
        """Nothing that happens to the folder or to the index ends it: it says what is wrong and tries again."""
        while not self._stop.is_set():
            try:
                self._index.ensure()
                self._follow_one(self._index.inode())
            except (OSError, sqlite3.DatabaseError) as problem:
                self._trouble = [_told(self._index, problem)]
                self._stop.wait(EVERY)

    def _follow_one(self, inode: int | None) -> None:
        """Until the index is another file: whoever removes it under a running viewer has it made anew."""
        with closing(self._index.connect()) as db:
            while not self._stop.is_set() and self._index.inode() == inode:
                more = self._read_some(db)
                self._trouble = []
                if not more:
                    self._stop.wait(EVERY)

    def _read_some(self, db: sqlite3.Connection) -> bool:
        """One piece of the newest file that is not read to its end; whether there may be more to read."""
        files = list_files(self._index.episodes)
        changed = self._index.forget_gone(db, files)
        self._forgive(files)
        left = (file for file in self._index.unread(db, files) if file not in self._spoiled)
        read = any(self._read_piece(db, file) for file in left)
        if changed or read or self._problems() != self._progress["problems"]:
            self._measure(db, files)
        return read

    def _forgive(self, files: list[EpisodeFile]) -> None:
        now = set(files)
        for told in (self._spoiled, self._unreadable):
            for file in told.keys() - now:
                del told[file]

    def _read_piece(self, db: sqlite3.Connection, file: EpisodeFile) -> bool:
        """Whether it could be read."""
        try:
            self._index.read_piece(db, file)
        except FileNotFoundError:
            return False  # set aside by a resumed run since it was listed; the next look forgets it
        except OSError as problem:
            self._unreadable[file] = f"{self._index.told(file.name)} cannot be read ({problem.strerror})"
            return False
        except RallyError as problem:
            _log.warning("%s", problem)
            self._spoiled[file] = str(problem)
            return False
        self._unreadable.pop(file, None)
        return True

    def _problems(self) -> list[str]:
        return [*self._spoiled.values(), *self._unreadable.values()]

    def _measure(self, db: sqlite3.Connection, files: list[EpisodeFile]) -> None:
        """Files that cannot be read do not count, else the page would say for ever that it is reading."""
        (episodes,) = db.execute("SELECT count(*) FROM episodes").fetchone()
        done = dict(db.execute("SELECT name, done FROM files").fetchall())
        sound = [file for file in files if file not in self._spoiled and file not in self._unreadable]
        self._progress = {
            "revision": self._progress["revision"] + 1,
            "episodes": episodes,
            "bytes": sum(file.size for file in sound),
            "read": sum(done.get(file.name, 0) for file in sound),
            "problems": self._problems(),
        }


def _told(index: Index, problem: OSError | sqlite3.DatabaseError) -> str:
    if isinstance(problem, sqlite3.DatabaseError):
        return f"The index {index.path} failed ({problem}); if it goes on, remove that file and it is made anew."
    return f"The run {index.episodes.parent.name} cannot be read ({problem.strerror or problem}); it is tried again."
