"""The training state of several ranks in a checkpoint: each rank writes its own shards, and any number of ranks reads
them.

Beside `trainer.pt`, which then holds no tensor that is sharded, `trainer_shards/` has one safetensors file of each
rank. The name of a tensor is its kind and its parameter: `masters/NAME`, `exp_avg/NAME`. The file's metadata has the
shape of each whole tensor and where the shard begins in it. Nothing in these files is unpickled.
"""

from __future__ import annotations

import json
import os
import re
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from rally.models.sharding import Ranks
from rally.train.adamw8bit import place_of_state
from rally.train.checkpoint.snapshot import Part, copied, state_part
from rally.train.policy import Policy
from rally.train.rank_messages import GatherState
from rally.util.atomic_files import sync
from rally.util.background_threads import started
from rally.util.checksums import reason

SHARDED = "sharded"  # the key of a state file whose tensors are in shards
MASTERS = "masters"
FILE = re.compile(r"rank_(\d+)_of_(\d+)\.safetensors")
PLACES = "places"
SEEN_SECONDS = 90.0  # a network file system may list new files of other machines a minute late
LOOK_SECONDS = 0.2


def shard_folder(state_file: Path) -> Path:
    return state_file.with_name(f"{state_file.stem}_shards")


def state_parts(file: str, policy: Policy, *, in_place: bool = False, **more: Any) -> list[Part]:
    """The parts of a checkpoint that hold the training state, on rank 0: one file, or with several ranks one without
    the tensors and this rank's shards. `in_place`: states in main memory are not copied, because training waits until
    the parts have been called."""
    state = {**more, **policy.state()}
    if policy.ranks.world_size == 1:
        return [state_part(file, state, in_place=in_place)]
    numbered = state["optimizer"]["state"].items()
    scalars = {number: {k: v for k, v in one.items() if not v.dim()} for number, one in numbered}
    index = {
        **state,
        "optimizer": {**state["optimizer"], "state": scalars},
        MASTERS: {},
        SHARDED: {"ranks": policy.ranks.world_size, "names": list(policy.masters)},
    }
    return [state_part(file, index), shard_part(file, policy, in_place=in_place)]


def shard_part(file: str, policy: Policy, *, in_place: bool = False) -> Part:
    """This rank's shards of the training state, copied now unless `in_place`, and written when the part is called. Of
    equal shards one is written."""
    state, places = policy.state(), policy.layout()
    tensors = {(MASTERS, name): value for name, value in state[MASTERS].items()}
    names = list(policy.masters)
    for number, one in state["optimizer"]["state"].items():
        tensors |= {(kind, names[number]): value for kind, value in one.items() if value.dim()}
    chosen = {key: value for key, value in tensors.items() if value.numel() and places[key[1]].replica == 0}
    shards = {f"{kind}/{name}": value.contiguous() for (kind, name), value in chosen.items()}
    own = copied(shards, in_place=in_place)
    stored_at = {f"{kind}/{name}": place_of_state(kind, places[name]) for kind, name in chosen}
    described = {key: [place.shape, place.offset] for key, place in stored_at.items()}
    ranks = policy.ranks
    rank_file = f"rank_{ranks.rank}_of_{ranks.world_size}.safetensors"

    def write(checkpoint: Path) -> None:
        folder = shard_folder(checkpoint / file)
        folder.mkdir(parents=True, exist_ok=True)
        save_file(own, folder / rank_file, {PLACES: json.dumps(described)})
        sync(folder / rank_file)  # rank 0 may be on another machine, and syncs what it has seen

    return write


class StoredPiece(NamedTuple):
    """A shard in a file."""

    file: Path
    key: str
    offset: tuple[int, ...]
    size: tuple[int, ...]


@dataclass(frozen=True)
class ShardedTensorFile:
    """A tensor in the files of several ranks. Indexing it with one slice for each dimension reads that part."""

    shape: tuple[int, ...]
    open: Callable[[Path], Any]
    pieces: list[StoredPiece] = field(default_factory=list)

    def __getitem__(self, wanted: tuple[slice, ...]) -> Tensor:
        part, missing = None, _numel(tuple(one.stop - one.start for one in wanted))
        for piece in self.pieces:
            there = [
                slice(max(one.start, start), min(one.stop, start + count))
                for one, start, count in zip(wanted, piece.offset, piece.size, strict=True)
            ]
            if any(one.start >= one.stop for one in there):
                continue
            inside = tuple(slice(a.start - o, a.stop - o) for a, o in zip(there, piece.offset, strict=True))
            value = self.open(piece.file).get_slice(piece.key)[inside]
            if part is None:
                part = torch.empty([one.stop - one.start for one in wanted], dtype=value.dtype)
            part[tuple(slice(a.start - w.start, a.stop - w.start) for a, w in zip(there, wanted, strict=True))] = value
            missing -= value.numel()
        if missing:
            raise ValueError(f"{missing} numbers of a tensor of shape {self.shape} are in no shard")
        return torch.empty([one.stop - one.start for one in wanted]) if part is None else part


def _numel(size: tuple[int, ...]) -> int:
    count = 1
    for one in size:
        count *= one
    return count


def with_stored_tensors(state: dict[str, Any], file: Path) -> dict[str, Any]:
    """The state that a file of `state_parts` describes, with the tensors of its shards."""
    sharded = state[SHARDED]
    stored = _stored(shard_folder(file), int(sharded["ranks"]))
    numbers = {name: number for number, name in enumerate(sharded["names"])}
    optimizer = {number: dict(one) for number, one in state["optimizer"]["state"].items()}
    masters = {}
    for (kind, name), tensor in stored.items():
        if kind == MASTERS:
            masters[name] = tensor
        else:
            optimizer.setdefault(numbers[name], {})[kind] = tensor
    return {**state, MASTERS: masters, "optimizer": {**state["optimizer"], "state": optimizer}}


def _stored(folder: Path, ranks: int) -> dict[tuple[str, str], ShardedTensorFile]:
    """The tensors of all files, by kind and parameter."""
    files = {int(match[1]): file for file in folder.iterdir() if (match := FILE.fullmatch(file.name))}
    if lost := sorted(set(range(ranks)) - files.keys()):
        raise ValueError(f"{folder.name} lacks the file of rank {lost[0]} of {ranks}")
    opened = {file: safe_open(file, framework="pt") for file in files.values()}
    found: dict[tuple[str, str], ShardedTensorFile] = {}
    for file, handle in opened.items():
        places: Mapping[str, Any] = json.loads((handle.metadata() or {}).get(PLACES, "{}"))
        for key in handle.keys():  # noqa: SIM118 - no mapping
            kind, _, name = key.partition("/")
            shape, offset = (tuple(map(int, one)) for one in places.get(key) or places[name])  # by name before 8 bits
            tensor = found.setdefault((kind, name), ShardedTensorFile(shape, opened.__getitem__))
            tensor.pieces.append(StoredPiece(file, key, offset, tuple(handle.get_slice(key).get_shape())))
    return found


def wait_for_files(checkpoint: Path) -> None:
    """Wait until this machine sees the shards of all ranks, which have written them. OSError names one that it does not
    see. Otherwise the checkpoint would be sealed without it."""
    deadline = time.monotonic() + SEEN_SECONDS
    while missing := _unseen(checkpoint):
        if time.monotonic() > deadline:
            raise OSError(
                f"{missing}, which another rank has written, is not seen here; use storage that all nodes share"
            )
        time.sleep(LOOK_SECONDS)


def _unseen(checkpoint: Path) -> str | None:
    for folder in {file.parent for file in checkpoint.rglob("rank_*_of_*.safetensors")}:
        names = {file.name for file in folder.iterdir()}
        count = max((int(match[2]) for name in names if (match := FILE.fullmatch(name))), default=0)
        for rank in range(count):
            if (name := f"rank_{rank}_of_{count}.safetensors") not in names:
                return f"{folder.name}/{name}"
    return None


def write_shards(save: GatherState, parts: Sequence[Part], ranks: Ranks) -> None:
    """Write the parts of a rank other than 0, and report to rank 0 how it ended. `parts` own their memory."""

    def write() -> None:
        problem = ""
        try:
            for part in parts:
                part(save.folder)
        except Exception as error:  # noqa: BLE001 - rank 0 waits for a report, and raises what went wrong
            problem = reason(error)
        try:
            ranks.report(save.ticket, problem)
        except Exception:  # noqa: BLE001 - rank 0 would wait forever; it notices the end of this process
            traceback.print_exc()
            os._exit(1)

    if save.background:
        started(write, "rally-shards")
    else:
        write()


def wait_part(save: GatherState, ranks: Ranks) -> Part:
    """A part that ends when all other ranks have written theirs. OSError names the first rank that could not."""

    def wait(checkpoint: Path) -> None:
        for rank, problem in enumerate(ranks.reports(save.ticket), 1):
            if problem:
                raise OSError(f"rank {rank}: {problem}")

    return wait
