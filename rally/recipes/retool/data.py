r"""Rows for an agent that solves mathematics with code: generated problems, GSM8K, and AIME (validation only).

A generated problem belongs to the split `test` when the MD5 of its question is a multiple of ten, else to `train`. The
answer must be in `\boxed{}`. Supervised conversations show a program and its output. The programs are run with the
actual tool, so that the model sees the same text as in a rollout.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal, NamedTuple

from rally.data.row_files import DataError, Row, read_rows
from rally.recipes.data_files import WrittenFile, tool_answers, write_file
from rally.recipes.gsm8k_tool import data as gsm8k
from rally.recipes.retool.problems import CodeProblem, problems
from rally.tools import ToolBox, ToolLimits, load_tools
from rally.types import Message

DATA_SOURCE = "retool/integers"
GSM8K_SOURCE = "retool/gsm8k"
AIME_SOURCE = "retool/aime2025"
TOOL = "code_interpreter"
Split = Literal["train", "test"]
RunAll = Callable[[Sequence[str]], Sequence[str]]

_SYSTEM = (
    "You solve mathematical problems. Where it helps, write Python for the tool `code_interpreter`, which runs it and "
    r"tells you what it printed. End with the answer, a number alone, as \boxed{answer}."
)
_TRIES_PER_PROBLEM = 10


def held_out(question: str) -> bool:
    """Whether a generated problem belongs to the test split."""
    return int(hashlib.md5(question.encode(), usedforsecurity=False).hexdigest(), 16) % 10 == 0


def generate(count: int, seed: int, split: Split, stream: str = "rows") -> list[CodeProblem]:
    """`count` different problems of a split, from each family in turn."""
    found: dict[str, CodeProblem] = {}
    source = problems(random.Random(f"retool:{stream}:{seed}:{split}"))
    tries = count * _TRIES_PER_PROBLEM * (10 if split == "test" else 1)
    for problem, _ in zip(source, range(tries), strict=False):
        if held_out(problem.question) == (split == "test"):
            found.setdefault(problem.question, problem)
        if len(found) == count:
            return list(found.values())
    raise DataError(f"only {len(found)} of {count} different {split} problems were found; ask for fewer")


def rows(count: int, seed: int, split: Split) -> Iterator[Row]:
    """Generated problems as rows. `extra_info.level` is their difficulty, from 1 to 5."""
    for index, problem in enumerate(generate(count, seed, split)):
        about = {"level": problem.level, "topic": problem.topic, "family": problem.family}
        yield _row(DATA_SOURCE, problem.question, str(problem.answer), {"split": split, "index": index, **about})


def gsm8k_rows(source: Path | None, split: Split) -> Iterator[Row]:
    """GSM8K problems, with their number of calculation steps as the level."""
    for row in gsm8k.build(source, "tool", split, "calculator"):
        info = row["extra_info"]
        kept = {name: info[name] for name in ("split", "index", "level")}
        yield _row(GSM8K_SOURCE, info["question"], row["reward_model"]["ground_truth"], kept)


def aime_rows(folder: Path) -> Iterator[Row]:
    """The problems of a folder with test.jsonl (`prompt`, `answer`), for validation only."""
    file = folder / "test.jsonl"
    if not file.is_file():
        raise DataError(f"{folder} has no test.jsonl; add one, with a prompt and an answer in each line")
    for index, item in enumerate(read_rows(file)):
        question, answer = item.get("prompt"), item.get("answer")
        if not isinstance(question, str) or not str(answer).isdigit():
            raise DataError(f"{file}, row {index}: there must be a prompt, and an answer that is a whole number")
        yield _row(AIME_SOURCE, question, str(answer), {"split": "test", "index": index})


def sft_rows(count: int, seed: int, run_all: RunAll, tools: Sequence[dict[str, Any]]) -> Iterator[Row]:
    """Conversations about train problems. `run_all` returns the tool's answers to the programs."""
    chosen = generate(count, seed, "train", "sft")
    outputs = run_all([problem.program for problem in chosen])
    for problem, output in zip(chosen, outputs, strict=True):
        if output.strip() != str(problem.answer):
            raise DataError(
                f"the tool answered {output.strip()!r} to a program that prints {problem.answer}; "
                "check the code sandbox with: rally serve sandbox"
            )
        yield {"messages": [*_prompt(problem.question), *_solution(problem, output)], "tools": list(tools)}


def _solution(problem: CodeProblem, output: str) -> Iterable[Message]:
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"code": problem.program}}}
    yield {"role": "assistant", "content": problem.plan, "tool_calls": [call]}
    yield {"role": "tool", "content": output, "name": TOOL}
    answer = rf"The program prints {problem.answer}, so the answer is \boxed{{{problem.answer}}}."
    yield {"role": "assistant", "content": answer}


def _row(data_source: str, question: str, answer: str, info: Row) -> Row:
    return {
        "data_source": data_source,
        "agent_name": "tool_agent",
        "prompt": _prompt(question),
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": answer},
        "extra_info": info,
    }


def _prompt(question: str) -> list[Message]:
    return [{"role": "system", "content": _SYSTEM}, {"role": "user", "content": question}]


HUB = Path("hub")  # instead of a folder: download


class RetoolSizes(NamedTuple):
    train: int
    test: int
    sft: int


def write_retool(out: Path, sizes: RetoolSizes, gsm8k: Path | None, aime: Path | None, seed: int) -> list[WrittenFile]:
    """Write train.parquet, test.parquet and sft.parquet. With `gsm8k` (a folder, or `HUB`), its train split is added to
    the train rows, and the first `sizes.test` rows of its test split to the test rows. AIME is for the test rows."""
    source = None if gsm8k == HUB and not HUB.exists() else gsm8k
    train = chain(rows(sizes.train, seed, "train"), gsm8k_rows(source, "train") if gsm8k else ())
    test = chain(
        rows(sizes.test, seed, "test"),
        islice(gsm8k_rows(source, "test"), sizes.test) if gsm8k else (),
        aime_rows(aime) if aime else (),
    )
    written = [write_file(out / "train.parquet", train), write_file(out / "test.parquet", test)]
    if sizes.sft:
        tools = ToolBox(load_tools({"tools": [{"name": TOOL}]}), ToolLimits(max_response_chars=1024))
        programs = partial(tool_answers, tools, TOOL, "code")
        conversations = sft_rows(sizes.sft, seed, programs, tools.schemas())
        written.append(write_file(out / "sft.parquet", conversations))
    return written
