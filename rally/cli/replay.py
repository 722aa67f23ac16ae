"""`rally replay`: replays a recorded episode or update and prints the differences."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from rally.cli.console import quiet_console

if TYPE_CHECKING:
    from rally.config import Config
    from rally.track import RunConsole

app = typer.Typer()


@app.command()
def replay(
    run: Annotated[Path, typer.Argument(help="The run folder.")],
    episode: Annotated[
        str | None, typer.Option(help="Its id, such as t000003-00001-2; ids are in episodes/ of the folder.")
    ] = None,
    update: Annotated[int | None, typer.Option(help="Instead of an episode: the step whose update to repeat.")] = None,
    config: Annotated[Path | None, typer.Option(help="Instead of the run's own config.yaml.")] = None,
    checkpoint: Annotated[Path | None, typer.Option(help="The weights to sample with, if not those kept.")] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            help="Overrides, such as another reward function.", metavar="[KEY=VALUE]...", show_default=False
        ),
    ] = None,
) -> None:
    """Render, score and sample a recorded episode again, or repeat an update: 0 if all is the same, 1 if not, 2 if that
    cannot be done."""
    console = quiet_console()
    from rally.config import load_config

    if (episode is None) == (update is None):
        raise typer.BadParameter("give either --episode or --update")
    settings = load_config(config or run / "config.yaml", overrides or [])
    if episode is None:
        assert update is not None
        raise typer.Exit(_repeat_update(run, update, settings, console))
    from rally.replay.replay import replay as run_again

    replayed = run_again(run, episode, settings, checkpoint)
    console.note(replayed.title)
    for finding in replayed.findings:
        console.note(f"{finding.part}: {finding.verdict}: {finding.text}")
        if finding.details:
            console.table("", [["", "recorded", "now"], *map(list, finding.details)])
    if replayed.changed:
        console.note(f"since the run was made: {', '.join(replayed.changed)}")
    raise typer.Exit(replayed.exit_code)


def _repeat_update(run: Path, step: int, settings: Config, console: RunConsole) -> int:
    from rally.replay.update_replay import replay_update

    replayed = replay_update(run, step, settings, console)
    title = f"update of step {step}: {replayed.episodes} episodes, {replayed.compared} tensors compared"
    if not replayed.differences:
        console.note(f"{title}, all bits are the same")
        return 0
    name, largest = max(replayed.differences, key=lambda pair: pair[1])
    console.note(f"{title}, {len(replayed.differences)} differ, {name} the most, by {largest:.3g}")
    return 1
