"""`rally from-verl`: the command of Rally that does what a script of verl does."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer()


@app.command("from-verl")
def from_verl(script: Annotated[Path, typer.Argument(help="A shell script that starts verl.")]) -> None:
    """Print the `rally train` command for a script of verl, and what becomes of each key. The script is not run."""
    from rally.config.verl_script import from_verl as translate

    typer.echo(translate(script))
