"""Rows become conversations to imitate, and a row that cannot become one is named before training starts."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

from rally.data.messages import check_messages, decoded, shown
from rally.data.read import DataError, Files, Place, Row, RowSet
from rally.types import Message


@dataclass(frozen=True)
class Conversation:
    """One exchange whose assistant turns are learned. None for `tools` or `enable_thinking`: the row says nothing."""

    messages: tuple[Message, ...]
    tools: tuple[dict[str, Any], ...] | None = None
    enable_thinking: bool | None = None


def load_conversations(
    files: Files,
    messages_key: str = "messages",
    tools_key: str = "tools",
    enable_thinking_key: str = "enable_thinking",
) -> RowSet[Conversation]:
    """The conversations of Parquet, JSONL or JSON files, in the order of the files, every one of them validated."""
    build = partial(
        _conversation, messages_key=messages_key, tools_key=tools_key, enable_thinking_key=enable_thinking_key
    )
    conversations = RowSet(files, build)
    conversations.validate()
    return conversations


def _conversation(
    _place: Place, row: Row, *, messages_key: str, tools_key: str, enable_thinking_key: str
) -> Conversation:
    if messages_key not in row:
        raise DataError(f"{messages_key} is missing (the row has {', '.join(row)}); it must be a list of messages")
    messages = check_messages(row[messages_key], messages_key)
    if all(message["role"] != "assistant" for message in messages):
        raise DataError(f"{messages_key} has no message from the assistant; there must be one to learn from")
    thinking = row.get(enable_thinking_key)
    if not isinstance(thinking, bool | None):
        raise DataError(f"{enable_thinking_key} is {shown(thinking)}; it must be true, false or absent")
    return Conversation(tuple(messages), _tools(row.get(tools_key), tools_key), thinking)


def _tools(value: Any, field: str) -> tuple[dict[str, Any], ...] | None:
    if value is None:
        return None
    tools = decoded(value)
    if not isinstance(tools, list):
        raise DataError(f"{field} is {shown(tools)}; it must be a list of tool schemas")
    for i, tool in enumerate(tools):
        function = tool.get("function") if isinstance(tool, dict) else None
        if not isinstance(function, dict) or not isinstance(function.get("name"), str):
            raise DataError(f"{field}[{i}] is {shown(tool)}; it must be a schema with function.name")
    return tuple(tools)
