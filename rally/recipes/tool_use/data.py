"""Supervised conversations of right calls, played in the environment itself: its prompts, its tools, its answers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from rally.envs.base import EnvTurn
from rally.recipes.data_files import Progress, WrittenFile, write_file
from rally.recipes.tool_use.dialogues import Call, dialogue
from rally.recipes.tool_use.environment import DIALOGUES, KINDS, ToolUse
from rally.recipes.tool_use.single_turn import single_task
from rally.types import Message, ToolCall

SFT_SEED = 500_000_000  # neither of training nor of validation
NO_CALL = "None of the functions that I have can do that with what you told me."
DONE = "Done: {}"


def write_tool_use(out: Path, sft: int, seed: int, progress: Progress) -> list[WrittenFile]:
    """Write sft.jsonl, since columns of a Parquet file have one type. Training and validation tasks need no files."""
    rows = islice(conversations(seed), sft)
    return [write_file(out / "sft.jsonl", progress(rows, sft, "conversations"))]


def conversations(seed: int) -> Iterator[dict[str, Any]]:
    """Conversations of all kinds in turn."""
    number = SFT_SEED + 1_000_000 * seed
    while True:
        for kind in KINDS:
            yield conversation(kind, number)
        number += 1


def conversation(kind: str, seed: int) -> dict[str, Any]:
    """The right replies to a task."""
    environment = ToolUse(kind)
    messages, tools = environment.reset({}, seed)
    earned = 0.0
    for number, calls in enumerate(_replies(kind, seed)):
        made = tuple(ToolCall(name=n, arguments=a, id=f"call_{number}_{i}") for i, (n, a) in enumerate(calls))
        messages.append(_said(made, messages[-1]))
        observed, reward, done, _ = environment.step(EnvTurn(text="", calls=made))
        earned += reward or 0.0
        if not done:
            assert not isinstance(observed, str), "a dialogue answers with messages"
            messages += [dict(message) for message in observed]
    assert abs(earned - 1.0) < 1e-9, (kind, seed, earned)
    return {"messages": messages, "tools": tools}


def _replies(kind: str, seed: int) -> Iterator[Sequence[Call]]:
    """The calls of each reply; a reply without calls ends a user turn."""
    if kind not in DIALOGUES:
        yield [(call.name, call.arguments) for call in single_task(kind, seed, held_out=False).calls]  # type: ignore[arg-type]
        return
    for turn in dialogue(seed, DIALOGUES[kind]).turns:
        for call in turn.calls:
            yield [call]
        yield []


def _said(calls: Sequence[ToolCall], before: Message) -> Message:
    """The reply with these calls, or one that tells the last result."""
    if not calls:
        return {"role": "assistant", "content": DONE.format(before["content"]) if before["role"] == "tool" else NO_CALL}
    functions = [{"name": call.name, "arguments": dict(call.arguments)} for call in calls]
    called = [{"id": c.id, "type": "function", "function": f} for c, f in zip(calls, functions, strict=True)]
    return {"role": "assistant", "content": "", "tool_calls": called}
