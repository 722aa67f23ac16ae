"""Who may read what a run writes: by default its user alone.

A folder that a run creates has the mode 0700, and its files 0600, whatever the umask is. To share a run with a group,
create its folder first (`mkdir -m 2770 runs/mine`): new files and folders get the permissions of the existing folder.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from rally.types import RallyError

PRIVATE = 0o700


def private_folder(path: Path) -> Path:
    """Create a folder that only its user can enter. An existing one is left as it is."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.mkdir(mode=PRIVATE, exist_ok=True)
    return path


@contextmanager
def permissions_of(folder: Path) -> Iterator[None]:
    """A block whose new files and folders have the permissions of `folder`, also those of libraries and of processes
    that it starts. It changes the umask of the whole process."""
    before = os.umask(0o777 & ~folder.stat().st_mode)
    try:
        yield
    finally:
        os.umask(before)


def own_folder(path: Path, option: str) -> Path:
    """`private_folder`, and RallyError if the folder belongs to another user, who could replace its files. Root may own
    it, who can do so anyway."""
    private_folder(path)
    if any(status.st_uid not in (os.geteuid(), 0) for status in (path.stat(), path.lstat())):
        raise RallyError(f"{path} belongs to another user, who could replace its files; set {option} to another folder")
    return path


def cache_folder() -> Path:
    """The user's folder for data that can be made again."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "rally"
