"""Weights reach a server on the trainer's own GPU as handles to the trainer's memory, or, where it does not take them,
by files, and the reason is told.

CUDA IPC over the servers' own HTTP routes, read from vLLM 0.26.0 and 0.32.0 and from SGLang 0.5.16. vLLM unpickles what
it is sent there, which it only does when told at its start: whoever can reach its port can then run code in it.
"""

from __future__ import annotations

import asyncio
import base64
import io
import logging
import os
import pickle
import shutil
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.multiprocessing.reductions import reduce_tensor

from rally.engines.base import EngineError
from rally.engines.remote.client import ServerReplica
from rally.engines.remote.server_api import InFlight
from rally.util.locks import hold

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


_log = logging.getLogger(__name__)


class Handles:
    """The policy's weights by name, on one GPU; each once, also where two names share a memory."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        seen: set[int] = set()
        self.weights: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if weight.data_ptr() not in seen:
                seen.add(weight.data_ptr())
                self.weights[name] = weight.detach().contiguous()

    def described(self) -> dict[str, Any]:
        """As vLLM wants them: what each weight is, and how to open it on this GPU."""
        gpu = _gpu(next(iter(self.weights.values())))
        opened = [{gpu: reduce_tensor(weight)[1]} for weight in self.weights.values()]
        return {
            "names": list(self.weights),
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in self.weights.values()],
            "shapes": [list(weight.shape) for weight in self.weights.values()],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(opened)).decode(),
        }

    def serialized(self) -> str:
        """As SGLang wants them: pairs of name and tensor, pickled as for another process of this machine."""
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(list(self.weights.items()))
        return base64.b64encode(buffer.getvalue()).decode()


class CudaIpcWeights:
    """A `WeightTransport` by handles. `weights` gives the policy as it is; `files` is the way that always works, and
    the only one for a server that starts."""

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]], files: WeightFiles) -> None:
        self._weights = weights
        self._files = files
        self.version: int | None = None
        self._works = True

    async def take(self, version: int) -> None:
        """Nothing is copied: the trainer waits until servers have read its memory."""
        self.version = version
        if not self._works:
            await self._files.take(version)

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        assert self.version is not None, "nothing was taken yet"
        if not self._works:
            await self._send_files(server, in_flight)
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # the server reads what it finds
        try:
            await server.load(Handles(self._weights()), self.version, in_flight)
        except (EngineError, RuntimeError) as problem:  # there is memory that torch cannot share
            self.doubt(EngineError(str(problem)))  # now: SGLang dies of handles it cannot open, and would die again
            await self._send_files(server, in_flight)

    async def _send_files(self, server: ServerReplica, in_flight: InFlight) -> None:
        await self.folder()
        await self._files.send(server, in_flight)

    async def folder(self) -> str:
        assert self.version is not None, "nothing was taken yet"
        if self._files.version != self.version:
            await self._files.take(self.version)
        return await self._files.folder()

    def doubt(self, problem: EngineError) -> bool:
        """Handles did not do: files from now on. Whether that is a change."""
        changed, self._works = self._works, False
        if changed:
            _log.warning("weights go to servers by files from now on; by CUDA IPC they did not arrive: %s", problem)
        return changed

    def close(self) -> None:
        self._files.close()


def _gpu(weight: Tensor) -> str:
    return str(torch.cuda.get_device_properties(weight.device).uuid)
