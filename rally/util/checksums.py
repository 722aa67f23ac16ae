"""Checksums of the files of a folder: `manifest.json` lists every file with its size and CRC-32, and is written last.

A checksum covers a piece of `PIECE` bytes, so that several threads can compute those of one large file. CRC-32 finds
damage by disks, memory and copying; it is no protection against someone who wants to change a file.

    {"trainer.pt": {"bytes": 41, "crc32": ["8e0c2f11"]}}         a file of one piece
    {"trainer.pt": 41}                                           as older versions of Rally wrote it
"""

from __future__ import annotations

import json
import os
import pickle
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from rally.util.atomic_files import sync, write_atomic
from rally.util.background_threads import available_cores

MANIFEST = "manifest.json"
PIECE = 64 * 2**20
BUFFER = 2**20
"""Bytes that a thread reads at once; they stay in the cache of its core."""
MOST_THREADS = 8
UNREADABLE = (
    *(OSError, ValueError, LookupError, TypeError, AttributeError, RuntimeError, EOFError, AssertionError),
    *(ArithmeticError, MemoryError, pickle.UnpicklingError),
)
"""What the readers of file formats raise for damaged or foreign files. RecursionError, of deeply nested text, is a
RuntimeError."""


class FileRecord(NamedTuple):
    """The size of a file and the checksums of its pieces; None if no checksums were written."""

    size: int
    crc32: tuple[str, ...] | None

    @property
    def as_json(self) -> object:
        return self.size if self.crc32 is None else {"bytes": self.size, "crc32": self.crc32}


Manifest = Mapping[str, FileRecord]


class ManifestError(ValueError):
    """A manifest that is missing or unreadable."""


def seal(folder: Path) -> None:
    """Sync every file of the folder, then write the manifest and sync it. Files get the permissions of the folder:
    safetensors ignores the umask."""
    paths = [path for path in folder.rglob("*") if path.name != MANIFEST or path.parent != folder]
    files = sorted(path for path in paths if path.is_file())
    for file in files:
        if file.stat().st_nlink == 1:  # otherwise it is a user's file, too
            file.chmod(folder.stat().st_mode & 0o666)
    with _threads() as workers:
        synced = [workers.submit(sync, path) for path in paths]  # waits for the disk while others compute
        checksums = checksums_of(files, workers)
        for one in synced:
            one.result()
    records = {_name(folder, file): FileRecord(file.stat().st_size, checksums[file]) for file in files}
    write_manifest(folder, records)
    sync(folder)


def write_manifest(folder: Path, manifest: Manifest) -> None:
    text = json.dumps({name: record.as_json for name, record in manifest.items()}, indent=1)
    write_atomic(folder / MANIFEST, text, synced=True)


def read_manifest(folder: Path) -> Manifest:
    """The manifest of a folder. ManifestError if it is missing or has another form."""
    try:
        listed = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if not isinstance(listed, dict) or not listed:
            raise ValueError("it lists no files")
        return {name: _record(name, entry) for name, entry in listed.items()}
    except (OSError, ValueError, RecursionError) as problem:
        raise ManifestError(f"it has no readable {MANIFEST} ({reason(problem)})") from problem


def _record(name: str, entry: object) -> FileRecord:
    path = PurePosixPath(name)
    if path.is_absolute() or ".." in path.parts:
        raise ValueError(f"{name!r} is outside the folder")
    match entry:
        case bool():
            pass
        case int():
            return FileRecord(entry, None)
        case {"bytes": int(size), "crc32": list(crc32)} if all(isinstance(one, str) for one in crc32):
            return FileRecord(size, tuple(crc32))
    raise ValueError(f"the entry of {name!r} has neither a size nor checksums")


def damage(folder: Path, *, contents: bool = True, only: Callable[[str], bool] = lambda name: True) -> str | None:
    """What is wrong with a folder according to its manifest, or None. `contents` also compares the checksums, which
    reads every file. `only` chooses files by their names."""
    try:
        manifest = {name: record for name, record in read_manifest(folder).items() if only(name)}
    except ManifestError as problem:
        return str(problem)
    try:
        return _wrong_size(folder, manifest) or (_wrong_contents(folder, manifest) if contents else None)
    except OSError as problem:
        return f"{problem.filename or 'a file'} cannot be read ({reason(problem)})"


def weights_damage(folder: Path) -> str | None:
    """What is wrong with the .safetensors files of a model folder, or None. They are compared with the manifest of the
    folder itself or, in a checkpoint, of the folders around it; a model that Rally did not write has none."""
    for sealed in (folder, *folder.resolve().parents[:2]):
        try:
            listed = read_manifest(sealed)
        except ManifestError:
            continue
        below = "" if sealed == folder else f"{folder.resolve().relative_to(sealed).as_posix()}/"
        own = {name for name in listed if name.startswith(below) and name.endswith(".safetensors")}
        if own:
            return damage(sealed, only=own.__contains__)
    return None


def has_checksums(folder: Path) -> bool:
    """Whether every file of a readable manifest has checksums."""
    return all(record.crc32 is not None for record in read_manifest(folder).values())


def _wrong_size(folder: Path, manifest: Manifest) -> str | None:
    for name, record in manifest.items():
        file = folder / name
        if not file.is_file():
            return f"{name} is missing"
        if (size := file.stat().st_size) != record.size:
            return f"{name} has {size} bytes instead of {record.size}"
    return None


def _wrong_contents(folder: Path, manifest: Manifest) -> str | None:
    recorded = {folder / name: record.crc32 for name, record in manifest.items() if record.crc32 is not None}
    with _threads() as workers:
        found = checksums_of(recorded, workers)
    wrong = next((file for file, crc32 in recorded.items() if found[file] != crc32), None)
    return None if wrong is None else f"{_name(folder, wrong)} was changed after it was written: its checksum differs"


def checksums_of(files: Iterable[Path], workers: ThreadPoolExecutor) -> dict[Path, tuple[str, ...]]:
    """The checksums of each file."""
    started = {file: [workers.submit(_crc32, *piece) for piece in _pieces(file)] for file in files}
    return {file: tuple(one.result() for one in running) for file, running in started.items()}


def _pieces(file: Path) -> Iterator[tuple[Path, int]]:
    return ((file, start) for start in range(0, file.stat().st_size, PIECE))


def _crc32(file: Path, start: int) -> str:
    """The checksum of the piece of a file that begins at `start`."""
    value, buffer = 0, memoryview(bytearray(BUFFER))
    descriptor = os.open(file, os.O_RDONLY)
    try:
        at = start
        while at < start + PIECE and (count := os.preadv(descriptor, [buffer[: start + PIECE - at]], at)):
            value = zlib.crc32(buffer[:count], value)
            at += count
    except OSError as error:
        error.filename = error.filename or str(file)
        raise
    finally:
        os.close(descriptor)
    return f"{value:08x}"


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, available_cores()), thread_name_prefix="rally-checksums")


def _name(folder: Path, file: Path) -> str:
    return file.relative_to(folder).as_posix()


def reason(problem: Exception) -> str:
    """An error in a few words, without the name of its file."""
    text = problem.strerror if isinstance(problem, OSError) and problem.strerror else str(problem)
    return (text.strip().splitlines() or [type(problem).__name__])[0].rstrip(".")
