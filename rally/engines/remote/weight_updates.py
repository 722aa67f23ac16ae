"""Transports for weight updates: files, or CUDA IPC handles for a server on the trainer's own GPU.
`weight_deltas` and `weight_broadcast` have further ones.

If a server does not accept handles, files are used from then on, with a warning that says why. Handles are sent over
the servers' own HTTP routes (written from the sources of vLLM 0.26.0 and 0.32.0 and SGLang 0.5.16). vLLM unpickles what
it receives there, which must be enabled when it starts: anyone who can reach its port can then run code in it.
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
from collections.abc import Callable, Mapping, Sequence
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
from rally.util.locks import Lock, hold

FOLDERS = "rally-weights-"
ALIVE = ".alive"  # locked while the folder is in use
SHARED_MEMORY = Path("/dev/shm")
COPIES = 2.2  # of the weights: new ones are written while servers may still read the old ones


class WeightTransport(Protocol):
    """How weights get to servers. `stage` fixes a version, `send` gives it to one server."""

    @property
    def keeps_staged(self) -> bool:
        """Whether the staged version can still be sent after the policy has changed."""
        ...

    @property
    def version(self) -> int | None:
        """The version staged last."""
        ...

    async def stage(self, version: int) -> None:
        """Make the trainer's current weights, version `version`, available to servers."""
        ...

    def expect(self, servers: Sequence[ServerReplica]) -> None:
        """`send` is about to be called for these servers together."""
        ...

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        """Load the staged weights into a server; ReplicaGone or EngineError on failure."""
        ...

    async def folder(self) -> str:
        """A model folder with the staged weights, from which a server can be started."""
        ...

    def fall_back(self, problem: EngineError) -> bool:
        """The server does not have the weights that were sent. Returns whether another way is used from now on, so that
        sending them again may help."""
        ...

    def close(self) -> None:
        """Remove all files."""
        ...


class WeightFiles:
    """A `WeightTransport` by files. `write` writes the policy into a folder, in files of bounded size; the folders are
    made under `parent`."""

    keeps_staged = True

    def __init__(self, write: Callable[[Path], None], parent: Path) -> None:
        self._write = write
        self._root, self._alive = new_weights_folder(parent)
        self.version: int | None = None

    async def stage(self, version: int) -> None:
        await asyncio.to_thread(self._stage, version)

    def _stage(self, version: int) -> None:
        new = self._root / str(version)
        work = self._root / f".writing-{version}"
        shutil.rmtree(work, ignore_errors=True)
        self._write(work)
        shutil.rmtree(new, ignore_errors=True)
        work.rename(new)
        self._staged(version, None if self.version is None else self._root / str(self.version), new)
        self.version = version
        for old in self._root.iterdir():
            if old not in (new, self._root / ALIVE):
                shutil.rmtree(old)

    def expect(self, servers: Sequence[ServerReplica]) -> None:
        """Each server reads files by itself."""

    def _staged(self, version: int, old: Path | None, new: Path) -> None:
        """Called when a version was written to `new`, before `old`, of the version before, is removed."""

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        assert self.version is not None, "no weights were staged yet"
        await server.load(await self.folder(), self.version, in_flight)

    async def folder(self) -> str:
        return str(self._root / str(self.version))

    def fall_back(self, problem: EngineError) -> bool:
        return False

    def close(self) -> None:
        shutil.rmtree(self._root, ignore_errors=True)
        if self._alive is not None:
            self._alive.release()
            self._alive = None


def new_weights_folder(parent: Path) -> tuple[Path, Lock | None]:
    """A new folder for weights in `parent`, and the lock that shows that it is in use."""
    new = Path(tempfile.mkdtemp(prefix=f".{FOLDERS}", dir=parent))  # a name that remove_stale_folders skips
    lock = hold(new / ALIVE)
    return new.rename(parent / new.name[1:]), lock


def choose_weights_folder(size: int, on_disk: Path) -> Path:
    """/dev/shm if a model of `size` bytes fits into it, else the folder `on_disk`, which is created."""
    writable = SHARED_MEMORY.is_dir() and os.access(SHARED_MEMORY, os.W_OK)
    if writable and shutil.disk_usage(SHARED_MEMORY).free > size * COPIES:
        return SHARED_MEMORY
    on_disk.mkdir(parents=True, exist_ok=True)
    return on_disk


def remove_stale_folders(parent: Path) -> None:
    """Remove weight folders that killed programs left in `parent`."""
    for folder in parent.glob(f"{FOLDERS}*"):
        with suppress(FileNotFoundError):  # another run removes it at the same time
            if folder.stat().st_uid != os.getuid() or (lock := hold(folder / ALIVE)) is None:
                continue
            shutil.rmtree(folder, ignore_errors=True)
            lock.release()


_log = logging.getLogger(__name__)


class IpcHandles:
    """CUDA IPC handles of the policy's weights on one GPU. Tied weights are sent once."""

    def __init__(self, weights: Mapping[str, Tensor]) -> None:
        seen: set[int] = set()
        self.weights: dict[str, Tensor] = {}
        for name, weight in weights.items():
            if weight.data_ptr() not in seen:
                seen.add(weight.data_ptr())
                self.weights[name] = weight.detach().contiguous()

    def for_vllm(self) -> dict[str, Any]:
        """The update request of vLLM: names, dtypes and shapes, and the pickled handles."""
        gpu = _gpu(next(iter(self.weights.values())))
        handles = [{gpu: reduce_tensor(weight)[1]} for weight in self.weights.values()]
        return {
            "names": list(self.weights),
            "dtype_names": [str(weight.dtype).removeprefix("torch.") for weight in self.weights.values()],
            "shapes": [list(weight.shape) for weight in self.weights.values()],
            "ipc_handles_pickled": base64.b64encode(pickle.dumps(handles)).decode(),
        }

    def for_sglang(self) -> str:
        """The form of SGLang: pairs of name and tensor, pickled for another process of this machine."""
        buffer = io.BytesIO()
        ForkingPickler(buffer).dump(list(self.weights.items()))
        return base64.b64encode(buffer.getvalue()).decode()


class CudaIpcWeights:
    """A `WeightTransport` by CUDA IPC. `weights` returns the current policy. `files` is used to start servers, and for
    everything once handles have failed."""

    keeps_staged = False

    def __init__(self, weights: Callable[[], Mapping[str, Tensor]], files: WeightFiles) -> None:
        self._weights = weights
        self._files = files
        self.version: int | None = None
        self._works = True

    async def stage(self, version: int) -> None:
        """Copies nothing: the trainer waits until servers have read its memory."""
        self.version = version
        if not self._works:
            await self._files.stage(version)

    def expect(self, servers: Sequence[ServerReplica]) -> None:
        """There is one server."""

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        assert self.version is not None, "no weights were staged yet"
        if not self._works:
            await self._send_files(server, in_flight)
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()  # pending kernels must have written the weights
        try:
            await server.load(IpcHandles(self._weights()), self.version, in_flight)
        except (EngineError, RuntimeError) as problem:  # RuntimeError: memory that torch cannot share
            # At once: handles that it cannot open kill SGLang, and would kill it again.
            self.fall_back(EngineError(str(problem)))
            await self._send_files(server, in_flight)

    async def _send_files(self, server: ServerReplica, in_flight: InFlight) -> None:
        await self.folder()
        await self._files.send(server, in_flight)

    async def folder(self) -> str:
        assert self.version is not None, "no weights were staged yet"
        if self._files.version != self.version:
            await self._files.stage(self.version)
        return await self._files.folder()

    def fall_back(self, problem: EngineError) -> bool:
        """Use files from now on; returns whether that is a change."""
        changed, self._works = self._works, False
        if changed:
            _log.warning("weights are sent to servers as files from now on, because CUDA IPC failed: %s", problem)
        return changed

    def close(self) -> None:
        self._files.close()


def _gpu(weight: Tensor) -> str:
    return str(torch.cuda.get_device_properties(weight.device).uuid)
