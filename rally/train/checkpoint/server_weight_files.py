"""Writes the model folder that rollout servers load after every step, with many threads.

transformers writes the first folder. If that folder holds the weights under their own names, bit for bit, its layout is
reused and later folders are written directly; otherwise transformers writes them all.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from rally.train.checkpoint.snapshot import PIECE, as_bytes, staged, threads

BYTES_OF_LENGTH = 8  # before the header of a safetensors file


class WeightLocation(NamedTuple):
    """The byte range of one weight in its file."""

    weight: str
    start: int
    end: int


class Shard(NamedTuple):
    """A safetensors file without its weights."""

    name: str
    head: bytes
    places: tuple[WeightLocation, ...]


class Layout(NamedTuple):
    """A model folder without its weights."""

    shards: tuple[Shard, ...]
    others: Mapping[str, bytes]


class WeightWriter:
    """Writes the policy into a new folder. `first` writes it with transformers; `weights` returns the weights in it."""

    def __init__(self, first: Callable[[Path], None], weights: Callable[[], Mapping[str, Tensor]]) -> None:
        self._first = first
        self._weights = weights
        self._layout: Layout | None = None
        self._checked = False

    @property
    def knows_layout(self) -> bool:
        """Whether folders are written from `weights` alone from now on."""
        return self._layout is not None

    def __call__(self, folder: Path) -> None:
        if self._layout is not None:
            write(self._layout, self._weights(), folder)
            return
        self._first(folder)
        if not self._checked:
            self._layout = layout_of(folder, self._weights())
            self._checked = True


def layout_of(folder: Path, weights: Mapping[str, Tensor]) -> Layout | None:
    """The layout of a folder that holds exactly these weights; None if it holds anything else."""
    shards = []
    for path in sorted(folder.glob("*.safetensors")):
        shard = _shard(path)
        whole = torch.from_file(str(path), shared=True, size=path.stat().st_size, dtype=torch.uint8)
        if not all(_holds(whole, place, weights) for place in shard.places):
            return None
        shards.append(shard)
    others = {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".safetensors"}
    return Layout(tuple(shards), others)


def _shard(path: Path) -> Shard:
    with path.open("rb") as file:
        length = file.read(BYTES_OF_LENGTH)
        text = file.read(int.from_bytes(length, "little"))
    head = length + text
    entries = {name: entry["data_offsets"] for name, entry in json.loads(text).items() if name != "__metadata__"}
    places = (WeightLocation(name, len(head) + start, len(head) + end) for name, (start, end) in entries.items())
    return Shard(path.name, head, tuple(places))


def _holds(whole: Tensor, place: WeightLocation, weights: Mapping[str, Tensor]) -> bool:
    weight = weights.get(place.weight)
    return weight is not None and torch.equal(whole[place.start : place.end], as_bytes(weight).cpu())


def write(layout: Layout, weights: Mapping[str, Tensor], folder: Path) -> None:
    """Write a folder of this layout with these weights."""
    folder.mkdir(parents=True)
    with ExitStack() as opened, threads() as workers:
        pieces: list[WeightBytes] = []
        for shard in layout.shards:
            file = opened.enter_context((folder / shard.name).open("wb"))
            file.write(shard.head)
            file.flush()
            for place in shard.places:
                pieces += _pieces(file.fileno(), place, as_bytes(weights[place.weight]))
        for _ in workers.map(_write_piece, pieces):
            pass  # raises what a worker raised
    for name, content in layout.others.items():
        (folder / name).write_bytes(content)


class WeightBytes(NamedTuple):
    """Bytes of a weight, and their position in the file."""

    file: int
    start: int
    data: Tensor


def _pieces(file: int, place: WeightLocation, data: Tensor) -> list[WeightBytes]:
    assert len(data) == place.end - place.start, f"the size of {place.weight} has changed"
    return [WeightBytes(file, place.start + at, data[at : at + PIECE]) for at in range(0, len(data), PIECE)]


def _write_piece(piece: WeightBytes) -> None:
    left, start = staged(piece.data).numpy().data, piece.start
    while left:
        done = os.pwrite(piece.file, left, start)
        left, start = left[done:], start + done
