"""JSON messages over a stream: each is its length (4 bytes) and its content."""

from __future__ import annotations

import asyncio
import json
from typing import Any

LENGTH_BYTES = 4
MAX_FRAME = 512 * 1024 * 1024


class FrameError(ConnectionError):
    """The other side sent something that is not a message."""


async def read_frame(reader: asyncio.StreamReader, limit: int = MAX_FRAME) -> dict[str, Any]:
    """The next message; asyncio.IncompleteReadError at the end of the stream."""
    length = int.from_bytes(await reader.readexactly(LENGTH_BYTES), "big")
    if length > limit:
        raise FrameError(f"a message of {length:,} bytes exceeds the limit of {limit:,}")
    try:
        message = json.loads(await reader.readexactly(length))
    except ValueError as problem:
        raise FrameError("a message is not JSON") from problem
    if not isinstance(message, dict):
        raise FrameError("a message is not a JSON object")
    return message


def write_frame(writer: asyncio.StreamWriter, message: dict[str, Any]) -> None:
    writer.write(frame(message))


def frame(message: dict[str, Any]) -> bytes:
    content = json.dumps(message, separators=(",", ":")).encode()
    if len(content) > MAX_FRAME:
        raise FrameError(f"a message of {len(content):,} bytes exceeds the limit of {MAX_FRAME:,}")
    return len(content).to_bytes(LENGTH_BYTES, "big") + content
