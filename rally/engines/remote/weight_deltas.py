"""Weights as deltas: a version is the xor of its bytes with those of the version before, compressed with zstd.

At the learning rates of reinforcement learning most weights in half precision keep their bytes, so a delta is a small
part of the model. It restores the new version to the bit. Every piece has a checksum of its base and of its result:
a delta that is applied to other weights than its base, or that is damaged, raises `DeltaError` and changes nothing.

A delta is one file: the frames of the pieces that changed, a JSON header, and the header's length in 8 bytes. xxh3
finds damage and wrong bases; it is no protection against someone who wants to change a file.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shutil
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from rally.engines.base import EngineError, ReplicaBusy, ReplicaGone
from rally.engines.remote.client import ServerReplica
from rally.engines.remote.server_api import InFlight, WeightChain
from rally.engines.remote.weight_updates import WeightFiles, new_weights_folder
from rally.util.background_threads import available_cores

FORMAT = "rally-delta-1"
PIECE = 16 * 2**20
LENGTH_BYTES = 8
MAX_HEADER = 256 * 2**20
LEVEL = 1  # of zstd: higher ones take longer and save nothing on a sparse xor
MOST_THREADS = 8
FULL_EVERY = 10
Bytes = npt.NDArray[np.uint8]

_log = logging.getLogger(__name__)


class DeltaError(EngineError):
    """A delta that cannot be applied: it is damaged, or the weights are not those that it changes."""


class StoredTensor(NamedTuple):
    """A weight as bytes. `dtype` is safetensors' name of it, such as BF16; `file` and `at` are where it was read."""

    dtype: str
    shape: tuple[int, ...]
    data: Bytes
    file: str = ""
    at: int = 0


class DeltaPiece(NamedTuple):
    """Up to PIECE bytes of a weight. `size` bytes at `at` of the file are the compressed xor; 0 if nothing changed."""

    at: int
    size: int
    base: str
    result: str


@dataclass(frozen=True)
class DeltaWeight:
    """One weight of a delta. Its pieces follow each other."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    pieces: tuple[DeltaPiece, ...]


@dataclass(frozen=True)
class WeightDelta:
    """The header of a delta file."""

    path: Path
    base: int
    version: int
    weights: tuple[DeltaWeight, ...]


def stored_tensors(folder: Path, *, mapped: bool = False) -> dict[str, StoredTensor]:
    """The weights of a model folder: copies in memory, or `mapped` from its files, read-only."""
    found: dict[str, StoredTensor] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with file.open("rb") as opened:
            length = int.from_bytes(opened.read(LENGTH_BYTES), "little")
            header = json.loads(opened.read(length))
        header.pop("__metadata__", None)
        for name, entry in header.items():
            start, end = entry["data_offsets"]
            at = LENGTH_BYTES + length + start
            data = _map(file, at, end - start) if mapped else np.fromfile(file, np.uint8, end - start, offset=at)
            if len(data) != end - start:
                raise DeltaError(f"{file} is incomplete; write it again")
            found[name] = StoredTensor(entry["dtype"], tuple(entry["shape"]), data, file.name, at)
    if not found:
        raise DeltaError(f"{folder} holds no .safetensors files; name a model folder")
    return found


def _map(file: Path, at: int, size: int) -> Bytes:
    if not size:
        return np.empty(0, np.uint8)
    return np.memmap(file, np.uint8, "r", at, (size,))


def write_delta(old: Path, new: Path, path: Path, base: int, version: int) -> float:
    """Write the delta from the model folder `old`, of version `base`, to `new`. Returns the share of bytes that
    changed."""
    before, after = stored_tensors(old, mapped=True), stored_tensors(new, mapped=True)
    if _forms(before) != _forms(after):
        raise DeltaError(f"{old} and {new} hold weights of other names, types or shapes; write a full version")
    spans = [(name, start) for name, one in after.items() for start in range(0, len(one.data), PIECE)]

    def difference(span: tuple[str, int]) -> _Difference:
        name, start = span
        return _difference(before[name].data[start : start + PIECE], after[name].data[start : start + PIECE])

    pieces: dict[str, list[DeltaPiece]] = {name: [] for name in after}
    work, changed = path.with_suffix(".writing"), 0
    with work.open("wb") as file, _threads() as workers:
        for (name, _), piece in zip(spans, workers.map(difference, spans), strict=True):
            pieces[name].append(DeltaPiece(file.tell(), len(piece.frame), piece.base, piece.result))
            file.write(piece.frame)
            changed += piece.changed
        weights = [asdict(DeltaWeight(n, one.dtype, one.shape, tuple(pieces[n]))) for n, one in after.items()]
        header = json.dumps({"format": FORMAT, "base": base, "version": version, "weights": weights}).encode()
        file.write(header + len(header).to_bytes(LENGTH_BYTES, "little"))
    work.rename(path)
    return changed / max(1, sum(len(one.data) for one in after.values()))


class _Difference(NamedTuple):
    frame: bytes
    base: str
    result: str
    changed: int


def _difference(old: Bytes, new: Bytes) -> _Difference:
    xor = np.bitwise_xor(old, new)
    changed = int(np.count_nonzero(xor))
    frame = _codec().compress(xor, asbytes=True) if changed else b""
    return _Difference(frame, checksum(old), checksum(new), changed)


def read_delta(path: Path) -> WeightDelta:
    """The header of a delta file; DeltaError if the file is missing or incomplete."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - LENGTH_BYTES))
            length = int.from_bytes(file.read(LENGTH_BYTES), "little")
            if not 0 < length <= min(MAX_HEADER, size - LENGTH_BYTES):
                raise ValueError("it has no header")
            file.seek(size - LENGTH_BYTES - length)
            header = json.loads(file.read(length))
        if header["format"] != FORMAT:
            raise ValueError(f"its format is {header['format']!r}")
        return WeightDelta(path, int(header["base"]), int(header["version"]), tuple(map(_weight, header["weights"])))
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as problem:
        raise DeltaError(f"{path} is no readable delta ({problem}); load the full version") from problem


def _weight(entry: Mapping[str, Any]) -> DeltaWeight:
    pieces = tuple(DeltaPiece(int(at), int(size), str(base), str(result)) for at, size, base, result in entry["pieces"])
    return DeltaWeight(str(entry["name"]), str(entry["dtype"]), tuple(map(int, entry["shape"])), pieces)


def apply_in_place(delta: WeightDelta, tensors: Mapping[str, StoredTensor]) -> None:
    """Turn the bytes of version `delta.base` into those of `delta.version`. After a DeltaError they are neither, and
    the caller must discard them."""
    for weight in delta.weights:
        _check_form(delta, weight, tensors.get(weight.name))
    descriptor = os.open(delta.path, os.O_RDONLY)
    try:
        with _threads() as workers:
            for _ in workers.map(lambda job: _apply_piece(delta, descriptor, *job), _jobs(delta, tensors)):
                pass  # raises what a worker raised
    finally:
        os.close(descriptor)


def _check_form(delta: WeightDelta, weight: DeltaWeight, tensor: StoredTensor | None) -> None:
    if tensor is None:
        raise DeltaError(f"{delta.path} changes {weight.name}, which is missing here; load the full version")
    if (tensor.dtype, tensor.shape) != (weight.dtype, weight.shape):
        here, there = f"{tensor.dtype} {tensor.shape}", f"{weight.dtype} {weight.shape}"
        raise DeltaError(f"{weight.name} is {here} here and {there} in {delta.path}; load the full version")
    if len(weight.pieces) != -(-len(tensor.data) // PIECE):
        raise DeltaError(f"{delta.path} does not cover {weight.name}; load the full version")


def _jobs(delta: WeightDelta, tensors: Mapping[str, StoredTensor]) -> Iterator[tuple[str, DeltaPiece, Bytes]]:
    for weight in delta.weights:
        data = tensors[weight.name].data
        for number, piece in enumerate(weight.pieces):
            yield weight.name, piece, data[number * PIECE : (number + 1) * PIECE]


def _apply_piece(delta: WeightDelta, descriptor: int, name: str, piece: DeltaPiece, data: Bytes) -> None:
    if checksum(data) != piece.base:
        raise DeltaError(
            f"{name} does not have the bytes of version {delta.base}, which {delta.path.name} changes into version "
            f"{delta.version}: its checksum differs; load the full version"
        )
    if piece.size:
        try:
            frame = os.pread(descriptor, piece.size, piece.at)
            xor = _codec().decompress(frame, len(data), asbytes=True)
            np.bitwise_xor(data, np.frombuffer(xor, np.uint8), out=data)
        except (OSError, ValueError) as problem:  # pa.ArrowInvalid is a ValueError
            raise DeltaError(f"{delta.path} is damaged at {name} ({problem}); load the full version") from problem
    if checksum(data) != piece.result:
        raise DeltaError(f"{delta.path} is damaged at {name}: the result's checksum differs; load the full version")


def apply_delta(folder: Path, delta: WeightDelta, into: Path) -> None:
    """Write the model folder `into` from `folder` and a delta. It appears as a whole or not at all."""
    tensors = stored_tensors(folder)
    apply_in_place(delta, tensors)
    work = into.with_name(f".writing-{into.name}")
    shutil.rmtree(work, ignore_errors=True)
    shutil.copytree(folder, work)
    files: dict[str, list[StoredTensor]] = {}
    for tensor in tensors.values():
        files.setdefault(tensor.file, []).append(tensor)
    for name, held in files.items():
        with (work / name).open("r+b") as file:
            for tensor in held:
                file.seek(tensor.at)
                file.write(tensor.data.data)
    work.rename(into)


def checksum(data: Bytes) -> str:
    """xxh3 of 128 bits: 12 GB/s a core where CRC-32 has 1.9 and BLAKE2 0.5."""
    try:
        import xxhash
    except ImportError:
        raise EngineError("weight deltas need xxhash; run: pip install 'rally-rl[servers]'") from None
    return xxhash.xxh3_128_hexdigest(data.data)


def _codec() -> Any:
    """pyarrow's zstd: it is installed anyway, and decompresses 3 times as fast as the package zstandard."""
    return pa.Codec("zstd", compression_level=LEVEL)


def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(min(MOST_THREADS, available_cores()), thread_name_prefix="rally-deltas")


def _forms(tensors: Mapping[str, StoredTensor]) -> dict[str, tuple[str, tuple[int, ...]]]:
    return {name: (tensor.dtype, tensor.shape) for name, tensor in tensors.items()}


class DeltaFiles(WeightFiles):
    """A `WeightTransport` by deltas. The current version is written to `parent`, which only this machine must see, and
    compared there with the version before. Deltas, and a full version every `full_every` versions, go to `shared`. A
    server that has a version for which the deltas still exist loads those alone; any other one, the last full version
    and the deltas since. A server that refuses gets the current version in full, with a warning."""

    def __init__(
        self, write: Callable[[Path], None], parent: Path, shared: Path, *, full_every: int = FULL_EVERY
    ) -> None:
        checksum(np.empty(0, np.uint8))  # raises now if xxhash is missing
        super().__init__(write, parent)
        self._shared, self._shared_alive = new_weights_folder(shared)
        self._full_every = full_every
        self._full: int | None = None  # the version of the last full folder
        self._deltas: list[WeightDelta] = []  # oldest first, each based on the one before
        self._writing = threading.Lock()
        self.changed_share = 0.0  # of the bytes, between the last two versions

    def _staged(self, version: int, old: Path | None, new: Path) -> None:
        if old is not None and self.version is not None:
            path = self._shared / f"delta-{self.version}-{version}.rally"
            self.changed_share = write_delta(old, new, path, self.version, version)
            self._deltas = [*(delta for delta in self._deltas if delta.version < version), read_delta(path)]
        if self._full is None or len(self._chain(self._full)) >= self._full_every:
            self._write_full(version, new)

    def _write_full(self, version: int, source: Path) -> None:
        """Make a full version in the shared folder. Older files are removed, except the delta that leads to it."""
        target, work = self._full_folder(version), self._shared / f".writing-{version}"
        shutil.rmtree(work, ignore_errors=True)
        shutil.copytree(source, work, copy_function=_link_or_copy)
        shutil.rmtree(target, ignore_errors=True)
        work.rename(target)
        before, self._full = self._full, version
        if before is not None:
            shutil.rmtree(self._full_folder(before))
        kept = [delta for delta in self._deltas if delta.version >= version]
        for delta in self._deltas:
            if delta not in kept:
                delta.path.unlink(missing_ok=True)
        self._deltas = kept

    def _full_folder(self, version: int) -> Path:
        return self._shared / f"full-{version}"

    def _chain(self, since: int) -> list[WeightDelta]:
        """The deltas after version `since`; none if it is the current version or if they no longer exist."""
        at = next((n for n, delta in enumerate(self._deltas) if delta.base == since), len(self._deltas))
        return self._deltas[at:]

    def source_for(self, has: int | None) -> WeightChain:
        """What a server with version `has` must load."""
        assert self._full is not None, "no weights were staged yet"
        if has is not None and (chain := self._chain(has)):
            return WeightChain(None, _paths(chain))
        return WeightChain(str(self._full_folder(self._full)), _paths(self._chain(self._full)))

    async def folder(self) -> str:
        """The last full version, which every node sees. A server that starts from it gets the deltas by `send`."""
        assert self._full is not None, "no weights were staged yet"
        return str(self._full_folder(self._full))

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        assert self.version is not None, "no weights were staged yet"
        source = self.source_for(server.version)
        try:
            await server.load(source, self.version, in_flight)
        except (ReplicaGone, ReplicaBusy):
            raise
        except EngineError as problem:
            if not source.deltas:
                raise
            _log.warning(
                "%s gets version %d in full, because it refused deltas: %s", server.name, self.version, problem
            )
            await asyncio.to_thread(self._ensure_full)
            await server.load(WeightChain(str(self._full_folder(self.version)), ()), self.version, in_flight)

    def _ensure_full(self) -> None:
        """Make a full version of the current one. Several servers may need it at once."""
        assert self.version is not None
        with self._writing:
            if self._full != self.version:
                self._write_full(self.version, self._root / str(self.version))

    def close(self) -> None:
        super().close()
        shutil.rmtree(self._shared, ignore_errors=True)
        if self._shared_alive is not None:
            self._shared_alive.release()
            self._shared_alive = None


def _paths(deltas: Iterable[WeightDelta]) -> tuple[str, ...]:
    return tuple(str(delta.path) for delta in deltas)


def _link_or_copy(source: str, target: str) -> str:
    with suppress(OSError):  # another file system
        os.link(source, target)
        return target
    return str(shutil.copyfile(source, target))
