"""`rally recipes` and `rally toy-model`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rally.cli.console import quiet_console
from rally.types import RallyError

app = typer.Typer()


@app.command()
def recipes() -> None:
    """List the recipes: how each is run, what it is, its hardware, and what makes its data."""
    from rally.recipes import list_recipes

    for recipe in list_recipes():
        typer.echo("\n".join(recipe.summary_lines()))  # not the console, which would wrap commands


@app.command("toy-model")
def toy_model(
    out: Out,
    words: Annotated[
        Path | None, typer.Option(help="A text file; each of its lines becomes one token.", exists=True, dir_okay=False)
    ] = None,
    seed: Seed = 0,
) -> None:
    """Make the demo's small model with random weights, for recipes that train on a CPU from nothing."""
    console = quiet_console()
    try:
        lines = words.read_text(encoding="utf-8").splitlines() if words else []
    except UnicodeDecodeError as undecodable:
        raise RallyError(f"--words={words} is not UTF-8 text ({undecodable}); name a text file") from None
    out.mkdir(parents=True, exist_ok=True)  # a library would only log that it is a file
    from rally.chat import tiny_tokenizer
    from rally.demo.training_stages import small_model
    from rally.models.load import reloading_problem, save_tokenizer

    tokenizer = tiny_tokenizer(lines)
    model = small_model(tokenizer, seed)
    model.save_pretrained(out)
    save_tokenizer(tokenizer, out)
    if problem := reloading_problem(tokenizer, model.config):
        console.warn_once("tokenizer", problem)
    console.note(f"a model with random weights is in {out}")


Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")]


Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
