"""New weights reach every server whole or not at all, under the version that the trainer gave them.

Files are the way that every server knows and every device has, and the one that others are measured against: a folder
in the Hugging Face format, in memory (/dev/shm) where it fits, else on disk, which servers read again. A server that
starts later, or again, starts from it. A faster way on one GPU is in handles.py; NCCL would be another one.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Protocol

from rally.engines.base import EngineError
from rally.engines.remote.client import ServerReplica
from rally.engines.remote.locks import hold
from rally.engines.remote.wire import InFlight

FOLDERS = "rally-weights-"
ALIVE = ".alive"  # locked for as long as the folder is somebody's
SHARED_MEMORY = Path("/dev/shm")
COPIES = 2.2  # the new weights are written while servers may still read the old ones


class WeightTransport(Protocol):
    """How weights get to servers."""

    @property
    def version(self) -> int | None:
        """What was taken last."""
        ...

    async def take(self, version: int) -> None:
        """Hold on to what the trainer has now: version `version`."""
        ...

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        """Let a server sample from what was taken last; ReplicaGone or EngineError where it does not."""
        ...

    async def folder(self) -> str:
        """The model folder that a server may be started from; its weights are those taken last."""
        ...

    def doubt(self, problem: EngineError) -> bool:
        """What was sent did not do. Whether it goes another way from now on, so that sending it again may help."""
        ...

    def close(self) -> None:
        """Leave nothing behind."""
        ...


class WeightFiles:
    """A `WeightTransport` by files. `write` writes the policy into a folder, in files of a bounded size."""

    def __init__(self, write: Callable[[Path], None], room: Path) -> None:
        self._write = write
        new = Path(tempfile.mkdtemp(prefix=f".{FOLDERS}", dir=room))  # under a name that nobody sweeps
        self._alive = hold(new / ALIVE)
        self._root = new.rename(room / new.name[1:])
        self.version: int | None = None

    async def take(self, version: int) -> None:
        await asyncio.to_thread(self._take, version)

    def _take(self, version: int) -> None:
        new = self._root / str(version)
        work = self._root / f".writing-{version}"
        shutil.rmtree(work, ignore_errors=True)
        self._write(work)
        shutil.rmtree(new, ignore_errors=True)
        work.rename(new)
        self.version = version
        for old in self._root.iterdir():
            if old not in (new, self._root / ALIVE):
                shutil.rmtree(old)

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        assert self.version is not None, "nothing was taken yet"
        await server.load(await self.folder(), self.version, in_flight)

    async def folder(self) -> str:
        return str(self._root / str(self.version))

    def doubt(self, problem: EngineError) -> bool:
        return False

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        if self._alive is not None:
            self._alive.release()
            self._alive = None


def roomy(size: int, otherwise: Path) -> Path:
    """Shared memory, if it has room for a model of `size` bytes; else a folder on disk."""
    ours = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if ours and shutil.disk_usage(SHARED_MEMORY).free > size * COPIES:
        return SHARED_MEMORY
    otherwise.mkdir(parents=True, exist_ok=True)
    return otherwise


def sweep(room: Path) -> None:
    """Remove what programs that were killed left there."""
    for folder in room.glob(f"{FOLDERS}*"):
        with suppress(FileNotFoundError):  # another run sweeps too
            if folder.stat().st_uid != os.getuid() or (left := hold(folder / ALIVE)) is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            left.release()
