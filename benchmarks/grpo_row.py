"""Row 4: a whole GRPO step of the demo agent, 32 prompts x 8 episodes, against TRL's GRPOTrainer.

Both start each round from the same weights with the same task, tool, reward, lengths, learning rate and one optimizer
step per batch. For both, the time of a step includes rollout, tools, reward and update.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec
from io import StringIO
from pathlib import Path

from rich.console import Console

from benchmarks.demo_models import DemoModels
from benchmarks.measure import REPETITIONS, Row, Timings
from rally.config import load_config
from rally.demo.demo import CALCULATOR
from rally.demo.training_stages import CourseSettings, course_config
from rally.runs import train as run
from rally.track import RunConsole, RunFolder

STEPS = 3  # a round; the first step is its warm-up
TRL = "trl==1.16.0"


@dataclass(frozen=True)
class Step:
    """`sampled` is the mean number of tokens that the policy sampled in an episode."""

    seconds: float
    sampled: float


Round = Callable[[DemoModels, int, int], list[Step]]
"""Trains from the demo's start model for a number of steps with a seed."""


def grpo_row(demo: DemoModels) -> Row:
    trl = _trl_round()
    ours: list[Step] = []
    other: list[Step] = []
    for seed in range(REPETITIONS):
        ours += rally_steps(demo, STEPS, seed)[1:]
        other += trl(demo, STEPS, seed)[1:] if trl else []
    note = f"sampled tokens an episode: {_mean(ours):.1f}" + (f" against {_mean(other):.1f}" if other else "")
    return Row(
        what="one GRPO step of the demo agent: 32 prompts x 8, rollout with tools, reward, update",
        against="TRL GRPOTrainer with tools" if trl else f"TRL is not installed: pip install {TRL}",
        goal=2.0,
        timings=Timings(tuple(s.seconds for s in ours), tuple(s.seconds for s in other)),
        note=note,
    )


def _trl_round() -> Round | None:
    if find_spec("trl") is None:
        return None
    from benchmarks.trl_steps import trl_steps

    return trl_steps


def _mean(steps: list[Step]) -> float:
    return statistics.mean(s.sampled for s in steps)


def rally_steps(demo: DemoModels, count: int, seed: int) -> list[Step]:
    """An ordinary run of the demo's configuration, without validation."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "run"
        config = course_config(CALCULATOR, demo.folder, CourseSettings(grpo_steps=count, seed=seed))
        overrides = [
            f"trainer.default_local_dir={folder}",
            "trainer.save_freq=-1",
            "trainer.test_freq=-1",
            "data.val_files=null",
            "actor_rollout_ref.actor.ppo_mini_batch_size=32",
        ]
        run.train(load_config(overrides=overrides, base=config), RunConsole(Console(file=StringIO())))
        rows = RunFolder(folder).read_metrics()
    return [Step(row.metrics["timing_s/step"], row.metrics["sampled_tokens/mean"]) for row in rows]
