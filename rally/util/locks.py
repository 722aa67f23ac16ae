"""File locks that the kernel releases when their holder ends, however it ends.

`LockFile` is an open file that can be locked. `hold` locks a temporary file that is removed together with the lock, so
that none pile up; a file left by a killed program can be locked again by its user. flock is visible to other machines
on a shared disk, as is lockf.
"""

from __future__ import annotations

import errno
import fcntl
import os
import time
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Self

POLL_SECONDS = 0.1
_HELD = (errno.EACCES, errno.EAGAIN)


class LockFile:
    """An open file and the lock on it. Closing the file releases the lock.

    By default the lock belongs to the open file (flock): a second LockFile is refused in the same process too, and a
    forked child shares the lock. With `per_process` it belongs to this process (lockf): children do not inherit it, so
    a child that outlives a killed holder does not keep it, but a second LockFile in the same process is not refused.
    """

    def __init__(self, path: Path, *, per_process: bool = False, flags: int = os.O_CREAT, mode: int = 0o666) -> None:
        self._lock = fcntl.lockf if per_process else fcntl.flock
        self._fd = os.open(path, os.O_RDWR | flags, mode)  # writable: lockf and NFS require it

    def acquire(self, timeout: float = 0.0) -> bool:
        """Take the lock, waiting up to `timeout` seconds; False if another holder keeps it. OSError where the file
        system has no locks."""
        deadline = time.monotonic() + timeout
        while True:
            try:
                self._lock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError as error:
                if error.errno not in _HELD:
                    raise
            else:
                return True
            if time.monotonic() >= deadline:
                return False
            time.sleep(POLL_SECONDS)

    def read(self) -> str:
        """The content of the file: what its holder wrote."""
        return os.pread(self._fd, os.fstat(self._fd).st_size, 0).decode("utf-8", "replace")

    def write(self, text: str) -> None:
        """Replace the content of the file, such as with the holder's process id."""
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, text.encode(), 0)

    def is_at(self, path: Path) -> bool:
        """Whether `path` is still this file, and not removed or replaced."""
        try:
            return os.path.samestat(path.stat(), os.fstat(self._fd))
        except FileNotFoundError:
            return False

    def close(self) -> None:
        """Release the lock, if it was taken, and close the file."""
        with suppress(OSError):  # the file system has no locks
            self._lock(self._fd, fcntl.LOCK_UN)  # closing is not enough where a forked child has the file open too
        os.close(self._fd)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class Lock:
    """A lock that is held, on a file that is removed with it; made by `hold`."""

    def __init__(self, path: Path, file: LockFile) -> None:
        self._path = path
        self._file = file

    def release(self) -> None:
        with suppress(FileNotFoundError):  # removed with its folder
            self._path.unlink()
        self._file.close()


def hold(path: Path) -> Lock | None:
    """Create `path` and lock it; None if another program holds it. FileNotFoundError if its folder is missing."""
    while True:
        try:
            file = _open_or_create(path)
        except (PermissionError, FileExistsError):
            return None  # another user's, or created at this moment by another program
        except OSError as error:
            if error.errno == errno.ELOOP:
                return None  # somebody's symbolic link, which may lead anywhere
            raise
        try:
            acquired = file.acquire()
            current = acquired and file.is_at(path)
        except OSError:  # the file system has no locks, so nobody can tell whether it is held
            acquired = current = False
        if current:
            return Lock(path, file)
        file.close()
        if not acquired:
            return None  # otherwise its last holder removed the file before we locked it: try again


def _open_or_create(path: Path) -> LockFile:
    """Creates the file only if it is missing: in a folder like /tmp the kernel refuses O_CREAT on another user's."""
    try:
        return LockFile(path, flags=os.O_NOFOLLOW)
    except FileNotFoundError:
        return LockFile(path, flags=os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode=0o600)
