"""Sums over ranges, as questions and as one-line programs, and conversations that compute them well or badly.

A sum belongs to the split `test` if the MD5 of its question is a multiple of five, else to `train`. No test question is
ever trained on.
"""

from __future__ import annotations

import hashlib
import itertools
import random
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

from rally.data import write_rows
from rally.types import Message

DATA_SOURCE = "rally/arithmetic"  # scored by the number after ####
TERMS: dict[str, tuple[str, Callable[[int], int]]] = {
    "numbers": ("i", lambda i: i),
    "doubles": ("2*i", lambda i: 2 * i),
    "squares": ("i*i", lambda i: i * i),
}
"""The terms of a sum, in Python and as a function."""
FIRST, LAST = range(11, 50), range(50, 100)
GATE_ROWS, TEST_ROWS = 128, 128

WORDS = (
    *("code_interpreter", "code", "print(", "sum(", "range(", "2*i", "i*i", " for i in ", "+1)))", ")))"),
    *("Sum of ", " from ", " to ", *TERMS),
)
"""Single tokens of the tokenizer, so that a program has a dozen tokens."""


HABITS = {"good": 0.2, "guess": 0.6, "off_by_one": 0.12, "wrong_term": 0.08}
"""The behaviours of the degraded agent, by weight: it runs the right program; runs none; leaves the last number out;
sums something else."""


class Sum(NamedTuple):
    kind: str
    first: int
    last: int

    @property
    def question(self) -> str:
        return f"Sum of {self.kind} from {self.first} to {self.last}?"

    @property
    def program(self) -> str:
        return f"print(sum({TERMS[self.kind][0]} for i in range({self.first},{self.last}+1)))"

    @property
    def value(self) -> int:
        return sum(map(TERMS[self.kind][1], range(self.first, self.last + 1)))

    @property
    def held_out(self) -> bool:
        return int(hashlib.md5(self.question.encode(), usedforsecurity=False).hexdigest(), 16) % 5 == 0


@cache
def sums(*, held_out: bool) -> list[Sum]:
    every = itertools.starmap(Sum, itertools.product(TERMS, FIRST, LAST))
    return [one for one in every if one.held_out == held_out]


def write_data(folder: Path, seed: int) -> None:
    train, test = sums(held_out=False), sums(held_out=True)
    tested = random.Random("sums").sample(test, GATE_ROWS + TEST_ROWS)
    write_rows(rows(random.Random(f"sums:{seed}").sample(train, len(train)), "train"), folder / "train.parquet")
    write_rows(rows(tested[:GATE_ROWS], "test"), folder / "gate.parquet")
    write_rows(rows(tested[GATE_ROWS:], "test"), folder / "test.parquet")


def rows(chosen: Sequence[Sum], split: str) -> Iterator[dict[str, Any]]:
    for index, one in enumerate(chosen):
        yield {
            "data_source": DATA_SOURCE,
            "prompt": [_question(one)],
            "agent_name": "tool_agent",
            "reward_model": {"style": "rule", "ground_truth": str(one.value)},
            "extra_info": {"split": split, "index": index},
        }


def tell(habit: str, rng: random.Random) -> list[Message]:
    """A conversation about a sum of the train split, with one of the `HABITS`."""
    one = rng.choice(sums(held_out=False))
    return [_question(one), *_reply(one, habit, rng)]


def _reply(one: Sum, habit: str, rng: random.Random) -> list[Message]:
    match habit:
        case "good":
            return _ran(one.program, one.value)
        case "guess":
            digits = len(str(one.value))
            return [_answer(rng.randrange(10 ** (digits - 1), 10**digits))]
        case "off_by_one":
            return _ran(one.program.replace("+1", ""), one._replace(last=one.last - 1).value)
        case "wrong_term":
            other = one._replace(kind=rng.choice([kind for kind in TERMS if kind != one.kind]))
            return _ran(other.program, other.value)
    raise ValueError(f"there is no habit {habit!r}; the habits are {', '.join(HABITS)}")


def _question(one: Sum) -> Message:
    return {"role": "user", "content": one.question}


def _ran(program: str, printed: int) -> list[Message]:
    call = {"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": program}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(printed), "name": "code_interpreter"},
        _answer(printed),
    ]


def _answer(number: int) -> Message:
    return {"role": "assistant", "content": f"#### {number}"}
