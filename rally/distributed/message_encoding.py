"""Encoding of the messages that rank 0 sends. Decoding gives an equal message and never executes content.

A message is the length of its header (8 bytes), the header (JSON), and arrays (safetensors). Of a row, only the tokens
that it does not share with the row before it are sent, its sampled positions as bits, and a field whose values are all
equal as one value. So a row of GRPO takes about 4 bytes per new token and 4 per sampled token.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.numpy import load, save

from rally.config import Config, SftConfig
from rally.models.sharding import Message
from rally.runs.build.models import RunPlan
from rally.train.batch import TrainBatch
from rally.train.micro_batches import MicroBatches, MicroBatchShare
from rally.train.packing import FIELDS, PER_SAMPLED, Row, TeacherTokens, Tokens, joined, shared
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
    PublishWeights,
    SftStep,
    Shutdown,
    StartEngine,
    UpdateCritic,
    UpdatePolicy,
)
from rally.types import Image, ImageSpan, Routes

Array = np.ndarray[Any, np.dtype[Any]]
IMAGE_FACTS = ("hash", "format", "width", "height")
PER_EPISODE = ("rewards_N", "groups_N", "tokens_N")
SCHEMAS: dict[str, type[Config | SftConfig]] = {"Config": Config, "SftConfig": SftConfig}
BATCHES: dict[str, type[UpdatePolicy | UpdateCritic]] = {"UpdatePolicy": UpdatePolicy, "UpdateCritic": UpdateCritic}
EMPTY: dict[str, Callable[[], Message]] = {
    kind.__name__: kind
    for kind in (ComputeReference, ComputeValues, ComputeLoss, GatherWeights, GatherCritic, Shutdown)
}


def encode(message: Message) -> bytearray:
    header: dict[str, Any] = {"kind": type(message).__name__}
    arrays: dict[str, Array] = {}
    match message:
        case RunPlan(config, checkpoint, steps):
            place = None if checkpoint is None else str(checkpoint)
            header |= {"config": config.model_dump(mode="json"), "checkpoint": place, "steps": steps}
            header["schema"] = type(config).__name__
        case UpdatePolicy(batch, step, seed) | UpdateCritic(batch, step, seed):
            header |= {"step": step, "seed": seed}
            assert not batch.rows, "rows are sent as micro-batches"
            arrays = {name: getattr(batch, name).numpy() for name in PER_EPISODE}
        case MicroBatches(shares):
            header["sizes"] = [len(share.rows) for share in shares]
            header["counts"] = [share.counts for share in shares]
            arrays = rows_to_arrays(list(itertools.chain.from_iterable(share.rows for share in shares)))
        case SftStep(tokens, seed):
            header |= {"tokens": tokens, "seed": seed}
        case CompareForwards(rows, max_length):
            header["max_length"] = max_length
            arrays = rows_to_arrays(rows)
        case ComputePlain(rows, temperature):
            header["temperature"] = temperature
            arrays = rows_to_arrays(rows)
        case ComputeLogits(ids):
            header["ids"] = list(ids)
        case GatherState(folder, ticket, merged, background):
            header |= {"folder": str(folder), "ticket": ticket, "merged": merged, "background": background}
        case StartEngine(end_ids):
            header["end_ids"] = list(end_ids)
        case PublishWeights(version):
            header["version"] = version
    text = json.dumps(header).encode()
    return bytearray().join((len(text).to_bytes(8, "big"), text, save(arrays)))


def decode(content: bytes | bytearray | memoryview) -> Message:
    view = memoryview(content)
    end = 8 + int.from_bytes(view[:8], "big")
    header, arrays = json.loads(bytes(view[8:end])), load(bytes(view[end:]))
    kind = header["kind"]
    if kind == "RunPlan":
        place = header["checkpoint"]
        config = SCHEMAS[header["schema"]].model_validate(header["config"])
        return RunPlan(config, None if place is None else Path(place), header["steps"])
    if kind in BATCHES:
        batch = TrainBatch(rows=[], **{name: torch.tensor(arrays[name]) for name in PER_EPISODE})
        return BATCHES[kind](batch, header["step"], header["seed"])
    if kind == "MicroBatches":
        rest = iter(rows_of_arrays(arrays))
        parts = [list(itertools.islice(rest, size)) for size in header["sizes"]]
        return MicroBatches(list(map(MicroBatchShare, parts, header["counts"])))
    if kind == "SftStep":
        return SftStep(header["tokens"], header["seed"])
    if kind == "CompareForwards":
        return CompareForwards(rows_of_arrays(arrays), header["max_length"])
    if kind == "ComputePlain":
        return ComputePlain(rows_of_arrays(arrays), header["temperature"])
    if kind == "ComputeLogits":
        return ComputeLogits(header["ids"])
    if kind == "StartEngine":
        return StartEngine(tuple(header["end_ids"]))
    if kind == "PublishWeights":
        return PublishWeights(header["version"])
    if kind == "GatherState":
        return GatherState(Path(header["folder"]), header["ticket"], header["merged"], header["background"])
    return EMPTY[kind]()


def rows_to_arrays(rows: Sequence[Row]) -> dict[str, Array]:
    """Each field of all rows, concatenated, and the length of each row's part."""
    shares = [0, *(shared(a.ids, b.ids) for a, b in itertools.pairwise(rows))][: len(rows)]
    arrays: dict[str, Array] = {
        "episode": np.array([row.episode for row in rows], np.int64),
        "teacher": np.array([row.teacher for row in rows], np.int64),
        "lengths": np.array([len(row.ids) for row in rows], np.int64),
        "shares": np.array(shares, np.int64),
        "ids": joined((row.ids[share:] for row, share in zip(rows, shares, strict=True)), np.int32),
        "sampled": np.packbits(joined((row.mask for row in rows), np.bool_)),
    }
    for name in PER_SAMPLED:
        parts = [_shortened(getattr(row, name)) for row in rows]
        arrays[name] = joined(parts, FIELDS[name])
        arrays[f"{name}/lengths"] = np.array([len(part) for part in parts], np.int64)
    if any(row.routes is not None for row in rows):
        known = [row.routes or Routes(b"", 1, 1) for row in rows]
        arrays["routes"] = np.frombuffer(b"".join(r.data for r in known), np.int16)
        arrays["routes/shapes"] = np.array([[len(r), r.layers, r.experts] for r in known], np.int64)
    answers = [row.teacher_tokens for row in rows if row.teacher_tokens is not None]
    if answers:
        assert len(answers) == len(rows), "a served teacher answers for every row"
        arrays["teacher/ids"] = np.concatenate([answer.ids_MK for answer in answers])
        arrays["teacher/logp"] = np.concatenate([answer.logp_MK for answer in answers])
    if any(mask is not None for row in rows for mask in row.allowed):
        arrays |= _masks_to_arrays(rows)
    if any(row.images for row in rows):
        arrays |= _images_to_arrays(rows)
    return arrays


def _images_to_arrays(rows: Sequence[Row]) -> dict[str, Array]:
    """The place of every image in its row, and the encoded bytes of the different images: a rank need not see the
    files of rank 0."""
    numbers: dict[Image, int] = {}
    spans = [
        [row, span.start, span.rows, span.columns, numbers.setdefault(span.image, len(numbers))]
        for row, spans in enumerate(row.images for row in rows)
        for span in spans
    ]
    contents = [image.read() for image in numbers]
    facts = [{name: getattr(image, name) for name in IMAGE_FACTS} for image in numbers]
    return {
        "images/spans": np.array(spans, np.int64),
        "images/facts": np.frombuffer(json.dumps(facts).encode(), np.uint8),
        "images/bytes": np.frombuffer(b"".join(contents), np.uint8),
        "images/lengths": np.array(list(map(len, contents)), np.int64),
    }


def _images_of_arrays(arrays: dict[str, Array], rows: Sequence[Row]) -> list[Row]:
    contents = _split(arrays["images/bytes"], arrays["images/lengths"])
    facts = json.loads(arrays["images/facts"].tobytes())
    images = [Image(**one, data=content.tobytes()) for one, content in zip(facts, contents, strict=True)]
    found: dict[int, list[ImageSpan]] = {}
    for row, start, height, width, number in arrays["images/spans"].tolist():
        found.setdefault(row, []).append(ImageSpan(start, height, width, images[number]))
    return [replace(row, images=tuple(found.get(number, ()))) for number, row in enumerate(rows)]


def _masks_to_arrays(rows: Sequence[Row]) -> dict[str, Array]:
    """The different masks of all rows, and for each sampled token the number of its mask; -1: none."""
    numbers: dict[bytes, int] = {}
    masks = [mask for row in rows for mask in row.allowed or (None,) * len(row.sampled)]
    of_tokens = [-1 if mask is None else numbers.setdefault(mask, len(numbers)) for mask in masks]
    bits = np.frombuffer(b"".join(numbers), np.uint8).reshape(len(numbers), -1)
    return {"masks": bits, "masks/numbers": np.array(of_tokens, np.int64)}


def _masks_of_arrays(arrays: dict[str, Array], rows: Sequence[Row]) -> list[Row]:
    masks = [bits.tobytes() for bits in arrays["masks"]]
    parts = np.split(arrays["masks/numbers"], np.cumsum([len(row.sampled) for row in rows])[:-1])
    return [
        replace(row, allowed=tuple(None if n < 0 else masks[n] for n in part.tolist()))
        for row, part in zip(rows, parts, strict=True)
    ]


def _shortened(values: Array) -> Array:
    """One value if all are the same bits."""
    bits = values.view(np.dtype(f"u{values.itemsize}"))
    return values[:1] if len(values) and (bits == bits[0]).all() else values


def rows_of_arrays(arrays: dict[str, Array]) -> list[Row]:
    lengths = arrays["lengths"]
    flags = np.unpackbits(arrays["sampled"], count=int(lengths.sum())).view(np.bool_)
    sampled = [np.flatnonzero(part).astype(np.int32) for part in _split(flags, lengths)]
    counts = [len(part) for part in sampled]
    fields = {name: _split(arrays[name], arrays[f"{name}/lengths"]) for name in PER_SAMPLED}
    ids = _whole(_split(arrays["ids"], lengths - arrays["shares"]), arrays["shares"].tolist())
    routes = _routes(arrays) if "routes" in arrays else [None] * len(counts)
    answers = _teacher_tokens(arrays, counts) if "teacher/ids" in arrays else [None] * len(counts)
    rows = [
        Row(
            ids=ids[i],
            sampled=sampled[i],
            episode=episode,
            teacher=teacher,
            routes=routes[i],
            teacher_tokens=answers[i],
            **{name: _lengthened(parts[i], counts[i]) for name, parts in fields.items()},  # type: ignore[arg-type]
        )
        for i, (episode, teacher) in enumerate(zip(arrays["episode"].tolist(), arrays["teacher"].tolist(), strict=True))
    ]
    if "masks" in arrays:
        rows = _masks_of_arrays(arrays, rows)
    return _images_of_arrays(arrays, rows) if "images/spans" in arrays else rows


def _teacher_tokens(arrays: dict[str, Array], counts: Sequence[int]) -> list[TeacherTokens | None]:
    ends = np.cumsum(counts)[:-1]
    parts = zip(np.split(arrays["teacher/ids"], ends), np.split(arrays["teacher/logp"], ends), strict=True)
    return [TeacherTokens(ids, logp) for ids, logp in parts]


def _whole(parts: Sequence[Tokens], shares: Sequence[int]) -> list[Tokens]:
    """The tokens of each row, which shares so many with the row before it."""
    found: list[Tokens] = []
    for part, share in zip(parts, shares, strict=True):
        found.append(np.concatenate([found[-1][:share], part]) if share else part)
    return found


def _lengthened(values: Array, count: int) -> Array:
    return np.broadcast_to(values, count) if len(values) == 1 else values


def _routes(arrays: dict[str, Array]) -> list[Routes | None]:
    shapes = arrays["routes/shapes"]
    parts = _split(arrays["routes"], shapes.prod(1))
    return [
        Routes(part.tobytes(), layers, experts) if tokens else None
        for part, (tokens, layers, experts) in zip(parts, shapes.tolist(), strict=True)
    ]


def _split(values: Array, lengths: Array) -> list[Array]:
    ends = np.cumsum(lengths)
    return [values[end - length : end] for end, length in zip(ends.tolist(), lengths.tolist(), strict=True)]
