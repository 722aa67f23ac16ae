"""Encoding of the messages that rank 0 broadcasts. Decoding gives an equal message and never executes content.

A message is the length of its header (8 bytes), the header (JSON), and tensors (safetensors).
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load, save
from torch import Tensor

from rally.config import Config, SftConfig
from rally.models.sharding import Message
from rally.runs.build.models import RunPlan
from rally.train.batch import TrainBatch
from rally.train.packing import Row
from rally.train.rank_messages import (
    CompareForwards,
    ComputeLogits,
    ComputeLoss,
    ComputePlain,
    ComputeReference,
    ComputeValues,
    GatherCritic,
    GatherState,
    GatherWeights,
    SftStep,
    Shutdown,
    UpdateCritic,
    UpdatePolicy,
)
from rally.types import Routes

PER_ROW = {
    "ids": torch.int64,
    "sampled": torch.int64,
    "logprobs": torch.float64,
    "advantages": torch.float64,
    "weights": torch.float64,
    "stale": torch.bool,
    "marked": torch.bool,
    "values": torch.float64,
    "returns": torch.float64,
}
SCHEMAS: dict[str, type[Config | SftConfig]] = {"Config": Config, "SftConfig": SftConfig}
BATCHES: dict[str, type[UpdatePolicy | UpdateCritic]] = {"UpdatePolicy": UpdatePolicy, "UpdateCritic": UpdateCritic}
QUERIES: dict[str, type[ComputeReference | ComputeValues | ComputeLoss]] = {
    kind.__name__: kind for kind in (ComputeReference, ComputeValues, ComputeLoss)
}
EMPTY: dict[str, type[GatherWeights | GatherCritic | Shutdown]] = {
    kind.__name__: kind for kind in (GatherWeights, GatherCritic, Shutdown)
}


def encode(message: Message) -> bytes:
    header: dict[str, Any] = {"kind": type(message).__name__}
    tensors: dict[str, Tensor] = {}
    match message:
        case RunPlan(config, checkpoint, steps):
            place = None if checkpoint is None else str(checkpoint)
            header |= {"config": config.model_dump(mode="json"), "checkpoint": place, "steps": steps}
            header["schema"] = type(config).__name__
        case UpdatePolicy(batch, step, seed) | UpdateCritic(batch, step, seed):
            header |= {"step": step, "seed": seed}
            tensors = {**rows_to_tensors(batch.rows), **_per_episode(batch)}
        case SftStep(rows, seed):
            header["seed"] = seed
            tensors = rows_to_tensors(rows)
        case CompareForwards(rows, max_length):
            header["max_length"] = max_length
            tensors = rows_to_tensors(rows)
        case ComputePlain(rows, temperature):
            header["temperature"] = temperature
            tensors = rows_to_tensors(rows)
        case ComputeReference(rows) | ComputeValues(rows) | ComputeLoss(rows):
            tensors = rows_to_tensors(rows)
        case ComputeLogits(ids):
            header["ids"] = list(ids)
        case GatherState(merged):
            header["merged"] = merged
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "big") + text + save(tensors)


def decode(content: bytes) -> Message:
    end = 8 + int.from_bytes(content[:8], "big")
    header, tensors = json.loads(content[8:end]), load(content[end:])
    kind = header["kind"]
    if kind == "RunPlan":
        place = header["checkpoint"]
        config = SCHEMAS[header["schema"]].model_validate(header["config"])
        return RunPlan(config, None if place is None else Path(place), header["steps"])
    if kind in BATCHES:
        return BATCHES[kind](_batch(tensors), header["step"], header["seed"])
    if kind == "SftStep":
        return SftStep(rows_of_tensors(tensors), header["seed"])
    if kind == "CompareForwards":
        return CompareForwards(rows_of_tensors(tensors), header["max_length"])
    if kind == "ComputePlain":
        return ComputePlain(rows_of_tensors(tensors), header["temperature"])
    if kind in QUERIES:
        return QUERIES[kind](rows_of_tensors(tensors))
    if kind == "ComputeLogits":
        return ComputeLogits(header["ids"])
    return GatherState(header["merged"]) if kind == "GatherState" else EMPTY[kind]()


def _per_episode(batch: TrainBatch) -> dict[str, Tensor]:
    return {"rewards_N": batch.rewards_N, "groups_N": batch.groups_N, "tokens_N": batch.tokens_N}


def _batch(tensors: dict[str, Tensor]) -> TrainBatch:
    rest = {name: tensors[name] for name in ("rewards_N", "groups_N", "tokens_N")}
    return TrainBatch(rows=rows_of_tensors(tensors), **rest)


def rows_to_tensors(rows: Sequence[Row]) -> dict[str, Tensor]:
    """Each field of all rows, concatenated, and the length of each row's part."""
    assert not any(row.images for row in rows), "rows with images are not supported on several ranks"
    tensors = {"episode": torch.tensor([row.episode for row in rows], dtype=torch.int64)}
    for name, dtype in PER_ROW.items():
        parts = [getattr(row, name) for row in rows]
        tensors[name] = torch.tensor(list(itertools.chain.from_iterable(parts)), dtype=dtype)
        tensors[f"{name}/lengths"] = torch.tensor([len(part) for part in parts], dtype=torch.int64)
    if any(row.routes is not None for row in rows):
        known = [row.routes or Routes(b"", 1, 1) for row in rows]
        tensors["routes"] = torch.frombuffer(bytearray(b"".join(r.data for r in known)), dtype=torch.int16)
        tensors["routes/shapes"] = torch.tensor([[len(r), r.layers, r.experts] for r in known])
    return tensors


def rows_of_tensors(tensors: dict[str, Tensor]) -> list[Row]:
    fields = {name: _split(tensors[name], tensors[f"{name}/lengths"]) for name in PER_ROW}
    episodes = tensors["episode"].tolist()
    routes = _routes(tensors) if "routes" in tensors else [None] * len(episodes)
    return [
        Row(episode=e, routes=routes[i], **{name: parts[i] for name, parts in fields.items()})  # type: ignore[arg-type]
        for i, e in enumerate(episodes)
    ]


def _routes(tensors: dict[str, Tensor]) -> list[Routes | None]:
    shapes = tensors["routes/shapes"].tolist()
    parts = tensors["routes"].split([tokens * layers * experts for tokens, layers, experts in shapes])
    return [
        Routes(part.numpy().tobytes(), layers, experts) if tokens else None
        for part, (tokens, layers, experts) in zip(parts, shapes, strict=True)
    ]


def _split(numbers: Tensor, lengths: Tensor) -> list[tuple[Any, ...]]:
    return [tuple(part.tolist()) for part in numbers.split(lengths.tolist())]
