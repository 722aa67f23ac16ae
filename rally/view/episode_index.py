"""The SQLite index over the episode files of a run, and the thread that keeps it up to date.

New files are indexed within a second. The index is derived data: it is rebuilt if it is missing or unusable.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rally.types import RallyError
from rally.util.atomic_files import atomic_file
from rally.util.checksums import UNREADABLE, reason
from rally.util.private_files import cache_folder, private_folder
from rally.view.episode_rows import COLUMNS, Summary, searched, summarize

NAME = ".view.sqlite"
FORMAT = 2  # PRAGMA user_version; an index of another format is rebuilt
CHUNK = 256  # episodes per transaction
WAIT = 30.0  # seconds for another viewer's transaction

# One for each sort order of the table, and covering ones for the facets and rewards of steps and of tasks.
_SORTED = (
    "file", "id", "grp", "task", "source", "step", "validate", "ifnull(reward, -9e999)", "stop", "turns", "calls",
    "errors", "sampled", "tokens", "seconds", "step, validate, baseline, reward",
    "validate, baseline, task, step, score",
)  # fmt: skip
_INDEXES = "\n".join(f"CREATE INDEX sorted_{n} ON episodes({columns});" for n, columns in enumerate(_SORTED))
_SCHEMA = f"""
CREATE TABLE files(name TEXT PRIMARY KEY, size INTEGER, mtime INTEGER, done INTEGER);
CREATE TABLE episodes(
  n INTEGER PRIMARY KEY AUTOINCREMENT, file TEXT, offset INTEGER, length INTEGER, {", ".join(COLUMNS)}
);
CREATE TABLE lanes(n INTEGER PRIMARY KEY, lanes TEXT);
{_INDEXES}
CREATE VIRTUAL TABLE words USING fts5(text, content='', columnsize=0, tokenize="unicode61 remove_diacritics 2");
PRAGMA user_version = {FORMAT};
"""
_INSERT = (
    f"INSERT INTO episodes(file, offset, length, {', '.join(COLUMNS)}) VALUES ({', '.join('?' * (3 + len(COLUMNS)))})"
)
# Scripts without spaces between words: each character is indexed as a word, and a query is a phrase of them.
_UNSPACED = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


class IndexedFile(NamedTuple):
    """One file of the run in its current version; rewriting it changes size or time."""

    name: str
    size: int
    mtime: int

    @property
    def newest_first(self) -> tuple[str, str]:
        kind, _, step = self.name.rpartition("_")
        return step, kind


class EpisodeLocation(NamedTuple):
    """The location of an episode's line."""

    file: str
    offset: int
    length: int


def spaced(text: str) -> str:
    """`text` with a space around each character that is indexed as a word."""
    return _UNSPACED.sub(r" \g<0> ", text)


def list_files(folder: Path) -> list[IndexedFile]:
    """The episode files of a run. A file that is being written has another name until it is complete."""
    files = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".jsonl") and not entry.name.startswith("."):
                with suppress(FileNotFoundError):  # moved aside since the folder was listed
                    stat = entry.stat()
                    files.append(IndexedFile(entry.name, stat.st_size, stat.st_mtime_ns))
    return files


def index_path(run: Path) -> Path:
    """The path of the index: in the run folder, or in the user's cache if that is not writable."""
    if os.access(run, os.W_OK):
        return run / NAME
    cache = cache_folder() / "view"
    try:
        private_folder(cache)
    except OSError as problem:
        raise RallyError(
            f"neither {run} nor {cache} can be written ({problem.strerror}); set XDG_CACHE_HOME to a folder for indexes"
        ) from None
    return cache / f"{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]}.sqlite"


def is_damage(problem: sqlite3.DatabaseError) -> bool:
    """Whether the file is damaged; subclasses mean other things, such as a lock or a full disk."""
    return type(problem) is sqlite3.DatabaseError or "malformed" in str(problem) or "no such table" in str(problem)


class Index:
    """The index file of one run. Each thread opens its own connection."""

    def __init__(self, run: Path) -> None:
        self.episodes = run / "episodes"
        self.path = index_path(run)
        self.ensure()

    def ensure(self) -> None:
        """Create the index if it is missing or unusable."""
        if not self._usable():
            self._make()

    def _make(self) -> None:
        """The file gets its name only once it is complete."""
        for suffix in ("", "-wal", "-shm"):
            self.path.with_name(self.path.name + suffix).unlink(missing_ok=True)
        with atomic_file(self.path) as part, closing(sqlite3.connect(part)) as db:
            db.executescript(_SCHEMA)

    def _usable(self) -> bool:
        try:
            with closing(self.connect()) as db:
                return bool(db.execute("PRAGMA user_version").fetchone()[0] == FORMAT)
        except sqlite3.DatabaseError:
            return False

    def inode(self) -> int | None:
        """The inode of the file, which changes if it is removed and rebuilt."""
        try:
            return self.path.stat().st_ino
        except FileNotFoundError:
            return None

    def connect(self) -> sqlite3.Connection:
        # mode=rw: do not create the file, because an empty one would pass for an index.
        address = self.path.absolute().as_uri() + "?mode=rw"
        db = sqlite3.connect(address, uri=True, timeout=WAIT, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # derived data: it is rebuilt if a power loss damages it
        return db

    @contextmanager
    def opened(self) -> Iterator[sqlite3.Connection]:
        """A connection for a block. A damaged index is built again; RallyError for this time."""
        try:
            with closing(self.connect()) as db:
                yield db
        except sqlite3.DatabaseError as problem:
            if not is_damage(problem):
                raise
            self._make()
            raise RallyError(f"the index {self.path} was damaged and is built again; try again in a second") from None

    def label(self, file: str) -> str:
        """A file's name for messages, without the path of the run: exported pages are shared."""
        return f"{self.episodes.parent.name}/{self.episodes.name}/{file}"

    def forget_gone(self, db: sqlite3.Connection, files: list[IndexedFile]) -> bool:
        """Remove the rows of files that are gone or were rewritten. Returns whether there were any."""
        now = {file.name: file for file in files}
        known = db.execute("SELECT name, size, mtime FROM files").fetchall()
        stale = [name for name, *stat in known if name not in now or [*now[name][1:]] != stat]
        for name in stale:
            with db:
                db.execute("BEGIN IMMEDIATE")
                # Their full-text entries stay: row numbers are never reused, so no search finds a row by them.
                db.execute("DELETE FROM lanes WHERE n IN (SELECT n FROM episodes WHERE file = ?)", (name,))
                db.execute("DELETE FROM episodes WHERE file = ?", (name,))
                db.execute("DELETE FROM files WHERE name = ?", (name,))
        return bool(stale)

    def unread(self, db: sqlite3.Connection, files: list[IndexedFile]) -> list[IndexedFile]:
        """Files with lines that are not indexed yet, newest steps first."""
        done = dict(db.execute("SELECT name, done FROM files").fetchall())
        left = [file for file in files if done.get(file.name, -1) < file.size]
        return sorted(left, key=lambda file: file.newest_first, reverse=True)

    def read_chunk(self, db: sqlite3.Connection, file: IndexedFile) -> bool:
        """Index the next lines of a file. Returns whether the file is complete."""
        with db:  # commits, or rolls back
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT OR IGNORE INTO files VALUES (?, ?, ?, 0)", file)
            (done,) = db.execute("SELECT done FROM files WHERE name = ?", (file.name,)).fetchone()
            for place, line in islice(self._lines(file.name, done), CHUNK):
                self._add(db, place, line)
                done = place.offset + place.length
            db.execute("UPDATE files SET done = ? WHERE name = ?", (done, file.name))
        return bool(done >= file.size)

    def _lines(self, name: str, start: int) -> Iterator[tuple[EpisodeLocation, bytes]]:
        with (self.episodes / name).open("rb") as file:
            file.seek(start)
            for line in file:
                yield EpisodeLocation(name, start, len(line)), line
                start += len(line)

    def _add(self, db: sqlite3.Connection, place: EpisodeLocation, line: bytes) -> None:
        try:
            episode = json.loads(line)
            row: Summary = summarize(episode)
            text = spaced(searched(episode))
        except UNREADABLE as problem:
            why = f"{type(problem).__name__}: {reason(problem)}"
            raise RallyError(
                f"byte {place.offset} of {self.label(place.file)} is not an episode ({why}); move it away"
            ) from None
        n = db.execute(_INSERT, (*place, *row[: len(COLUMNS)])).lastrowid
        db.execute("INSERT INTO lanes VALUES (?, ?)", (n, row.lanes))
        db.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (n, text))


POLL_SECONDS = 0.5

_log = logging.getLogger(__name__)


class Indexer:
    """A thread that keeps an index up to date with its folder."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._invalid: dict[IndexedFile, str] = {}  # not read again until they are rewritten
        self._unreadable: dict[IndexedFile, str] = {}  # retried at every poll
        self._trouble: list[str] = []
        self._progress: dict[str, Any] = {"revision": 0, "episodes": 0, "bytes": 0, "read": 0, "problems": []}
        for _ in range(2):  # the second time with an index that was built again
            try:
                with index.opened() as db:
                    self._measure(db, list_files(index.episodes))
                break
            except RallyError as problem:
                _log.warning("%s", problem)

    def start(self) -> None:
        assert self._thread is None, "an indexer is started once"
        self._thread = threading.Thread(target=self._follow, name="rally-view-index", daemon=True)
        self._thread.start()

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def progress(self) -> dict[str, Any]:
        """The number of episodes, bytes read and bytes in all, and problems."""
        now = self._progress
        return {**now, "problems": [*now["problems"], *self._trouble]}

    def catch_up(self) -> None:
        """Index everything that exists now."""
        for again in (True, False):
            try:
                with self._index.opened() as db:
                    while self._read_some(db):
                        pass
                return
            except RallyError:
                if not again:
                    raise

    def _follow(self) -> None:
        """Follow the folder. Errors of the folder or the index are reported and retried."""
        while not self._stop.is_set():
            try:
                self._index.ensure()
                self._follow_one(self._index.inode())
            except (OSError, RallyError, sqlite3.DatabaseError) as problem:
                self._trouble = [_message(self._index, problem)]
                self._stop.wait(POLL_SECONDS)

    def _follow_one(self, inode: int | None) -> None:
        """Follow the folder until the index file is replaced or removed."""
        with self._index.opened() as db:
            while not self._stop.is_set() and self._index.inode() == inode:
                more = self._read_some(db)
                self._trouble = []
                if not more:
                    self._stop.wait(POLL_SECONDS)

    def _read_some(self, db: sqlite3.Connection) -> bool:
        """Index one chunk of the newest unfinished file. Returns whether there may be more to read."""
        files = list_files(self._index.episodes)
        changed = self._index.forget_gone(db, files)
        self._clear_problems(files)
        left = (file for file in self._index.unread(db, files) if file not in self._invalid)
        read = any(self._read_chunk(db, file) for file in left)
        if changed or read or self._problems() != self._progress["problems"]:
            self._measure(db, files)
        return read

    def _clear_problems(self, files: list[IndexedFile]) -> None:
        now = set(files)
        for problems in (self._invalid, self._unreadable):
            for file in problems.keys() - now:
                del problems[file]

    def _read_chunk(self, db: sqlite3.Connection, file: IndexedFile) -> bool:
        """Whether it could be read."""
        try:
            self._index.read_chunk(db, file)
        except FileNotFoundError:
            return False  # moved aside by a resumed run since it was listed
        except OSError as problem:
            self._unreadable[file] = f"{self._index.label(file.name)} cannot be read ({problem.strerror})"
            return False
        except RallyError as problem:
            _log.warning("%s", problem)
            self._invalid[file] = str(problem)
            return False
        self._unreadable.pop(file, None)
        return True

    def _problems(self) -> list[str]:
        return [*self._invalid.values(), *self._unreadable.values()]

    def _measure(self, db: sqlite3.Connection, files: list[IndexedFile]) -> None:
        """Update the progress. Unreadable files do not count, because the page would otherwise show reading forever."""
        (episodes,) = db.execute("SELECT count(*) FROM episodes").fetchone()
        done = dict(db.execute("SELECT name, done FROM files").fetchall())
        sound = [file for file in files if file not in self._invalid and file not in self._unreadable]
        self._progress = {
            "revision": self._progress["revision"] + 1,
            "episodes": episodes,
            "bytes": sum(file.size for file in sound),
            "read": sum(done.get(file.name, 0) for file in sound),
            "problems": self._problems(),
        }


def _message(index: Index, problem: OSError | RallyError | sqlite3.DatabaseError) -> str:
    if isinstance(problem, RallyError):
        return str(problem)
    if isinstance(problem, sqlite3.DatabaseError):
        return f"The index {index.path} failed ({problem}); if this persists, remove that file and it is rebuilt."
    return f"The run {index.episodes.parent.name} cannot be read ({problem.strerror or problem}); it is retried."
