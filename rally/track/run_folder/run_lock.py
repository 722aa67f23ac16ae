"""A run folder is written by one process at a time; a second one is told who has it before it changes anything.

The lock is the kernel's, of the process itself (POSIX): however that ends, it ends too, and children do not inherit it.
"""

from __future__ import annotations

import errno
import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rally.types import RallyError

LOCK = ".lock"
_HELD = (errno.EACCES, errno.EAGAIN)  # anything else: a file system without locks, where nobody can tell


class FolderInUse(RallyError):
    """Another process writes to the run folder."""


@contextmanager
def sole_writer(folder: Path) -> Iterator[None]:
    """Be the only process that writes to `folder` while the block lasts."""
    folder.mkdir(parents=True, exist_ok=True)
    with (folder / LOCK).open("a+", encoding="utf-8") as lock:
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno in _HELD:
                lock.seek(0)
                raise FolderInUse(_told(folder, lock.read())) from None
        lock.truncate(0)
        lock.write(f"{os.getpid()} on {os.uname().nodename}")
        lock.flush()
        yield


def _told(folder: Path, holder: str) -> str:
    return (
        f"{folder} is being written by another run (process {holder or 'unknown'}); wait for its end or stop it, or "
        "choose another trainer.experiment_name"
    )
