"""Atomic writes: a file or folder has all of its old content or all of its new content, never a part of it.

Content is written under a temporary name in the same folder and then renamed into place. Only what is synced also
survives a power loss; without it a killed process is covered, a killed machine is not.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path


def write_atomic(path: Path, content: str | bytes | Iterable[str], *, synced: bool = False) -> None:
    """Write a text (or its lines) or bytes. A failed write leaves the hidden file `.<name>.part` behind."""
    part = path.with_name(f".{path.name}.part")
    with names_file(path):
        if isinstance(content, bytes):
            part.write_bytes(content)
        else:
            with part.open("w", encoding="utf-8", newline="\n") as file:
                file.writelines([content] if isinstance(content, str) else content)
        if synced:
            sync(part)
    os.replace(part, path)
    if synced:
        sync(path.parent)


@contextmanager
def atomic_file(path: Path) -> Iterator[Path]:
    """A temporary path for the block to write to. It replaces `path` if the block succeeds and is removed if not."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.unlink(missing_ok=True)
    try:
        yield part
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """A temporary folder for the block to fill. It is synced and renamed to `path`, which must not exist, if the block
    succeeds; it is removed if not."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    part.mkdir()
    try:
        yield part
        for file in part.rglob("*"):
            sync(file)
        sync(part)
        part.rename(path)
        sync(path.parent)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def sync(path: Path) -> None:
    """Flush a file or the entries of a folder to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def names_file(path: Path) -> Iterator[None]:
    """Adds the file's name to an operating-system error that lacks it, such as a full disk."""
    try:
        yield
    except OSError as error:
        error.filename = error.filename or str(path)
        raise
