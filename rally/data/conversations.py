"""Loads the conversations of supervised fine-tuning. All rows are validated before training."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

from rally.data.messages import check_messages, decoded, load_images, place_images, shown
from rally.data.row_files import DataError, Files, Row, RowLocation, RowSet
from rally.types import Message


@dataclass(frozen=True)
class Conversation:
    """A conversation whose assistant turns are trained on. `tools` and `enable_thinking` may be absent (None)."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    enable_thinking: bool | None = None
    where: str = field(default="", compare=False)  # its file and row, for error messages


class QuestionAnswer(NamedTuple):
    """Where a row without messages has its question and answer: for each a column and the keys inside it."""

    question: tuple[str, ...]
    answer: tuple[str, ...]


def load_conversations(
    files: Files,
    messages_key: str = "messages",
    tools_key: str = "tools",
    enable_thinking_key: str = "enable_thinking",
    image_key: str = "images",
    *,
    pair: QuestionAnswer | None = None,
) -> RowSet[Conversation]:
    """The validated conversations of Parquet, JSONL or JSON files, in the order of the files.

    With `pair`, rows have one question and one answer instead of messages.
    """
    read = partial(_pair, pair=pair) if pair else partial(_messages, field=messages_key)

    def build(place: RowLocation, row: Row) -> Conversation:
        images = load_images(row, image_key, place.folder)
        messages = place_images(read(row), images, place.folder, messages_key, image_key)
        thinking = row.get(enable_thinking_key)
        if not isinstance(thinking, bool | None):
            raise DataError(f"{enable_thinking_key} is {shown(thinking)}; it must be true, false or absent")
        tools = _tools(row.get(tools_key), tools_key)
        return Conversation(tuple(messages), tools, thinking, f"{place.name}, row {place.number}")

    conversations = RowSet(files, build)
    conversations.validate()
    return conversations


def _messages(row: Row, field: str) -> list[Message]:
    if field not in row:
        raise DataError(f"{field} is missing (the row has {', '.join(row)}); it must be a list of messages")
    messages = check_messages(row[field], field)
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"{field} has no assistant message; there must be one to train on")
    return messages


def _pair(row: Row, pair: QuestionAnswer) -> list[Message]:
    """The messages of a row with a question, as text or messages, and an answer, as text."""
    question, answer = _inside(row, pair.question), _inside(row, pair.answer)
    if not isinstance(answer, str):
        raise DataError(f"{'.'.join(pair.answer)} is {shown(answer)}; it must be a string, the answer to train on")
    prompt: list[Message] = [{"role": "user", "content": question}]
    if not isinstance(question, str):
        prompt = check_messages(question, ".".join(pair.question))
    return [*prompt, {"role": "assistant", "content": answer}]


def _inside(row: Row, path: tuple[str, ...]) -> Any:
    value: Any = row
    for depth, key in enumerate(path):
        value = decoded(value)
        if not isinstance(value, dict) or key not in value:
            has = f" ({'.'.join(path[:depth]) or 'the row'} has {', '.join(value)})" if isinstance(value, dict) else ""
            raise DataError(f"{'.'.join(path[: depth + 1])} is missing{has}; name the columns of question and answer")
        value = value[key]
    return value


def _tools(value: Any, field: str) -> tuple[dict[str, Any], ...] | None:
    if value is None:
        return None
    tools = decoded(value)
    if not isinstance(tools, list):
        raise DataError(f"{field} is {shown(tools)}; it must be a list of tool schemas")
    tools = [decoded(tool) for tool in tools]
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{field}[{i}] is {shown(tool)}; it must be a schema with function.name")
    return tuple(tools)
