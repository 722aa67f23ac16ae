"""Converts what a tool returns into a `ToolReturn`: a response, a reward, metrics, and success or failure.

A tool returns a ToolResponse, text, or any value (converted to JSON), alone or as a tuple of up to three: (response,
reward, metrics). A dict with `success: False` or a non-empty `error` means that the tool failed. Bytes are decoded as
UTF-8 with replacement; bytes inside a JSON value that are not UTF-8 become base64.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from pydantic_core import to_jsonable_python

from rally.types import RallyError, ToolResponse, brief

TruncateSide = Literal["left", "right", "middle"]


class BadReturn(RallyError):
    """A tool returned a value that cannot be converted."""


@dataclass(frozen=True, kw_only=True)
class ToolReturn:
    response: ToolResponse
    ok: bool = True
    reward: float | None = None
    metrics: dict[str, Any] = field(default_factory=dict)


def read_answer(returned: Any) -> ToolReturn:
    """Convert what a tool's `execute` returned."""
    if isinstance(returned, ToolReturn):
        return returned
    parts = returned if isinstance(returned, tuple) else (returned,)
    if not 1 <= len(parts) <= 3:
        raise BadReturn(f"the tool returned {len(parts)} values; it may return (response, reward, metrics)")
    value, reward, metrics = (*parts, None, None)[:3]
    if metrics is not None and not isinstance(metrics, Mapping):
        raise BadReturn(f"the tool returned metrics of type {type(metrics).__name__}; they must be a dict")
    return ToolReturn(
        response=_response(value),
        ok=not _says_failed(value),
        reward=None if reward is None else read_reward(reward),
        metrics=dict(metrics or {}),
    )


def read_reward(reward: Any) -> float:
    """The reward as a finite float. Raises BadReturn."""
    try:
        value = float(reward)
    except (TypeError, ValueError):
        raise BadReturn(f"the tool returned a reward of type {type(reward).__name__}; it must be a number") from None
    except OverflowError:
        value = math.inf
    if isinstance(reward, str) or not math.isfinite(value):
        raise BadReturn(f"the tool returned the reward {brief(reward)}; it must be a finite number")
    return value


def _response(value: Any) -> ToolResponse:
    if isinstance(value, ToolResponse):
        text = None if value.text is None else clean(value.text)
        return value if text == value.text else replace(value, text=text)
    if isinstance(value, str):
        return ToolResponse(text=clean(value))
    if isinstance(value, (bytes, bytearray, memoryview)):
        return ToolResponse(text=bytes(value).decode("utf-8", "replace"))
    return ToolResponse(text=clean(json.dumps(_jsonable(value), ensure_ascii=False)))


def _jsonable(value: Any) -> Any:
    try:
        return to_jsonable_python(value, fallback=str)
    except UnicodeDecodeError:  # some bytes inside are not UTF-8
        return to_jsonable_python(value, fallback=str, bytes_mode="base64")


def _says_failed(value: Any) -> bool:
    return isinstance(value, Mapping) and (value.get("success") is False or bool(value.get("error")))


def clean(text: str) -> str:
    """`text` without lone surrogates, which no tokenizer can encode."""
    # isascii() takes constant time, and a tool may return 100 MB of text.
    return text if text.isascii() else text.encode("utf-8", "replace").decode("utf-8")


def shorten(text: str, limit: int | None, side: TruncateSide) -> str:
    """At most `limit` characters of `text`, with a note in place of the removed ones.

    `left` cuts the left and keeps the end, `right` keeps the beginning, `middle` keeps both ends.
    """
    missing = len(text) - limit if limit is not None else 0
    if limit is None or missing <= 0:
        return text
    note = f"[{missing} characters cut]"
    head = {"left": 0, "right": limit, "middle": limit - limit // 2}[side]
    tail = limit - head
    return f"{text[:head]}{note}{text[len(text) - tail :]}"
