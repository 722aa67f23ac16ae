"""GSM8K as rows and as supervised conversations with the calculator.

The ground truth of a row is the number after `####`, without commas. Flavors: `tool` (the row has the tool's
create_kwargs), `agent_loop` (the same, and the row names the tool loop), `interaction` (no tool; a simulated user
checks the answer).
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rally.data.row_files import DataError, Row, download, read_rows
from rally.recipes.arithmetic.data import evaluate
from rally.recipes.data_files import Progress, WrittenFile, write_file
from rally.types import Message

DATA_SOURCE = "openai/gsm8k"
Flavor = Literal["tool", "interaction", "agent_loop"]
Tool = Literal["calc_gsm8k_reward", "calculator"]
Split = Literal["train", "test"]

CALCULATOR_SCHEMA: dict[str, Any] = {  # equals that of the built-in tool, so that conversations match rollouts
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Evaluates an arithmetic expression exactly and returns its value.",
        "parameters": {
            "type": "object",
            "properties": {
                "expression": {
                    "type": "string",
                    "description": "Numbers, + - * / // % ** ( ), and sqrt, abs, round, min, max, floor, ceil, log, "
                    "ln, log2, log10, exp, sin, cos, tan, factorial, gcd, comb; e.g. 12*(3+4)/7",
                }
            },
            "required": ["expression"],
        },
    },
}

_ROLE = "You are a careful mathematician. Work through the problem step by step."
_TOOL_USE: dict[Tool, str] = {
    "calc_gsm8k_reward": (
        "Once you have an answer, check it with the tool `calc_gsm8k_reward` at least once, and think again if it "
        "turns out to be wrong."
    ),
    "calculator": "Leave the arithmetic to the tool `calculator`.",
}
_FINISH = "End with the answer alone on the last line, written as `#### <answer>`."
_ANSWER = re.compile(r"#### (-?[0-9.,]+)")
_ANNOTATION = re.compile(r"<<([^<>=]*)=([^<>=]*)>>")


class _Item(NamedTuple):
    number: int
    question: str
    answer: str
    ground_truth: str


def build(source: Path | None, flavor: Flavor, split: Split, tool: Tool = "calc_gsm8k_reward") -> Iterator[Row]:
    """The rows of one split, from a folder with `<split>.jsonl` or `.parquet`, or from the hub."""
    for name, choice, choices in (("flavor", flavor, get_args(Flavor)), ("tool", tool, get_args(Tool))):
        if choice not in choices:
            raise DataError(f"unknown {name} {choice!r}; choose one of {', '.join(choices)}")
    return _rows(source, flavor, split, tool)


def _rows(source: Path | None, flavor: Flavor, split: Split, tool: Tool) -> Iterator[Row]:
    for item in _items(source, split):
        extra: Row = {"split": split, "index": item.number, "question": item.question, "answer": item.answer}
        extra["level"] = calculation_steps(item.answer)
        if flavor == "interaction":
            kwargs = {"query": item.question, "ground_truth": item.ground_truth}
            extra["interaction_kwargs"] = {"name": "gsm8k", **kwargs}
        elif tool == "calc_gsm8k_reward":
            extra["need_tools_kwargs"] = True
            extra["tools_kwargs"] = {tool: {"create_kwargs": {"ground_truth": item.ground_truth}}}
        yield {
            "data_source": DATA_SOURCE,
            **({"agent_name": "tool_agent"} if flavor == "agent_loop" else {}),
            "prompt": _prompt(item.question, None if flavor == "interaction" else tool),
            "ability": "math",
            "reward_model": {"style": "rule", "ground_truth": item.ground_truth},
            "extra_info": extra,
        }


def calculation_steps(answer: str) -> int:
    """The number of calculations in the solution: its `<<...>>` notes, or its lines if it has none."""
    return answer.count("<<") or len(_ANSWER.sub("", answer).strip().splitlines())


def sft_rows(source: Path | None) -> Iterator[Row]:
    """Conversations with the calculator, made from the `<<48/2=24>>` notes of the train split.

    Solutions without notes, or with a note that is not exact, are skipped: the tool would contradict the latter.
    """
    for item in _items(source, "train"):
        notes = _ANNOTATION.findall(item.answer)
        if notes and all(_exact(expression, result) for expression, result in notes):
            messages = [*_prompt(item.question, "calculator"), *_solution(item)]
            yield {"messages": messages, "tools": [CALCULATOR_SCHEMA]}


def _prompt(question: str, tool: Tool | None) -> list[Message]:
    system = " ".join([_ROLE, *([_TOOL_USE[tool]] if tool else []), _FINISH])
    return [{"role": "system", "content": system}, {"role": "user", "content": question}]


def _items(source: Path | None, split: Split) -> Iterator[_Item]:
    if source is None:
        rows: Iterable[Row] = download("GSM8K", DATA_SOURCE, "main", split, "train.jsonl and test.jsonl")
    else:
        rows = read_rows(_file(source, split))
    for index, row in enumerate(rows):
        question, answer = row.get("question"), row.get("answer")
        match = _ANSWER.search(answer) if isinstance(answer, str) else None
        if not isinstance(question, str) or not isinstance(answer, str) or match is None:
            raise DataError(f"GSM8K {split}, row {index}: there must be a question, and an answer with '#### <number>'")
        yield _Item(index, question, answer, match[1].replace(",", ""))


def _file(source: Path, split: Split) -> Path:
    names = (f"{split}.jsonl", f"{split}.parquet", f"main/{split}-00000-of-00001.parquet")
    for name in names:
        if (source / name).is_file():
            return source / name
    raise DataError(f"{source} has no GSM8K; it must have one of {', '.join(names)}")


def _solution(item: _Item) -> Iterator[Message]:
    """The written solution as turns, with a tool call in place of each note."""
    text = _ANSWER.sub("", item.answer).rstrip()
    at = 0
    for note in _ANNOTATION.finditer(text):
        expression, result = note.groups()
        call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": expression}}}
        yield {"role": "assistant", "content": text[at : note.start()].strip(), "tool_calls": [call]}
        yield {"role": "tool", "content": _number(result), "name": "calculator"}
        at = note.end()
    yield {"role": "assistant", "content": f"{text[at:].strip()}\n#### {item.ground_truth}".strip()}


def _exact(expression: str, result: str) -> bool:
    try:
        return evaluate(expression) == evaluate(result)
    except ValueError:
        return False


def _number(text: str) -> str:
    value = evaluate(text)
    return str(value.numerator) if value.denominator == 1 else repr(float(value))


def write_gsm8k(
    out_dir: Path,
    source: Path | None,
    flavor: Flavor,
    progress: Progress,
    tool: Tool = "calc_gsm8k_reward",
) -> list[WrittenFile]:
    """train.parquet and test.parquet of GSM8K."""
    splits: tuple[Split, ...] = ("train", "test")
    return [
        write_file(out_dir / f"{split}.parquet", progress(build(source, flavor, split, tool), None, split))
        for split in splits
    ]


def write_gsm8k_sft(out_dir: Path, source: Path | None, progress: Progress) -> list[WrittenFile]:
    """Write sft.parquet of GSM8K: the train solutions as conversations with the calculator."""
    return [write_file(out_dir / "sft.parquet", progress(sft_rows(source), None, "sft"))]
