"""Writes the data files of a recipe, and runs a tool for the answers in supervised conversations."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from rally.data.row_files import Row, write_rows
from rally.tools import ToolBox
from rally.types import RallyError, Task, ToolCall, ToolStatus


class Progress(Protocol):
    """Passes rows through and shows their number, of `total` if that is known."""

    def __call__(self, rows: Iterable[Row], total: int | None, label: str) -> Iterable[Row]: ...


class WrittenFile(NamedTuple):
    path: Path
    rows: int


def tool_answers(tools: ToolBox, name: str, argument: str, values: Sequence[str]) -> list[str]:
    """The answers of a tool to each value of its one argument, as an episode would get them."""
    task = Task(id="sft", data_source="sft", prompt=({"role": "user", "content": "run"},))

    async def run_all() -> list[str]:
        session = tools.open(task, "sft")
        try:
            results = await session.run([ToolCall(name=name, arguments={argument: value}) for value in values])
        finally:
            await session.close()
        if failed := next((result for result in results if result.status is not ToolStatus.OK), None):
            raise RallyError(f"the tool {name} failed while writing conversations: {failed.response.text}")
        return [result.response.text or "" for result in results]

    return asyncio.run(run_all())


def write_file(path: Path, rows: Iterable[Row | dict[str, Any]]) -> WrittenFile:
    return WrittenFile(path, write_rows(rows, path))
