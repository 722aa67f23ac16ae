"""`rally train`: training, recipes and `--dry-run`."""

from __future__ import annotations

from typing import Annotated

import typer

from rally.cli.config_args import LOOSE, ConfigArgs, ConfigName, ConfigPath, RecipeName, recipe_path, split_config_args
from rally.cli.console import quiet_console

app = typer.Typer()


DryRun = Annotated[bool, typer.Option("--dry-run", help="Show what would be run, and stop.")]
Restart = Annotated[
    bool, typer.Option("--restart", help="If a rank or a node is lost, start again from the last checkpoint.")
]


@app.command(context_settings=LOOSE)
def train(
    args: ConfigArgs = None,
    recipe: RecipeName = None,
    dry_run: DryRun = False,
    restart: Restart = False,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Train an agent by reinforcement learning. The same command resumes an interrupted run."""
    from rally.config import load_config

    path, overrides = split_config_args(args, config_path, config_name)
    config = load_config(recipe_path(recipe, path, "train"), overrides, note=quiet_console().note)
    config.require_training()
    console = quiet_console()
    if dry_run:
        from rally.runs.dry_run import dry_run as show

        show(config, console)
        return
    if restart:
        from rally.cli.restart import own_command, run_with_restarts

        raise typer.Exit(run_with_restarts(own_command(), config.run_dir / "checkpoints", console.note))
    from rally.distributed import train as run
    from rally.track import run_summary, write_curve

    outcome = run(config, console)
    console.show(run_summary(outcome.folder))
    console.note(f"curve: {write_curve(outcome.folder).html}, every episode: rally view {outcome.folder}")
