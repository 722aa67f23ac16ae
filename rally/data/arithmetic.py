"""The demo task: sums too hard to do in the head of a small model, and easy with a calculator.

An expression belongs to the split `test` when its MD5 is a multiple of ten, else to `train`: no matter which seed,
count or phrasing, nothing that is tested was ever trained on.
"""

from __future__ import annotations

import ast
import hashlib
import operator
import random
from collections.abc import Iterator
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal, NamedTuple

from rally.data.read import DataError, Row

DATA_SOURCE = "rally/arithmetic"
Split = Literal["train", "test"]

_OPERATORS = {ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.Div: operator.truediv}
_TRIES_PER_PROBLEM = 30
_MISSES_IN_A_ROW = 10_000


class Problem(NamedTuple):
    expression: str
    answer: int
    question: str


@dataclass(frozen=True)
class ArithmeticSpec:
    """Which problems there are: the inclusive ranges of a, b and c, the forms they fill, and how one asks."""

    a: tuple[int, int] = (11, 99)
    b: tuple[int, int] = (11, 99)
    c: tuple[int, int] = (11, 99)
    forms: tuple[str, ...] = ("{a}*{b}+{c}",)
    phrasings: tuple[str, ...] = ("What is {expression}?",)

    def __post_init__(self) -> None:
        for name in ("a", "b", "c"):
            low, high = getattr(self, name)
            if not 0 <= low <= high:
                raise DataError(f"the range of {name} is {low} to {high}; it must run from 0 or more to no less")
        for form in self.forms:
            if not _is_whole(form):
                raise DataError(f"the form {form!r} must be {{a}}, {{b}}, {{c}} joined by + - * and brackets")
        if not self.forms or not self.phrasings or any("{expression}" not in p for p in self.phrasings):
            raise DataError("there must be a form and a phrasing, and every phrasing must contain {expression}")


def evaluate(expression: str) -> Fraction:
    """The exact value of numbers joined by + - * / and brackets; ValueError for anything else."""

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
    """Whether a form makes expressions, and none with a division: answers are whole numbers."""
    try:
        evaluate(form.format(a=7, b=5, c=3))
    except (KeyError, IndexError, ValueError):
        return False
    return "/" not in form


def held_out(expression: str) -> bool:
    """Whether the expression belongs to the test split."""
    return int(hashlib.md5(expression.encode(), usedforsecurity=False).hexdigest(), 16) % 10 == 0


def draws(rng: random.Random, split: Split, spec: ArithmeticSpec) -> Iterator[Problem]:
    """Problems of one split without end, repeats among them."""
    misses = 0
    while misses < _MISSES_IN_A_ROW:
        numbers = {name: rng.randint(*getattr(spec, name)) for name in ("a", "b", "c")}
        expression = rng.choice(spec.forms).format(**numbers)
        question = rng.choice(spec.phrasings).format(expression=expression)
        misses += 1
        if held_out(expression) == (split == "test"):
            misses = 0
            yield Problem(expression, int(evaluate(expression)), question)
    raise DataError(f"these forms and ranges have no {split} problem; widen the ranges")


def problems(count: int, seed: int, split: Split, spec: ArithmeticSpec | None = None) -> list[Problem]:
    """`count` different problems; asking for more of them only adds to the end."""
    spec = spec or ArithmeticSpec()
    found: dict[str, Problem] = {}
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
