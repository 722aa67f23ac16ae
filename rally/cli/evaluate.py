"""`rally eval`: validates a model."""

from __future__ import annotations

import typer

from rally.cli.config_args import LOOSE, ConfigArgs, RecipeName, recipe_path, split_config_args
from rally.cli.console import quiet_console

app = typer.Typer()


@app.command("eval", context_settings=LOOSE)
def evaluate(args: ConfigArgs = None, recipe: RecipeName = None) -> None:
    """Validate a model on data.val_files, without training."""
    from rally.config import load_config

    path, overrides = split_config_args(args)
    config = load_config(recipe_path(recipe, path, "eval"), overrides, note=quiet_console().note)
    console = quiet_console()
    from rally.distributed import evaluate as run

    outcome = run(config, console)
    rows = [[name, f"{value:.4f}"] for name, value in sorted(outcome.metrics.items()) if name.startswith("val-")]
    console.table("validation", rows)
    console.note(f"episodes and metrics are in {outcome.folder}")
