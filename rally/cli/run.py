"""`rally run RECIPE`: makes what the recipe lacks, trains, evaluates, and says where the results are."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from rally.cli.config_args import LOOSE, split_config_args
from rally.cli.console import quiet_console
from rally.types import RallyError

if TYPE_CHECKING:
    from rally.recipes.pipeline import Stage
    from rally.track import RunConsole

app = typer.Typer()

FORWARDED = (signal.SIGTERM, signal.SIGHUP)  # a stage saves what it has and ends


@app.command(context_settings=LOOSE)
def run(
    recipe: Annotated[str, typer.Argument(help="Its name, such as gsm8k_tool/shaping; `rally recipes` lists them.")],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(help="Overrides of the training stage.", metavar="[KEY=VALUE]...", show_default=False),
    ] = None,
    model: Annotated[
        str | None, typer.Option(help="The base model: a folder or hub name, instead of the recipe's own.")
    ] = None,
    source: Annotated[
        str | None, typer.Option(help="A folder with the recipe's public data set, instead of the hub.")
    ] = None,
    show_plan: Annotated[
        bool, typer.Option("--dry-run", help="List the stages with their commands, and stop.")
    ] = False,
) -> None:
    """Run a whole recipe: data, supervised start, training, evaluation. A second call continues where it ended."""
    from rally.recipes import pipeline

    path, keys = split_config_args(overrides)
    if path is not None:
        raise RallyError(f"{path} is not key=value; `rally run` takes one recipe by its name, then overrides")
    options = pipeline.RecipeOptions(overrides=keys, model=model, source=source)
    console = quiet_console()
    stages = pipeline.preparation(recipe, options)
    if show_plan:
        rows = [[stage.title, "done" if stage.done else "to do", stage.line] for stage in stages]
        train = shlex.join(["rally", "train", "--recipe", recipe, *pipeline.training_overrides(recipe, options)])
        console.table(f"stages of {recipe}", [*rows, ["training", "", train], ["evaluation", "", "of its checkpoint"]])
        return
    for stage in stages:
        _execute(stage, console)
    training = pipeline.training(recipe, options)
    _execute(training, console)
    evaluation = pipeline.evaluation(recipe, options)
    _execute(evaluation, console)
    _report(training, evaluation, console)


def _execute(stage: Stage, console: RunConsole) -> None:
    """Run one stage in a process of its own, so that it returns all its memory; nothing of it runs where it is done."""
    if stage.done:
        console.note(f"{stage.title}: already done ({', '.join(map(str, stage.outputs))})")
        return
    console.note(f"{stage.title}: {stage.line}")
    child = subprocess.Popen([sys.executable, "-m", "rally", *stage.args])
    before = {number: signal.signal(number, lambda n, _: child.send_signal(n)) for number in FORWARDED}
    try:
        code = child.wait()
    except KeyboardInterrupt:  # the stage received it too, saves what it has and ends
        code = child.wait()
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if code:
        raise typer.Exit(code if code > 0 else 128 - code)
    missing = [str(path) for path in stage.outputs if not path.exists()]
    if missing:
        raise RallyError(f"`{stage.line}` ended without {', '.join(missing)}; run it alone to see why")
    stage.write_record()


def _report(training: Stage, evaluation: Stage, console: RunConsole) -> None:
    from rally.track import run_summary, write_curve

    checkpoint = training.outputs[0]
    folder = checkpoint.parents[1]
    console.show(run_summary(folder))
    console.table(
        "where to look",
        [
            ["every episode", f"rally view {folder}"],
            ["curve", str(write_curve(folder).html)],
            ["checkpoint", str(checkpoint / "actor")],
            ["evaluation of it", str(evaluation.outputs[0].parent)],
        ],
    )
