"""`rally sft`: supervised fine-tuning, `--check` and `--dry-run`."""

from __future__ import annotations

from typing import Annotated

import typer

from rally.cli.config_args import LOOSE, ConfigArgs, ConfigName, ConfigPath, RecipeName, recipe_path, split_config_args
from rally.cli.console import quiet_console
from rally.cli.train import DryRun, Restart

app = typer.Typer()


Check = Annotated[
    bool,
    typer.Option("--check", help="Prove that every conversation teaches what would be sampled; 1 if one does not."),
]


@app.command(context_settings=LOOSE)
def sft(
    args: ConfigArgs = None,
    recipe: RecipeName = None,
    dry_run: DryRun = False,
    check: Check = False,
    restart: Restart = False,
    config_path: ConfigPath = None,
    config_name: ConfigName = None,
) -> None:
    """Fine-tune on conversations with tools; the loss is on assistant turns only."""
    from rally.config import load_sft_config

    path, overrides = split_config_args(args, config_path, config_name)
    config = load_sft_config(recipe_path(recipe, path, "sft"), overrides, note=quiet_console().note)
    config.require_training()
    console = quiet_console()
    from rally.runs import sft as sft_run

    if check:
        raise typer.Exit(0 if sft_run.check(config, console) else 1)
    if dry_run:
        sft_run.show(config, console)
        return
    if restart:
        from rally.cli.restart import own_command, run_with_restarts

        raise typer.Exit(run_with_restarts(own_command(), config.run_dir / "checkpoints", console.note))
    from rally.distributed import sft as run

    outcome = run(config, console)
    console.note(f"done: {outcome.steps} steps, checkpoints in {outcome.folder / 'checkpoints'}")
