"""Row 6: steps of the demo agent with every tracker and a trace of every episode, against the same steps with neither.

The demo is the hardest case: a step of about a second makes 256 episodes. The wall time is disturbed by other load, so
the note also has the processor time of the training process, and that of the second process, which runs beside it at a
lower priority.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from io import StringIO
from pathlib import Path
from typing import NamedTuple

from rich.console import Console

from benchmarks.demo_models import DemoModels
from benchmarks.measure import REPETITIONS, Row, Timings
from rally.config import load_config
from rally.demo.demo import CALCULATOR
from rally.demo.training_stages import CourseSettings, course_config
from rally.runs import train as run
from rally.track import RunConsole

STEPS = 5  # a round; the first step is its warm-up
GOAL = 0.98  # of the speed without
LIBRARIES = ("tensorboard", "mlflow", "wandb")
ON = (
    "trainer.logger=[console,tensorboard,mlflow,wandb]",
    "actor_rollout_ref.rollout.trace.backend=mlflow",
    "actor_rollout_ref.rollout.trace.token2text=true",
)


class Clocks(NamedTuple):
    wall: float
    processor: float


class Watch(RunConsole):
    """A hidden console that records when each step was reported."""

    def __init__(self) -> None:
        super().__init__(Console(file=StringIO()))
        self.told: list[Clocks] = []

    def step_line(self, step: int, total: int, metrics: Mapping[str, float]) -> None:
        self.told.append(Clocks(time.perf_counter(), time.process_time()))

    def steps(self) -> list[Clocks]:
        """The duration of each step, from one line to the next; it includes the export of the line before."""
        pairs = zip(self.told, self.told[1:], strict=False)
        return [Clocks(b.wall - a.wall, b.processor - a.processor) for a, b in pairs]


def sinks_row(demo: DemoModels) -> Row:
    missing = [name for name in LIBRARIES if find_spec(name) is None]
    on: list[Clocks] = []
    off: list[Clocks] = []
    second = 0.0
    with _one_store():
        for seed in range(REPETITIONS):
            before = _children()
            off += steps(demo, seed, ())
            between = _children()
            on += [] if missing else steps(demo, seed, ON)
            second += (_children() - between) - (between - before)  # both have workers for the reward
    note = "not measured" if missing else _note(on, off, second / (REPETITIONS * STEPS))
    return Row(
        what="one GRPO step of the demo agent with TensorBoard, MLflow and W&B, and its 256 episodes as traces",
        against=f"not installed: {', '.join(missing)}" if missing else "the same step with the run folder alone",
        goal=GOAL,
        timings=Timings(tuple(s.wall for s in on), tuple(s.wall for s in off)),
        note=note,
    )


def _note(on: list[Clocks], off: list[Clocks], second: float) -> str:
    with_them, without = (statistics.median(s.processor for s in some) for some in (on, off))
    return (
        f"processor time of the training process a step: {with_them:.3f} s against {without:.3f} s "
        f"({100 * (with_them / without - 1):+.1f} %); of the second process, its start included: {second:.2f} s"
    )


def _children() -> float:
    times = os.times()
    return times.children_user + times.children_system


def steps(demo: DemoModels, seed: int, overrides: tuple[str, ...]) -> list[Clocks]:
    """An ordinary run of the demo's configuration, without validation."""
    with tempfile.TemporaryDirectory() as folder:
        config = course_config(CALCULATOR, demo.folder, CourseSettings(grpo_steps=STEPS, seed=seed))
        all_of_them = [
            f"trainer.default_local_dir={folder}/run",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "data.val_files=null",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
            *overrides,
        ]
        watch = Watch()
        run.train(load_config(overrides=all_of_them, base=config), watch)
    return watch.steps()


@contextmanager
def _one_store() -> Iterator[None]:
    """One MLflow database for all rounds, because creating one takes seconds; nothing is sent to a server."""
    with tempfile.TemporaryDirectory() as folder:
        before = dict(os.environ)
        os.environ["MLFLOW_TRACKING_URI"] = f"sqlite:///{Path(folder) / 'mlflow.db'}"
        os.environ["WANDB_MODE"] = "offline"
        try:
            yield
        finally:
            os.environ.clear()
            os.environ.update(before)
