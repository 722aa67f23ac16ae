"""`rally demo`: trains a small agent from nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rally.cli.console import quiet_console

app = typer.Typer()


@app.command()
def demo(
    out: Annotated[Path, typer.Option("--out", "-o", help="The run folder.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(help="Of the weights, the problems and all sampling.")] = 0,
    steps: Annotated[int, typer.Option(help="GRPO steps.", min=1)] = 40,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides of the GRPO stage.", metavar="[KEY=VALUE]...", show_default=False),
    ] = None,
) -> None:
    """Train a small agent from nothing, on a CPU, in a few minutes: it learns to use a calculator."""
    console = quiet_console()
    from rally.demo.demo import CALCULATOR
    from rally.demo.training_stages import CourseSettings, run_course

    run_course(CALCULATOR, out, CourseSettings(seed=seed, grpo_steps=steps), console, overrides or [])
