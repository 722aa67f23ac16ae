"""Arithmetic problems as rows, and supervised conversations with good and bad habits of calling the calculator.

Training is meant to remove the bad habits. `good` calls the tool and repeats the result; `guess` answers wrongly with
no call; `malformed` writes a call that cannot be parsed, gets an error and guesses; `wrong_digit` calls with one wrong
digit in the expression. A problem belongs to the split `test` when the MD5 of its expression is a multiple of ten.
"""

from __future__ import annotations

import ast
import hashlib
import operator
import random
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fractions import Fraction
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rally.data.row_files import DataError, Row
from rally.recipes.data_files import Progress, WrittenFile, write_file
from rally.types import Message

DATA_SOURCE = "rally/arithmetic"
Split = Literal["train", "test"]

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_TRIES_PER_PROBLEM = 30
_MISSES_IN_A_ROW = 10_000


class ArithmeticProblem(NamedTuple):
    expression: str
    answer: int
    question: str


@dataclass(frozen=True)
class ArithmeticSpec:
    """The space of problems: inclusive ranges of a, b and c, forms of expressions, and phrasings of questions."""

    a: tuple[int, int] = (11, 99)
    b: tuple[int, int] = (11, 99)
    c: tuple[int, int] = (11, 99)
    forms: tuple[str, ...] = ("{a}*{b}+{c}",)
    phrasings: tuple[str, ...] = ("What is {expression}?",)

    def __post_init__(self) -> None:
        for name in ("a", "b", "c"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise DataError(f"the range of {name} is {low} to {high}; it must have 0 <= low <= high")
        for form in self.forms:
            if not _is_whole(form):
                raise DataError(f"the form {form!r} must be {{a}}, {{b}}, {{c}} joined by + - * and brackets")
        if not self.forms or not self.phrasings or any("{expression}" not in p for p in self.phrasings):
            raise DataError("there must be a form and a phrasing, and every phrasing must contain {expression}")


def evaluate(expression: str) -> Fraction:
    """The exact value of an expression of numbers, + - * / and brackets. Raises ValueError for anything else."""

    def value(node: ast.expr) -> Fraction:
        match node:
            case ast.Constant(value=int() | float()):
                return Fraction(str(node.value))
            case ast.UnaryOp(op=ast.USub()):
                return -value(node.operand)
            case ast.BinOp() if type(node.op) in _OPERATORS:
                return Fraction(_OPERATORS[type(node.op)](value(node.left), value(node.right)))
        raise ValueError(f"{expression!r} has more than numbers, + - * / and brackets")

    try:
        return value(ast.parse(expression.strip(), mode="eval").body)
    except (SyntaxError, ZeroDivisionError) as error:
        raise ValueError(f"{expression!r} has no value: {error}") from error


def _is_whole(form: str) -> bool:
    """Whether a form gives valid expressions without division, so that answers are whole numbers."""
    try:
        evaluate(form.format(a=7, b=5, c=3))
    except (KeyError, IndexError, ValueError):
        return False
    return "/" not in form


def held_out(expression: str) -> bool:
    """Whether the expression belongs to the test split."""
    return int(hashlib.md5(expression.encode(), usedforsecurity=False).hexdigest(), 16) % 10 == 0


def draws(rng: random.Random, split: Split, spec: ArithmeticSpec) -> Iterator[ArithmeticProblem]:
    """An endless stream of problems of one split, with repetitions."""
    misses = 0
    while misses < _MISSES_IN_A_ROW:
        numbers = {name: rng.randint(*getattr(spec, name)) for name in ("a", "b", "c")}
        expression = rng.choice(spec.forms).format(**numbers)
        question = rng.choice(spec.phrasings).format(expression=expression)
        misses += 1
        if held_out(expression) == (split == "test"):
            misses = 0
            yield ArithmeticProblem(expression, int(evaluate(expression)), question)
    raise DataError(f"these forms and ranges have no {split} problem; widen the ranges")


def problems(count: int, seed: int, split: Split, spec: ArithmeticSpec | None = None) -> list[ArithmeticProblem]:
    """`count` different problems. A larger count only appends to them."""
    spec = spec or ArithmeticSpec()
    found: dict[str, ArithmeticProblem] = {}
    stream = draws(random.Random(f"arithmetic:{seed}:{split}"), split, spec)
    for _ in range(count * _TRIES_PER_PROBLEM):
        if len(found) == count:
            break
        problem = next(stream)
        found.setdefault(problem.expression, problem)
    if len(found) < count:
        raise DataError(
            f"only {len(found)} of {count} different {split} problems were found; ask for fewer or widen the ranges"
        )
    return list(found.values())


def rows(count: int, seed: int, split: Split, spec: ArithmeticSpec | None = None) -> Iterator[Row]:
    """The same problems as rows."""
    for index, problem in enumerate(problems(count, seed, split, spec)):
        answer = str(problem.answer)
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [{"role": "user", "content": problem.question}],
            "agent_name": "tool_agent",
            "reward_model": {"style": "rule", "ground_truth": answer},
            "extra_info": {"split": split, "index": index, "question": problem.question, "answer": answer},
        }


Habit = Literal["good", "guess", "malformed", "wrong_digit"]

TOOL = "calculator"
MALFORMED_REPLY = "Failed to decode tool call: the JSON is cut off"


def conversation(problem: ArithmeticProblem, habit: Habit, rng: random.Random) -> list[Message]:
    """One conversation about the problem, in OpenAI form."""
    user = {"role": "user", "content": problem.question}
    match habit:
        case "good":
            return [user, *_called(problem.expression)]
        case "guess":
            return [user, _final(_wrong_number(problem.answer, rng))]
        case "malformed":
            # One closing brace is missing. A parser must not complete it, or half a call could be executed.
            text = (
                f'<tool_call>\n{{"name": "{TOOL}", "arguments": {{"expression": "{problem.expression}"}}\n</tool_call>'
            )
            reply = {"role": "tool", "content": MALFORMED_REPLY, "name": TOOL}
            guess = _final(_wrong_number(problem.answer, rng))
            return [user, {"role": "assistant", "content": text}, reply, guess]
        case "wrong_digit":
            return [user, *_called(_with_wrong_digit(problem.expression, rng))]


def conversations(
    count: int, mix: Mapping[str, float], spec: ArithmeticSpec, seed: int, split: Split = "train"
) -> Iterator[dict[str, Any]]:
    """`count` conversations with habits drawn by the weights in `mix`, as rows with messages and tools."""
    unknown = sorted(set(mix) - set(get_args(Habit)))
    if unknown:
        raise DataError(f"there is no habit {', '.join(unknown)}; the habits are {', '.join(get_args(Habit))}")
    if min(mix.values(), default=0) < 0 or not sum(mix.values()) > 0:
        raise DataError("the mix of habits must have weights of 0 or more, at least one of them above 0")
    return _conversations(count, mix, spec, seed, split)


def _conversations(
    count: int, mix: Mapping[str, Any], spec: ArithmeticSpec, seed: int, split: Split
) -> Iterator[dict[str, Any]]:
    rng = random.Random(f"conversations:{seed}:{split}")
    habits: list[Habit] = [habit for habit in get_args(Habit) if habit in mix]
    weights = [mix[habit] for habit in habits]
    for problem, _ in zip(draws(rng, split, spec), range(count), strict=False):
        [habit] = rng.choices(habits, weights)
        yield {"messages": conversation(problem, habit, rng), "tools": None}


def _called(expression: str) -> list[Message]:
    result = str(int(evaluate(expression)))
    call = {"type": "function", "function": {"name": TOOL, "arguments": {"expression": expression}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result, "name": TOOL},
        _final(int(result)),
    ]


def _final(number: int) -> Message:
    return {"role": "assistant", "content": f"#### {number}"}


def _wrong_number(answer: int, rng: random.Random) -> int:
    """A wrong number with as many digits as the answer."""
    top = 10 ** len(str(abs(answer)))
    guess = rng.randrange(top // 10, top - 1)
    guess += guess >= abs(answer)
    return -guess if answer < 0 else guess


def _with_wrong_digit(expression: str, rng: random.Random) -> str:
    # No zero, which could lead a number, and no held-out expression, which must not be in a train conversation.
    changed = [
        f"{expression[:at]}{digit}{expression[at + 1 :]}"
        for at, old in enumerate(expression)
        if old.isdigit()
        for digit in "123456789"
        if digit != old
    ]
    return rng.choice([other for other in changed if held_out(expression) or not held_out(other)])


def write_arithmetic(
    out_dir: Path, train: int, test: int, seed: int, progress: Progress, spec: ArithmeticSpec | None = None
) -> list[WrittenFile]:
    """train.parquet and test.parquet of the arithmetic demo."""
    counts: dict[Split, int] = {"train": train, "test": test}
    return [
        write_file(out_dir / f"{split}.parquet", progress(rows(count, seed, split, spec), count, split))
        for split, count in counts.items()
    ]


def write_arithmetic_sft(
    out_dir: Path,
    count: int,
    mix: Mapping[str, float],
    seed: int,
    progress: Progress,
    spec: ArithmeticSpec | None = None,
) -> list[WrittenFile]:
    """sft.parquet of the arithmetic demo: conversations with the habits of `mix`, none about a test problem."""
    rows = conversations(count, mix, spec or ArithmeticSpec(), seed)
    return [write_file(out_dir / "sft.parquet", progress(rows, count, "sft"))]
