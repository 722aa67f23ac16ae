"""The adapter `aviary/<package.module.Class>`: environments of fhaviary (`aviary.core.Environment`).

`env.args` are the arguments of the class. With `env.args.rows`, a .jsonl or .parquet file, every row is a task, and its
columns are further arguments. A turn without a call is answered with the list of tools.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from aviary.core import Environment as AviaryEnvironment
from aviary.core import ToolCall as AviaryToolCall
from aviary.core import ToolCallFunction, ToolRequestMessage

from rally.data.row_files import read_rows
from rally.envs.base import EnvError, Environment, EnvTurn
from rally.importing import ImportFailed, import_module, look_in
from rally.types import Message


def names() -> list[str]:
    return ["aviary.core.DummyEnv"]


def make(name: str, rows: str | None = None, **args: Any) -> Environment:
    """The environment of a class. `rows` is a file whose rows are the tasks."""
    module, _, class_name = name.rpartition(".")
    look_in(Path.cwd())
    try:
        cls = getattr(import_module(module), class_name, None) if module else None
    except ImportFailed as failed:
        raise EnvError(f"aviary/{name} cannot be imported ({failed}); correct its path") from None
    if not (isinstance(cls, type) and issubclass(cls, AviaryEnvironment)):
        raise EnvError(f"aviary/{name} is no subclass of aviary.core.Environment; write aviary/package.module.Class")
    return AviaryTools(cls, args, rows)


class AviaryTools(Environment):
    """One episode of an environment of aviary."""

    def __init__(self, cls: Any, args: Mapping[str, Any], rows: str | None) -> None:
        self.cls, self.args, self.rows = cls, dict(args), rows

    def tasks(self) -> Sequence[Mapping[str, Any]] | None:
        return None if self.rows is None else _read(self.rows)

    async def reset(self, row: Mapping[str, Any], seed: int) -> tuple[list[Message], list[Mapping[str, Any]]]:
        columns = {key: value for key, value in row.items() if key not in ("env", "id", "seed")}
        self.env = self.cls(**self.args, **columns)
        messages, tools = await self.env.reset()
        self.names = [tool.info.name for tool in tools]
        infos = [tool.info.model_dump(mode="json", exclude_none=True) for tool in tools]
        schemas: list[Mapping[str, Any]] = [{"type": "function", "function": info} for info in infos]
        return [_message(message) for message in messages], schemas

    async def step(self, turn: EnvTurn) -> tuple[Any, float | None, bool, dict[str, Any]]:
        if not turn.calls:
            return f"Call one of the tools: {', '.join(self.names)}.", None, False, {"valid": False}
        calls = [
            AviaryToolCall(id=call.id, function=ToolCallFunction(name=call.name, arguments=call.arguments))
            for call in turn.calls
        ]
        request = ToolRequestMessage(content=turn.text, tool_calls=calls)
        messages, reward, done, truncated = await self.env.step(request)
        told = {"valid": True, "truncated": bool(truncated)}
        return [_message(message) for message in messages], float(reward), bool(done or truncated), told

    async def close(self) -> None:
        if hasattr(self, "env"):
            await self.env.close()


def _message(message: Any) -> Message:
    """The message in OpenAI form."""
    content = message.content if isinstance(message.content, str) else str(message.content or "")
    if (call := getattr(message, "tool_call_id", None)) is not None:
        return {"role": "tool", "name": message.name, "tool_call_id": call, "content": content}
    role = message.role if message.role in ("system", "user", "assistant") else "user"
    return {"role": role, "content": content}


@lru_cache(maxsize=8)
def _read(path: str) -> list[Mapping[str, Any]]:
    return list(read_rows(Path(path)))
