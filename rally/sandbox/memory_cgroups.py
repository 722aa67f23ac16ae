"""Gives every execution a memory cgroup, where this process may create one: version 1, or a delegated version 2.

The kernel charges a cgroup for all memory of its processes: also for shared pages that no process has mapped any more,
for files on a tmpfs, and for its own structures. The folder of a process is locked while it lives, and one that a
killed process left is removed by the next.
"""

from __future__ import annotations

import asyncio
import errno
import fcntl
import logging
import os
import secrets
import subprocess
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

_log = logging.getLogger(__name__)
_PREFIX = "rally-sandbox-"
_PROCESSES = "cgroup.procs"
_USAGE = "memory.stat"
_EVENTS = {1: "memory.oom_control", 2: "memory.events"}
_TCP_BYTES = 64 << 20
_REMOVE_SECONDS = 5.0  # for the kernel to end the processes of a cgroup


class NoMemoryCgroup(Exception):
    """Memory cgroups cannot be used here; the text says why."""


@dataclass(frozen=True)
class MemoryCgroup:
    """The cgroup of one execution. Its descriptors are sent to the supervisor, which has no access to the folder."""

    folder: Path
    processes: int
    usage: int
    events: int

    @property
    def descriptors(self) -> list[int]:
        return [self.processes, self.usage, self.events]


@dataclass
class MemoryCgroups:
    """The cgroups of the executions of one fork server, in a folder of its own."""

    folder: Path
    version: int
    _lock: int
    _ended: list[Path] = field(default_factory=list)

    @classmethod
    def find(cls) -> MemoryCgroups:
        """A folder in which a child has been created and a process limited; NoMemoryCgroup if there is none."""
        reasons = []
        for parent, version in _candidates():
            _remove_abandoned(parent)
            try:
                return cls._made(parent, version)
            except OSError as error:
                reasons.append(f"{parent}: {error.strerror or error}")
        raise NoMemoryCgroup("; ".join(reasons) or "this machine has no memory cgroup below which one can be created")

    @classmethod
    def _made(cls, parent: Path, version: int) -> MemoryCgroups:
        folder = parent / f"{_PREFIX}{secrets.token_hex(6)}"
        folder.mkdir()
        lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
        cgroups = cls(folder, version, lock)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if version == 2:
                _write(folder / "cgroup.subtree_control", "+memory")
            cgroups._try()
        except OSError:
            cgroups.close()
            raise
        return cgroups

    def _try(self) -> None:
        cgroup = self.create(1 << 30)
        with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as process:
            try:
                os.write(cgroup.processes, str(process.pid).encode())
            finally:
                process.kill()
                process.wait()
                self.release(cgroup)
        self._sweep()

    def create(self, limit: int) -> MemoryCgroup:
        """A cgroup of at most `limit` bytes, without swap."""
        self._sweep()
        folder = self.folder / secrets.token_hex(6)
        folder.mkdir()
        try:
            for name, value, required in _limits(self.version, limit):
                _write(folder / name, str(value), required)
            descriptors = [os.open(folder / _PROCESSES, os.O_WRONLY)]
            descriptors += [os.open(folder / name, os.O_RDONLY) for name in (_USAGE, _EVENTS[self.version])]
        except OSError:
            self._ended.append(folder)
            raise
        return MemoryCgroup(folder, *descriptors)

    def release(self, cgroup: MemoryCgroup) -> None:
        """Remove it at a later call, when its processes have ended."""
        for descriptor in cgroup.descriptors:
            os.close(descriptor)
        self._ended.append(cgroup.folder)

    async def remove(self, cgroup: MemoryCgroup) -> None:
        """Remove it as soon as its processes have ended. Call this after killing the execution."""
        self.release(cgroup)
        deadline = time.monotonic() + _REMOVE_SECONDS
        while not self._sweep() and time.monotonic() < deadline:
            await asyncio.sleep(0.005)

    def close(self) -> None:
        """Remove all. Call this after the fork server has ended."""
        deadline = time.monotonic() + _REMOVE_SECONDS
        self._ended = [path for path in self.folder.iterdir() if path.is_dir()]
        while not self._sweep() and time.monotonic() < deadline:
            time.sleep(0.005)
        with suppress(OSError):  # a process that the kernel cannot end; the next sandbox removes it
            self.folder.rmdir()
        os.close(self._lock)

    def _sweep(self) -> bool:
        """Remove the cgroups of ended executions; returns whether none is left."""
        self._ended = [folder for folder in self._ended if not _removed(folder)]
        return not self._ended


def _limits(version: int, limit: int) -> Iterator[tuple[str, int, bool]]:
    """File, value, and whether the limit does not hold without it."""
    if version == 2:
        yield "memory.max", limit, True
        yield "memory.swap.max", 0, len(Path("/proc/swaps").read_text().splitlines()) > 1
        yield "memory.oom.group", 1, False
    else:
        yield "memory.limit_in_bytes", limit, True
        yield "memory.memsw.limit_in_bytes", limit, False
        yield "memory.kmem.tcp.limit_in_bytes", _TCP_BYTES, False  # not part of the limit above


def _candidates() -> Iterator[tuple[Path, int]]:
    """Folders in which this process might create memory cgroups."""
    own = dict(_own_paths())
    for kind, options, root, mount in _mounts():
        if kind == "cgroup" and "memory" in options and "memory" in own:
            yield _below(mount, root, own["memory"]), 1
        elif kind == "cgroup2" and "" in own:
            folder = _below(mount, root, own[""])
            # A cgroup with processes cannot give controllers to children. Its parent can, if it is delegated to us.
            for parent in (folder, folder.parent):
                with suppress(OSError):
                    if "memory" in (parent / "cgroup.subtree_control").read_text().split():
                        yield parent, 2


def _own_paths() -> Iterator[tuple[str, str]]:
    """Controller and path of the cgroups of this process; version 2 has the controller ''."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            yield controller, path


def _mounts() -> Iterator[tuple[str, list[str], str, str]]:
    """Kind, options, root and folder of all mounted cgroup hierarchies."""
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        fields, (kind, _, options, *_) = before.split(), after.split()
        if kind.startswith("cgroup"):
            yield kind, options.split(","), fields[3], fields[4]


def _below(mount: str, root: str, path: str) -> Path:
    inner = path.removeprefix(root) if root != "/" else path
    return Path(mount) / inner.lstrip("/")


def _remove_abandoned(parent: Path) -> None:
    """Remove the folders of processes that have ended without doing so: their locks are free."""
    for folder in parent.glob(f"{_PREFIX}*"):
        with suppress(OSError):  # it is in use, or of another user
            lock = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for child in folder.iterdir():
                    if child.is_dir():
                        _removed(child)
                _removed(folder)
            finally:
                os.close(lock)


def _removed(folder: Path) -> bool:
    """Remove a cgroup; returns False if it still has processes."""
    try:
        folder.rmdir()
    except FileNotFoundError:
        pass
    except OSError as error:
        if error.errno == errno.EBUSY:
            return False
        _log.warning("the cgroup %s cannot be removed: %s", folder, error.strerror)
    return True


def _write(path: Path, text: str, required: bool = True) -> None:
    try:
        path.write_text(text)
    except OSError:
        if required:
            raise
