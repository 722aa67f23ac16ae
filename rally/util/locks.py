"""A lock lasts as long as the program that holds it, in whatever way that ends, and no longer.

It is the kernel's lock on an open file (flock), which a shared disk tells other machines of too. The file is removed
with the lock, so that none pile up; one that a killed program left can be locked again by its user.
"""

from __future__ import annotations

import fcntl
import os
from contextlib import suppress
from pathlib import Path


class Lock:
    """One that is held; made by `hold`."""

    def __init__(self, path: Path, file: int) -> None:
        self._path = path
        self._file = file

    def release(self) -> None:
        with suppress(FileNotFoundError):  # gone with its folder
            self._path.unlink()
        fcntl.flock(self._file, fcntl.LOCK_UN)  # closing is not enough where a forked child has the file open too
        os.close(self._file)


def hold(path: Path) -> Lock | None:
    """The lock, unless somebody else has it. FileNotFoundError where its folder is gone."""
    while True:
        try:
            file = _opened(path)
        except (PermissionError, FileExistsError):
            return None  # not ours to lock, or created this very moment by somebody else
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(path, file):
                return Lock(path, file)
        except OSError:  # somebody has it; or the file system knows no locks, and then nobody can tell
            os.close(file)
            return None
        os.close(file)  # its last holder removed it between our opening and our locking it


def _opened(path: Path) -> int:
    """Opened to be written: NFS wants that for a lock. Created only where it is missing: in a folder like /tmp the
    kernel refuses to create what is another user's."""
    try:
        return os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)


def _is_still(path: Path, file: int) -> bool:
    try:
        found = path.stat()
    except FileNotFoundError:
        return False
    return os.path.samestat(found, os.fstat(file))
