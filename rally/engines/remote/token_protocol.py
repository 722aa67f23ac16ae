"""The JSON of Rally's own token protocol: what `POST /generate` takes and returns.

Ids, log-probabilities, the masks of a grammar and the experts of tokens pass unchanged, so that training over servers
is training with the embedded engine. Images travel as their encoded bytes, with the hash that identifies them.
"""

from __future__ import annotations

import base64
import binascii
from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import Any

from rally.engines.base import EngineError, ReplicaGone
from rally.images.loading import ImageError, read_image
from rally.models.token_masks import GrammarError, decompressed
from rally.types import ConstrainedSpan, Generation, Image, ImageSpan, Routes, SamplingParams

GRAMMAR_CODE = "grammar"
"""The error code of a request whose grammar cannot be applied."""
BINARY = ("routes", "constrained")
"""Fields of a Generation that are not numbers, texts or lists of them."""


def sampling_to_wire(params: SamplingParams) -> dict[str, Any]:
    """The fields that differ from the defaults."""
    return {f.name: value for f in fields(params) if (value := getattr(params, f.name)) != f.default}


def generation_to_wire(generation: Generation) -> dict[str, Any]:
    wire: dict[str, Any] = {f.name: getattr(generation, f.name) for f in fields(generation) if f.name not in BINARY}
    wire["spans"] = [[span.version, span.start, span.end] for span in generation.spans]
    if (routes := generation.routes) is not None:
        wire["routes"] = {"int16": _text(routes.data), "layers": routes.layers, "experts": routes.experts}
    if (span := generation.constrained) is not None:
        wire["masks"] = _text(span.masks)
    return wire


def routes_of_wire(value: Any) -> Routes | None:
    if value is None:
        return None
    try:
        data, layers, experts = _bytes(value["int16"]), int(value["layers"]), int(value["experts"])
        if layers < 1 or experts < 1 or len(data) % (2 * layers * experts):
            raise ValueError(f"{len(data)} bytes for {layers} layers of {experts} experts")
    except (ValueError, TypeError, KeyError) as problem:
        raise ReplicaGone(f"the server's expert choices cannot be read ({problem})") from None
    return Routes(data, layers, experts)


def constrained_of_wire(text: Any, grammar: str, ids: Sequence[int]) -> ConstrainedSpan | None:
    """What the grammar allowed at each of the sampled tokens `ids`, all of which it must allow."""
    if not grammar or not ids:
        return None
    if text is None:
        raise ReplicaGone("the server did not return which tokens the grammar allowed, so its response is not used")
    try:
        data = _bytes(text)
        masks = decompressed(data)
    except (ValueError, TypeError, GrammarError) as problem:
        raise ReplicaGone(f"the server's masks of a grammar cannot be read ({problem})") from None
    if len(masks) != len(ids):
        raise ReplicaGone(f"the server returned the masks of {len(masks)} tokens for {len(ids)} sampled ones")
    if not all(_allows(mask, token) for mask, token in zip(masks, ids, strict=True)):
        raise ReplicaGone("the server sampled a token that its mask does not allow, so its response is not used")
    return ConstrainedSpan(0, len(ids), grammar, data)


def _allows(mask: bytes, token: int) -> bool:
    return token // 8 < len(mask) and bool(mask[token // 8] >> token % 8 & 1)


def images_to_wire(images: Sequence[ImageSpan]) -> list[dict[str, Any]]:
    return [
        {
            "start": span.start,
            "rows": span.rows,
            "columns": span.columns,
            "hash": span.image.hash,
            "data": _text(span.image.read()),
        }
        for span in images
    ]


def images_of_wire(values: Sequence[Mapping[str, Any]]) -> list[ImageSpan]:
    """The spans, with their images decoded and checked once. EngineError if one is not what its hash says."""
    spans = []
    for value in values:
        try:
            image: Image = read_image(_bytes(value["data"]))
        except (ValueError, ImageError) as problem:
            raise EngineError(f"an image of the request cannot be read ({problem})") from None
        if image.hash != value["hash"]:
            raise EngineError("an image of the request has another hash than its bytes; send it again")
        spans.append(ImageSpan(value["start"], value["rows"], value["columns"], image))
    return spans


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _bytes(text: Any) -> bytes:
    try:
        return base64.b64decode(text, validate=True)
    except binascii.Error as problem:
        raise ValueError(str(problem)) from None
