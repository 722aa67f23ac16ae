"""Rows of small repositories for mini-swe-agent, and supervised conversations of the same agent.

A conversation is played: the agent's own prompts, commands that run in the sandbox, and their real output. Its
repositories are of the split train, and no row of training has one of them.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from rally.recipes.data_files import Progress, WrittenFile, write_file
from rally.recipes.repair.repositories import test_rows, train_rows


class RepairSizes(NamedTuple):
    train: int
    test: int
    """For each of the two data sources of the split test."""
    sft: int


def write_repair(out: Path, sizes: RepairSizes, seed: int, progress: Progress) -> list[WrittenFile]:
    """Write train.parquet, test.parquet and, unless `sizes.sft` is 0, sft.parquet."""
    if sizes.sft:
        import rally.recipes.repair.agent  # noqa: F401 - a missing package is reported before rows are written
    train = list(train_rows(sizes.train, seed))
    written = [
        write_file(out / "train.parquet", progress(train, sizes.train, "train")),
        write_file(out / "test.parquet", progress(test_rows(sizes.test, seed), 2 * sizes.test, "test")),
    ]
    if sizes.sft:
        rows = train_rows(sizes.sft, seed, first=sizes.train)
        written.append(write_file(out / "sft.parquet", progress(_conversations(rows), sizes.sft, "conversations")))
    return written


def _conversations(rows: Iterator[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    from rally.recipes.repair.agent import SUBMIT, AgentTurn, conversation

    for row in rows:
        info = row["extra_info"]
        ((name, source),) = json.loads(info["solution"]).items()
        (wrong,) = json.loads(info["files"]).values()
        line, right = next((i, r) for i, (w, r) in enumerate(_lines(wrong, source), 1) if w != r)
        module = name.removesuffix(".py")
        edit = f"cat > {name} <<'EOF'\n{source}EOF"
        look = f'python3 -c "import {module}; print({module}.{info["function"]})"'
        yield conversation(
            row,
            [
                AgentTurn(f"I read {name} first.", f"cat {name}"),
                AgentTurn(
                    f"Line {line} is wrong. It should be: {right.strip()}\nI write the file with that line.", edit
                ),
                AgentTurn("I check that the module can be imported.", look),
                AgentTurn("The function is repaired, so I submit.", SUBMIT),
            ],
        )


def _lines(wrong: str, right: str) -> Iterator[tuple[str, str]]:
    """The lines of both sources. A defect changes one line and adds none."""
    yield from zip(wrong.splitlines(), right.splitlines(), strict=True)
