"""Every image of a row stands where its messages show it, loaded and checked; none is left over and none is missing.

A message holds images as parts of its content, or as `<image>` in its text (or a bare {"type": "image"}), each of which
takes the next entry of the row's image column. Relative paths count from the folder of the rows' file.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rally.data.read import DataError, Row
from rally.images import SAID_BY, ImageError, is_image, read_image
from rally.types import Image, Message

PLACEHOLDER = "<image>"
_NOT_BUILT = ("videos", "audios")


def load_images(row: Row, key: str, folder: Path) -> list[Image]:
    """The images of the column, which need not be there."""
    for media in _NOT_BUILT:
        if media != key and row.get(media):
            raise DataError(f"{media} is not empty; only images are built, so leave the column out")
    column = row.get(key)
    listed = column if isinstance(column, list) else [] if column is None else [column]
    return [_image(entry, f"{key}[{i}]", folder) for i, entry in enumerate(listed)]


def place_images(messages: list[Message], column: list[Image], folder: Path, field: str, key: str) -> list[Message]:
    """The messages with every image in its place, those of the column too."""
    parts = [list(_parts(message, bool(column))) for message in messages]
    wanted = sum(_is_bare(part) for content in parts for part in content)
    if wanted != len(column):
        raise DataError(
            f"{field} has {wanted} {PLACEHOLDER} places but {key} holds {len(column)} images; write one place for each"
        )
    left, placed = iter(column), []
    for number, (message, content) in enumerate(zip(messages, parts, strict=True)):
        where = f"{field}[{number}].content"
        filled = [_placed(part, left, folder, f"{where}[{i}]") for i, part in enumerate(content)]
        placed.append({**message, "content": filled} if any(map(is_image, filled)) else message)
    return placed


def _parts(message: Message, has_column: bool) -> Iterator[dict[str, Any]]:
    """The content, cut at placeholders if there are images to take their places; the assistant shows none."""
    content = message["content"]
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if is_image(part) or not has_column or message["role"] == "assistant":
            yield part
            continue
        for piece in re.split(f"({PLACEHOLDER})", part["text"]):
            if piece:
                yield {"type": "image"} if piece == PLACEHOLDER else {"type": "text", "text": piece}


def _is_bare(part: dict[str, Any]) -> bool:
    return is_image(part) and not any(part.get(key) is not None for key in SAID_BY)


def _placed(part: dict[str, Any], left: Iterator[Image], folder: Path, field: str) -> dict[str, Any]:
    if not is_image(part):
        return part
    return {"type": "image", "image": next(left) if _is_bare(part) else _image(part, field, folder)}


def _image(source: Any, field: str, folder: Path) -> Image:
    try:
        return read_image(source, folder)
    except ImageError as problem:
        raise DataError(f"{field}: {problem}") from problem
