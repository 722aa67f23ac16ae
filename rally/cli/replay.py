"""`rally replay`: replays a recorded episode and prints the differences."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rally.cli.console import quiet_console

app = typer.Typer()


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    episode: Annotated[str, typer.Option(help="Its id, such as t000003-00001-2; ids are in episodes/ of the folder.")],
    config: Annotated[Path | None, typer.Option(help="Instead of the run's own config.yaml.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The weights to sample with, if not those kept.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides, such as another reward function.", metavar="[KEY=VALUE]...", show_default=False
        ),
    ] = None,
) -> None:
    """Render, score and sample a recorded episode again: 0 if all is the same, 1 if not, 2 if that cannot be done."""
    console = quiet_console()
    from rally.config import load_config
    from rally.replay.replay import replay as run_again

    replayed = run_again(run, episode, load_config(config or run / "config.yaml", overrides or []), checkpoint)
    console.note(replayed.title)
    for finding in replayed.findings:
        console.note(f"{finding.part}: {finding.verdict}: {finding.text}")
        if finding.details:
            console.table("", [["", "recorded", "now"], *map(list, finding.details)])
    if replayed.changed:
        console.note(f"since the run was made: {', '.join(replayed.changed)}")
    raise typer.Exit(replayed.exit_code)
