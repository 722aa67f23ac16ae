"""`rally run RECIPE`: makes what the recipe lacks, evaluates before and after training, and shows both."""

from __future__ import annotations

import shlex
import signal
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rally.cli.config_args import LOOSE, split_config_args
from rally.cli.console import quiet_console
from rally.types import RallyError

if TYPE_CHECKING:
    from rich.table import Table

    from rally.recipes.pipeline import Stage
    from rally.track import RunConsole

app = typer.Typer()

CORE = "val-core/"
HUB = {"--model": " or a hub name", "--source": ", or leave it out to read from the hub"}

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
    """Run a whole recipe: data, supervised start, training, and evaluations before and after it. A second call
    continues where it ended."""
    from rally.recipes import pipeline

    path, keys = split_config_args(overrides)
    if path is not None:
        raise RallyError(f"{path} is not key=value; `rally run` takes one recipe by its name, then overrides")
    for option, value in (("--model", model), ("--source", source)):
        if value is not None and _is_nowhere(value):
            raise RallyError(f"{option}={value} does not exist; name a folder{HUB[option]}")
    options = pipeline.RecipeOptions(overrides=keys, model=model, source=source)
    console = quiet_console()
    stages = pipeline.preparation(recipe, options)
    if show_plan:
        rows = [[stage.title, "done" if stage.done else "to do", stage.line] for stage in stages]
        train = shlex.join(["rally", "train", "--recipe", recipe, *pipeline.training_overrides(recipe, options)])
        rows += [["before training", "", "evaluation of the model as it is, where the training does not measure it"]]
        console.table(f"stages of {recipe}", [*rows, ["training", "", train], ["evaluation", "", "of its checkpoint"]])
        return
    for stage in stages:
        _execute(stage, console)
    before = pipeline.evaluations_before(recipe, options)
    for stage in before:
        _execute(stage, console)
    training = pipeline.training(recipe, options)
    _execute(training, console)
    after = pipeline.evaluations(recipe, options)
    for stage in after:
        _execute(stage, console)
    _report(training, before, after, console)


def _is_nowhere(place: str) -> bool:
    """Whether it is the path of something that does not exist, and no name on the hub."""
    path = Path(place).expanduser()
    return not place or (place.startswith(("/", ".", "~")) and not path.exists())


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


def _report(training: Stage, before: Sequence[Stage], after: Sequence[Stage], console: RunConsole) -> None:
    from rally.track import run_summary, write_curve

    checkpoint = training.outputs[0]
    folder = checkpoint.parents[1]
    console.show(run_summary(folder))
    console.show(_compared(folder, before, after))
    console.table(
        "where to look",
        [
            ["every episode", f"rally view {folder}"],
            ["curve", str(write_curve(folder).html)],
            ["checkpoint", str(checkpoint / "actor")],
            *(["evaluation of it", str(stage.outputs[0].parent)] for stage in after),
        ],
    )


def _compared(folder: Path, before: Sequence[Stage], after: Sequence[Stage]) -> Table:
    """Every validation metric of the model as it is, at the start of training, and of the last checkpoint."""
    from rich.table import Table

    from rally.track import RunFolder

    def validated(folders: Iterable[Path]) -> dict[str, float]:
        rows = (row for folder in folders for row in RunFolder(folder).read_metrics() if row.step == 0)
        return {k: v for row in rows for k, v in row.metrics.items() if k.startswith(CORE)}

    columns = {
        "as it is": validated(stage.outputs[0].parent for stage in before),
        "start of training": validated([folder]),
        "after": validated(stage.outputs[0].parent for stage in after),
    }
    table = Table(title="before and after", title_justify="left", box=None)
    table.add_column("validation", overflow="fold")  # a name that is cut could be that of another metric
    for column in columns:
        table.add_column(column, no_wrap=True)
    for name in dict.fromkeys(name for values in columns.values() for name in values):
        cells = [values.get(name) for values in columns.values()]
        table.add_row(name.removeprefix(CORE), *("" if cell is None else f"{cell:.4f}" for cell in cells))
    return table
