"""Trains a small transformer from random weights to write programs for a real sandbox, on one CPU core in minutes.

    python examples/code_agent/code_agent.py [--seed 0] [--steps 20] [--out runs/code_agent] [KEY=VALUE ...]

The model is fine-tuned to answer questions such as `Sum of squares from 13 to 57?` with a line of Python for
`code_interpreter`, then deliberately degraded (guesses, ranges that end one too early). GRPO then repairs it with a
reward for the right number alone. Every program runs in the sandbox of docs/sandbox.md, which needs bubblewrap. Install
it with `make sandbox`.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import sums

from rally.demo.training_stages import Course, CourseResult, CourseSettings, run_course
from rally.track import RunConsole
from rally.types import RallyError

COURSE = Course(
    title="An agent learns to write programs",
    data_source=sums.DATA_SOURCE,
    write_data=sums.write_data,
    tell=sums.tell,
    habits=sums.HABITS,
    tools=["code_interpreter"],
    words=sums.WORDS,
)
SETTINGS = CourseSettings(clean_blocks=(150, 75, 75), habit_steps=50, grpo_steps=20, prompts=16)


def learn(folder: Path, settings: CourseSettings, console: RunConsole, overrides: Sequence[str] = ()) -> CourseResult:
    """The whole example; all its files are under `folder`."""
    return run_course(COURSE, folder, settings, console, overrides)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seed", type=int, default=0, help="of the weights, the order of questions and all sampling")
    parser.add_argument("--steps", type=int, default=SETTINGS.grpo_steps, help="GRPO steps")
    parser.add_argument("--out", type=Path, default=Path("runs/code_agent"), help="the run folder")
    parser.add_argument("overrides", nargs="*", metavar="KEY=VALUE", help="overrides of the GRPO stage")
    given = parser.parse_args()
    try:
        learn(given.out, replace(SETTINGS, seed=given.seed, grpo_steps=given.steps), RunConsole(), given.overrides)
    except RallyError as mistake:
        sys.exit(str(mistake))


if __name__ == "__main__":
    main()
