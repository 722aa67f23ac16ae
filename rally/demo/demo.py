"""The course of `rally demo`: a small transformer learns to use a calculator, on a CPU, in a few minutes.

It is fine-tuned on the tool format, then deliberately degraded with bad habits (mostly guessing). GRPO, an ordinary
`rally train` run over rows on disk, then teaches it by reward alone to call the tool. The gain is a change of habit;
the arithmetic is the calculator's.
"""

from __future__ import annotations

import random
from pathlib import Path

from rally.data import write_rows
from rally.demo.training_stages import Course
from rally.recipes.arithmetic import data as arithmetic
from rally.recipes.arithmetic.data import Habit, conversation
from rally.types import Message

SPEC = arithmetic.ArithmeticSpec(forms=("{a}*{b}+{c}", "{a}*{b}-{c}", "{a}+{b}*{c}"))
GATE_PROMPTS, TEST_PROMPTS = 128, 200


def write_data(folder: Path, seed: int) -> None:
    """Write the training rows and two disjoint held-out sets: for the gate, and for the reported success."""
    write_rows(arithmetic.rows(4096, seed, "train", SPEC), folder / "train.parquet")
    held_out = list(arithmetic.rows(GATE_PROMPTS + TEST_PROMPTS, 777, "test", SPEC))
    write_rows(held_out[:GATE_PROMPTS], folder / "gate.parquet")
    write_rows(held_out[GATE_PROMPTS:], folder / "test.parquet")


def tell(habit: Habit, rng: random.Random) -> list[Message]:
    return conversation(next(arithmetic.draws(rng, "train", SPEC)), habit, rng)


CALCULATOR = Course(
    title="Rally demo: an agent learns to use a calculator",
    data_source=arithmetic.DATA_SOURCE,
    write_data=write_data,
    tell=tell,
    habits={"good": 0.28, "guess": 0.6, "malformed": 0.06, "wrong_digit": 0.06},
    tools=["calculator"],
)
