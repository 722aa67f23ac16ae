"""`rally recipes`, `rally toy-model` and the data of recipes: thin commands, each of which calls one function."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rally.cli_console import quiet_console
from rally.types import RallyError

app = typer.Typer()
data_app = typer.Typer()

Out = Annotated[Path, typer.Option("--out", "-o", help="The folder to write to.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn.")]
Name = Annotated[str | None, typer.Option("--recipe", help="Run a recipe by its name; `rally recipes` lists them.")]


def recipe_path(recipe: str | None, path: Path | None, command: Any) -> Path | None:
    """The configuration file of a run, which a recipe's name may stand for."""
    if recipe is None:
        return path
    if path is not None:
        raise RallyError(f"--recipe {recipe} and {path} both name a configuration; give one of them, then key=value")
    from rally.recipes import find_recipe

    return find_recipe(recipe, command)


@app.command()
def recipes() -> None:
    """List the recipes: how each is run, what it is, its hardware, and what makes its data."""
    from rally.recipes import list_recipes

    for recipe in list_recipes():
        typer.echo("\n".join(recipe.told()))  # not the console, which would break commands at its width


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
    from rally.chat import tiny_tokenizer
    from rally.train.course import small_model

    tokenizer = tiny_tokenizer(words.read_text(encoding="utf-8").splitlines() if words else ())
    small_model(tokenizer, seed).save_pretrained(out)
    tokenizer.save_pretrained(out)
    console.note(f"a model with random weights is in {out}")


@data_app.command("search_r1")
def search_r1(
    out: Out,
    source: Annotated[
        Path | None,
        typer.Option(help="A folder with train.jsonl and corpus.jsonl; HotpotQA is downloaded if not given."),
    ] = None,
    config: Annotated[Path | None, typer.Option(help="A YAML with `system` and `user`, the prompt to use.")] = None,
    sft: Annotated[bool, typer.Option("--sft", help="Also write conversations for `rally sft`.")] = False,
) -> None:
    """Multi-hop questions for an agent that searches, held-out ones apart, and the corpus to index."""
    from rally.recipes import build

    _tell(build.search_r1(out, source, config, sft))


@data_app.command()
def retool(
    out: Out,
    train: Annotated[int, typer.Option(help="Generated training problems.", min=1)] = 2048,
    test: Annotated[int, typer.Option(help="Generated problems held out.", min=1)] = 100,
    sft: Annotated[
        int, typer.Option(help="Conversations for `rally sft`; their programs are really run.", min=0)
    ] = 1280,
    gsm8k: Annotated[
        Path | None,
        typer.Option(
            help="A GSM8K folder, or `hub`: its train split is added, and of its test split --test rows to validate on."
        ),
    ] = None,
    aime: Annotated[Path | None, typer.Option(help="A folder with AIME's test.jsonl, to validate on.")] = None,
    seed: Seed = 0,
) -> None:
    """Whole-number problems with verified answers and levels, for an agent that writes code."""
    from rally.recipes import build

    _tell(build.retool(out, build.RetoolSizes(train, test, sft), gsm8k, aime, seed))


@data_app.command()
def triage(
    out: Out,
    train: Annotated[int, typer.Option(help="Training incidents.", min=1)] = 2048,
    test: Annotated[int, typer.Option(help="Incidents with codes that are held out.", min=1)] = 200,
    clean: Annotated[int, typer.Option(help="Conversations for `rally sft`, as they should be.", min=0)] = 160 * 48,
    mixed: Annotated[int, typer.Option(help="Conversations after these, with bad habits among them.", min=0)] = 60 * 48,
    seed: Seed = 0,
) -> None:
    """Incidents, the knowledge base that explains them, and conversations in two rounds."""
    from rally.recipes import build

    _tell(build.triage(out, build.TriageSizes(train, test, clean, mixed), seed))


@data_app.command()
def geometry(
    out: Out,
    train: Annotated[int, typer.Option(help="Training figures.", min=1)] = 1024,
    test: Annotated[int, typer.Option(help="Figures held out.", min=1)] = 128,
    level: Annotated[list[int] | None, typer.Option(help="1 to 3, given once for each; all if not given.")] = None,
    source: Annotated[
        Path | None,
        typer.Option(help="A folder with train and test files of images, problem and answer, such as geometry3k."),
    ] = None,
    seed: Seed = 0,
) -> None:
    """Figures with one unknown, drawn with verified answers, for an agent that sees."""
    from rally.recipes import build

    _tell(build.geometry(out, build.GeometrySizes(train, test), tuple(level or (1, 2, 3)), source, seed))


def _tell(written: Any) -> None:
    quiet_console().table("written", [[str(w.path), f"{w.rows:,} rows"] for w in written])
