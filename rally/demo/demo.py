"""`rally demo`: a small transformer made on the spot learns to use a calculator, on a CPU, in a few minutes.

First it is taught the tool format by supervised fine-tuning, then spoiled with bad habits (most of all guessing), and
then GRPO, an ordinary `rally train` run over rows on disk, teaches it by reward alone to call the tool. The gain is a
change of habit; the arithmetic is the calculator's.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from rally.chat import ChatCodec
from rally.data import TaskSet, write_rows
from rally.demo import curriculum
from rally.demo.curriculum import Course, CourseResult, CourseSettings, run_course, small_model
from rally.engines.embedded import EmbeddedEngine
from rally.recipes.arithmetic import data as arithmetic
from rally.recipes.arithmetic.data import Habit, conversation
from rally.tools import ToolBox
from rally.track import RunConsole
from rally.types import Message

SPEC = arithmetic.ArithmeticSpec(forms=("{a}*{b}+{c}", "{a}*{b}-{c}", "{a}+{b}*{c}"))
GATE_PROMPTS, TEST_PROMPTS = 128, 200

DemoSettings = CourseSettings
DemoResult = CourseResult
make_model = small_model


def write_data(folder: Path, seed: int) -> None:
    """Rows to train on, and two disjoint sets of held-out ones: for the gate, and for the success that is reported."""
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


def run_demo(folder: Path, settings: DemoSettings, console: RunConsole, overrides: Sequence[str] = ()) -> DemoResult:
    """The whole demo; everything it makes is under `folder`."""
    return run_course(CALCULATOR, folder, settings, console, overrides)


def demo_toolbox() -> ToolBox:
    return CALCULATOR.toolbox()


def training_config(folder: Path, settings: DemoSettings) -> dict[str, Any]:
    """The GRPO stage, in the keys of any other run."""
    return curriculum.course_config(CALCULATOR, folder, settings)


def teach_format(
    model: PreTrainedModel, codec: ChatCodec, gate: TaskSet, settings: DemoSettings, console: RunConsole
) -> None:
    curriculum.teach(CALCULATOR, model, codec, gate, settings, console)


def success(engine: EmbeddedEngine, codec: ChatCodec, tasks: TaskSet) -> float:
    """Greedy success on held-out problems."""
    return curriculum.success(CALCULATOR, engine, codec, tasks)


def before_and_after(folder: Path) -> DemoResult:
    """Held-out success at the first and at the last validation of a run."""
    return curriculum.before_and_after(folder, CALCULATOR.data_source)
