"""Validates the messages of a row and puts its images into them.

Messages, tool calls and mappings may be stored as JSON text. A message has images as parts of its content, or as
`<image>` in its text (or a bare {"type": "image"}); each of the latter takes the next entry of the row's image column,
and their numbers must agree. Images are loaded and checked. Relative paths start from the folder of the data file.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from rally.data.row_files import DataError, Row, plain
from rally.images.loading import IMAGE_KEYS, ImageError, is_image, read_image
from rally.types import Image, Message

ROLES = ("system", "user", "assistant", "tool")
_SHOWN = 60


def decoded(value: Any) -> Any:
    """The value, decoded if it is the JSON text of a list or mapping, as some Parquet writers store it."""
    if isinstance(value, str) and value.lstrip()[:1] in ("[", "{"):
        try:
            return plain(json.loads(value))
        except ValueError:
            return value
    return value


def shown(value: Any) -> str:
    """The value for an error message, shortened if it is long."""
    try:
        text = repr(value)
    except ValueError:  # an integer of more digits than Python prints
        text = f"a value of type {type(value).__name__}"
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}..."


def check_mapping(value: Any, field: str) -> dict[str, Any]:
    """The mapping in `value`; None counts as an empty one."""
    value = {} if value is None else decoded(value)
    if not isinstance(value, dict):
        raise DataError(f"{field} is {shown(value)}; it must be a mapping")
    return value


def check_messages(value: Any, field: str) -> list[Message]:
    """A non-empty list of messages, with tool-call arguments parsed."""
    if isinstance(value, str):
        if isinstance(decoded(value), str):
            fix = f"[{{'role': 'user', 'content': {shown(value)}}}]"
            raise DataError(f"{field} is a string; it must be a list of messages, here {fix}")
        value = decoded(value)
    if not isinstance(value, list) or not value:
        raise DataError(f"{field} is {shown(value)}; it must be a list of messages with at least one in it")
    return [_check_message(message, f"{field}[{i}]") for i, message in enumerate(value)]


def _check_message(message: Any, field: str) -> Message:
    if not isinstance(message, dict):
        raise DataError(f"{field} is {shown(message)}; it must be a mapping with role and content")
    role = message.get("role")
    if role not in ROLES:
        raise DataError(f"{field}.role is {shown(role)}; it must be one of {', '.join(ROLES)}")
    calls = message.get("tool_calls")
    if not calls:
        rest = {k: v for k, v in message.items() if k != "tool_calls"}
        return {**rest, "content": _check_content(message.get("content"), f"{field}.content", role)}
    if role != "assistant" or not isinstance(calls, list):
        raise DataError(f"{field}.tool_calls is {shown(calls)}; it must be a list, and only the assistant may have one")
    # Templates treat missing content next to tool calls differently; all of them accept the empty string.
    content = _check_content(message.get("content", ""), f"{field}.content", role)
    checked = [_check_call(call, f"{field}.tool_calls[{i}]") for i, call in enumerate(calls)]
    return {**message, "content": content, "tool_calls": checked}


def _check_content(content: Any, field: str, role: str) -> str | list[dict[str, Any]]:
    """Text, or a list of text and image parts. A list of text parts is joined."""
    if isinstance(content, str):
        return content
    if content is None:
        raise DataError(f"{field} is missing; it must be a string")
    if not isinstance(content, list) or not content:
        raise DataError(f"{field} is {shown(content)}; it must be one string, or a list of text and image parts")
    parts = [_check_part(part, f"{field}[{i}]") for i, part in enumerate(content)]
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    if role == "assistant":
        raise DataError(f"{field} has an image; the assistant writes text, so move it to another message")
    return parts


def _check_part(part: Any, field: str) -> dict[str, Any]:
    if is_image(part):
        return {**part, "type": "image"}
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    raise DataError(f"{field} is {shown(part)}; it must be {{'type': 'text', 'text': ...}} or {{'type': 'image', ...}}")


def _check_call(call: Any, field: str) -> dict[str, Any]:
    """The call in OpenAI form. The flat {name, arguments} of some data sets is converted."""
    if not isinstance(call, dict):
        raise DataError(f"{field} is {shown(call)}; it must be a mapping with function.name and function.arguments")
    nested = "function" in call
    function, where = (call["function"], f"{field}.function") if nested else (call, field)
    if not isinstance(function, dict) or not isinstance(function.get("name"), str):
        raise DataError(f"{where}.name is missing; it must be the name of a tool")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except ValueError as error:
            raise DataError(f"{where}.arguments is {shown(arguments)}, which is not valid JSON ({error})") from error
    if not isinstance(arguments, dict):
        raise DataError(f"{where}.arguments is {shown(arguments)}; it must be a mapping or the JSON text of one")
    outer = {k: v for k, v in call.items() if nested or k not in ("name", "arguments")}
    return {"type": "function", **outer, "function": {"name": function["name"], "arguments": arguments}}


PLACEHOLDER = "<image>"
_UNSUPPORTED = ("videos", "audios")


def load_images(row: Row, key: str, folder: Path) -> list[Image]:
    """The images of the column, if the row has it."""
    for media in _UNSUPPORTED:
        if media != key and row.get(media):
            raise DataError(f"{media} is not empty; only images are supported, so remove the column")
    column = row.get(key)
    listed = column if isinstance(column, list) else [] if column is None else [column]
    return [_image(entry, f"{key}[{i}]", folder) for i, entry in enumerate(listed)]


def place_images(messages: list[Message], column: list[Image], folder: Path, field: str, key: str) -> list[Message]:
    """The messages with all images, including those of the column, as parts of their content."""
    parts = [list(_parts(message, bool(column))) for message in messages]
    wanted = sum(_is_bare(part) for content in parts for part in content)
    if wanted != len(column):
        raise DataError(
            f"{field} has {wanted} {PLACEHOLDER} placeholders but {key} has {len(column)} images; write one for each"
        )
    left, placed = iter(column), []
    for number, (message, content) in enumerate(zip(messages, parts, strict=True)):
        where = f"{field}[{number}].content"
        filled = [_placed(part, left, folder, f"{where}[{i}]") for i, part in enumerate(content)]
        placed.append({**message, "content": filled} if any(map(is_image, filled)) else message)
    return placed


def _parts(message: Message, has_column: bool) -> Iterator[dict[str, Any]]:
    """The content, split at placeholders if the row has an image column. Assistant messages are not split."""
    content = message["content"]
    for part in [{"type": "text", "text": content}] if isinstance(content, str) else content:
        if is_image(part) or not has_column or message["role"] == "assistant":
            yield part
            continue
        for piece in re.split(f"({PLACEHOLDER})", part["text"]):
            if piece:
                yield {"type": "image"} if piece == PLACEHOLDER else {"type": "text", "text": piece}


def _is_bare(part: dict[str, Any]) -> bool:
    return is_image(part) and not any(part.get(key) is not None for key in IMAGE_KEYS)


def _placed(part: dict[str, Any], left: Iterator[Image], folder: Path, field: str) -> dict[str, Any]:
    if not is_image(part):
        return part
    return {"type": "image", "image": next(left) if _is_bare(part) else _image(part, field, folder)}


def _image(source: Any, field: str, folder: Path) -> Image:
    try:
        return read_image(source, folder)
    except ImageError as problem:
        raise DataError(f"{field}: {problem}") from problem
