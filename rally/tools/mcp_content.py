"""What an MCP tool returned becomes text and images for the model; a part that cannot be shown is named and counted.

Text parts stand one below the other. An image is read at once, and its place in the text is marked. Structured
content is told, as JSON, where the server sent no other content: servers that send both mean the text for the model.
"""

from __future__ import annotations

import base64
import binascii
import json
from contextlib import suppress
from dataclasses import dataclass

import mcp_types as types

from rally.images import ImageError, read_image
from rally.types import Image, ToolResponse

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


@dataclass(frozen=True)
class Content:
    """A result's content, with the number of parts that could not be shown."""

    response: ToolResponse
    not_shown: int


def read_content(result: types.CallToolResult) -> Content:
    reader = _Reader()
    lines = [reader.line(part) for part in result.content]
    if not lines and result.structured_content is not None:
        lines = [json.dumps(result.structured_content, ensure_ascii=False)]
    return Content(ToolResponse(text="\n".join(lines), image=reader.images or None), reader.not_shown)


class _Reader:
    def __init__(self) -> None:
        self.images: list[Image] = []
        self.not_shown = 0

    def line(self, part: types.ContentBlock) -> str:
        if part.type == "text":
            return part.text
        if part.type == "image":
            return self._blob(part.data, part.mime_type, "image")
        if part.type == "audio":
            return self._blob(part.data, part.mime_type, "audio")
        if part.type == "resource_link":
            return f"[{part.title or part.name}: {part.uri}]"
        resource = part.resource
        text: str | None = getattr(resource, "text", None)
        if text is not None:
            return text
        return self._blob(getattr(resource, "blob", ""), resource.mime_type, str(resource.uri))

    def _blob(self, data: str, mime_type: str | None, what: str) -> str:
        image = _image(data) if (mime_type or "").startswith("image/") else None
        if image is None:
            self.not_shown += 1
            return f"[{what} of type {mime_type or 'unknown'}, which cannot be shown]"
        self.images.append(image)
        return f"[image {len(self.images)}: {image.width}x{image.height}]"


def _image(data: str) -> Image | None:
    """The picture, decoded now, so that a broken one is found here and not in the middle of training."""
    with suppress(binascii.Error, ValueError):
        raw = base64.b64decode(data)
        with suppress(ImageError):
            return read_image(raw)
        if raw.startswith(PNG_SIGNATURE):
            with suppress(ImageError):
                return read_image(_necessary_chunks(raw))
    return None


def _necessary_chunks(png: bytes) -> bytes:
    """The PNG less what is no part of the picture: a colour profile with a wrong checksum, as one of the protocol's own
    example servers sends it, makes Pillow refuse the whole."""
    kept, at = [PNG_SIGNATURE], len(PNG_SIGNATURE)
    while at + 8 <= len(png):
        end = at + 12 + int.from_bytes(png[at : at + 4], "big")
        if png[at + 4 : at + 5].isupper():  # how PNG marks a chunk that every reader must understand
            kept.append(png[at:end])
        at = end
    return b"".join(kept)
