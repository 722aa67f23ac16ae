"""The shards that FSDP training left, one file a rank, become the whole tensors they are pieces of.

`model_world_size_8_rank_0.pt` and its seven sisters hold the same names; a piece says along which dimension it was cut.
Files are read without running code of theirs.
"""

from __future__ import annotations

import pickle
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from rally.types import RallyError

NAME = re.compile(r"model_world_size_(\d+)_rank_(\d+)\.pt")
HF = "huggingface"
"""The folder beside the shards that has the model's configuration and tokenizer."""


class ShardError(RallyError):
    """Shards that do not make a whole."""


def has_shards(folder: Path) -> bool:
    return any(NAME.fullmatch(file.name) for file in folder.iterdir())


def joined_shards(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the model, whole."""
    ranks = [_read(file) for file in shard_files(folder)]
    if odd := next((name for rank in ranks for name in rank.keys() ^ ranks[0].keys()), None):
        raise ShardError(f"{odd} is in some shards of {folder} and not in others; copy those of one run")
    return {name: _joined(name, [rank[name] for rank in ranks]) for name in ranks[0]}


def shard_files(folder: Path) -> list[Path]:
    """The file of each rank, in order; all must be there."""
    found = {int(match[2]): (file, int(match[1])) for file in folder.iterdir() if (match := NAME.fullmatch(file.name))}
    worlds = {world for _, world in found.values()}
    if len(worlds) != 1:
        raise ShardError(f"{folder} holds shards of runs on {sorted(worlds)} devices; keep those of one run")
    [world] = worlds
    if lost := sorted(set(range(world)) - found.keys()):
        raise ShardError(f"{folder} lacks the shard of rank {lost[0]} of {world}; copy all of them")
    return [found[rank][0] for rank in range(world)]


def _read(file: Path) -> Mapping[str, Any]:
    try:
        state: Any = torch.load(file, map_location="cpu", weights_only=True, mmap=True)
    except (OSError, RuntimeError, pickle.UnpicklingError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        raise ShardError(f"{file} cannot be read ({reason}); merge it with the program that wrote it") from error
    if not isinstance(state, Mapping):
        raise ShardError(f"{file} holds no tensors by name; merge it with the program that wrote it")
    return state


def _joined(name: str, pieces: Sequence[Any]) -> Tensor:
    first = pieces[0]
    if not isinstance(first, DTensor):
        whole: Tensor = first.clone()  # tied weights share memory in the file of a single device
        return whole
    cut = [placement for placement in first.placements if isinstance(placement, Shard)]
    if len(cut) > 1:
        raise ShardError(f"{name} is cut along several dimensions; merge it with the program that wrote it")
    # copies of the model lie along the other dimensions of the mesh: one of them is enough
    along = [slice(None) if isinstance(placement, Shard) else slice(0, 1) for placement in first.placements]
    ranks = first.device_mesh.mesh[tuple(along)].flatten().tolist()
    own: list[Tensor] = [pieces[rank].to_local() for rank in ranks]
    return torch.cat(own, dim=cut[0].dim) if cut else own[0].clone()
