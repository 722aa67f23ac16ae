"""New episode files are in the index within a second of being written, without anybody waiting for it."""

from __future__ import annotations

import hashlib
import json
import logging
import os
import re
import sqlite3
import threading
from collections.abc import Iterator
from contextlib import closing, suppress
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from rally.types import RallyError
from rally.util.atomic import atomic_file
from rally.view.episode_rows import COLUMNS, Summary, searched, summarize

NAME = ".view.sqlite"
FORMAT = 1  # PRAGMA user_version; an index of another format is made anew
PIECE = 256  # episodes a transaction
WAIT = 30.0  # seconds for another viewer's transaction

# One for each order of the table, and one that answers by itself what there is to choose from.
_SORTED = (
    "file", "id", "grp", "task", "source", "step", "validate", "ifnull(reward, -9e999)", "stop", "turns", "calls",
    "errors", "sampled", "tokens", "seconds", "step, validate, reward",
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
# Scripts without spaces between words: each character is a word of its own, and a query a phrase of them.
_UNSPACED = re.compile("[\u0e00-\u0eff\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]")


class IndexedFile(NamedTuple):
    """One file of the run as it is now; the writing of it anew changes size or time."""

    name: str
    size: int
    mtime: int

    @property
    def newest_first(self) -> tuple[str, str]:
        kind, _, step = self.name.rpartition("_")
        return step, kind


class EpisodeLocation(NamedTuple):
    """Where the line of an episode is."""

    file: str
    offset: int
    length: int


def spaced(text: str) -> str:
    """`text` with a space around each character that is a word by itself."""
    return _UNSPACED.sub(r" \g<0> ", text)


def list_files(folder: Path) -> list[IndexedFile]:
    """The episode files of a run; a file being written has another name until it is whole."""
    found = []
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(".jsonl") and not entry.name.startswith("."):
                with suppress(FileNotFoundError):  # set aside since the folder was read
                    stat = entry.stat()
                    found.append(IndexedFile(entry.name, stat.st_size, stat.st_mtime_ns))
    return found


def index_path(run: Path) -> Path:
    """In the run folder, or in the user's cache where that cannot be written."""
    if os.access(run, os.W_OK):
        return run / NAME
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rally" / "view"
    try:
        cache.mkdir(parents=True, exist_ok=True)
    except OSError as problem:
        raise RallyError(
            f"neither {run} nor {cache} can be written ({problem.strerror}); set XDG_CACHE_HOME to a folder for indexes"
        ) from None
    return cache / f"{hashlib.sha256(str(run.resolve()).encode()).hexdigest()[:24]}.sqlite"


class Index:
    """The index file of one run. Each thread asks for a connection of its own."""

    def __init__(self, run: Path) -> None:
        self.episodes = run / "episodes"
        self.path = index_path(run)
        self.ensure()

    def ensure(self) -> None:
        """Make it where it is not there or not usable."""
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
        """Another one when somebody removed the file and it was made anew."""
        try:
            return self.path.stat().st_ino
        except FileNotFoundError:
            return None

    def connect(self) -> sqlite3.Connection:
        # Never made by asking: an empty file of that name would be taken for an index.
        address = self.path.absolute().as_uri() + "?mode=rw"
        db = sqlite3.connect(address, uri=True, timeout=WAIT, isolation_level=None)
        db.execute("PRAGMA journal_mode = WAL")
        db.execute("PRAGMA synchronous = OFF")  # derived: what a power cut breaks is made anew
        return db

    def told(self, file: str) -> str:
        """A file's name in words, without where the run lies: exported pages go to others."""
        return f"{self.episodes.parent.name}/{self.episodes.name}/{file}"

    def forget_gone(self, db: sqlite3.Connection, files: list[IndexedFile]) -> bool:
        """Remove what was read from files that are gone or were written anew; whether there was any."""
        now = {file.name: file for file in files}
        known = db.execute("SELECT name, size, mtime FROM files").fetchall()
        stale = [name for name, *stat in known if name not in now or [*now[name][1:]] != stat]
        for name in stale:
            with db:
                db.execute("BEGIN IMMEDIATE")
                # Their words stay behind: row numbers are never given twice, so no search finds a row by them.
                db.execute("DELETE FROM lanes WHERE n IN (SELECT n FROM episodes WHERE file = ?)", (name,))
                db.execute("DELETE FROM episodes WHERE file = ?", (name,))
                db.execute("DELETE FROM files WHERE name = ?", (name,))
        return bool(stale)

    def unread(self, db: sqlite3.Connection, files: list[IndexedFile]) -> list[IndexedFile]:
        """Files with lines that are not in the index, the newest steps first."""
        done = dict(db.execute("SELECT name, done FROM files").fetchall())
        left = [file for file in files if done.get(file.name, -1) < file.size]
        return sorted(left, key=lambda file: file.newest_first, reverse=True)

    def read_piece(self, db: sqlite3.Connection, file: IndexedFile) -> bool:
        """Add the next lines of a file; whether the file is finished."""
        with db:  # commits, or rolls back
            db.execute("BEGIN IMMEDIATE")
            db.execute("INSERT OR IGNORE INTO files VALUES (?, ?, ?, 0)", file)
            (done,) = db.execute("SELECT done FROM files WHERE name = ?", (file.name,)).fetchone()
            for place, line in islice(self._lines(file.name, done), PIECE):
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
        except (ValueError, LookupError, TypeError, AttributeError) as problem:
            raise RallyError(
                f"byte {place.offset} of {self.told(place.file)} is not an episode ({problem!r}); move it away"
            ) from None
        n = db.execute(_INSERT, (*place, *row[: len(COLUMNS)])).lastrowid
        db.execute("INSERT INTO lanes VALUES (?, ?)", (n, row.lanes))
        db.execute("INSERT INTO words(rowid, text) VALUES (?, ?)", (n, text))


EVERY = 0.5  # seconds between looks at the folder

_log = logging.getLogger(__name__)


class Indexer:
    """A thread that keeps an index in step with its folder."""

    def __init__(self, index: Index) -> None:
        self._index = index
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None
        self._spoiled: dict[IndexedFile, str] = {}  # not asked again until they are written anew
        self._unreadable: dict[IndexedFile, str] = {}  # asked again at every look
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

    def _forgive(self, files: list[IndexedFile]) -> None:
        now = set(files)
        for told in (self._spoiled, self._unreadable):
            for file in told.keys() - now:
                del told[file]

    def _read_piece(self, db: sqlite3.Connection, file: IndexedFile) -> bool:
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

    def _measure(self, db: sqlite3.Connection, files: list[IndexedFile]) -> None:
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
