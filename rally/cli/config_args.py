"""The words of a command that runs a configuration: a file, if there is one, then overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from rally.types import RallyError

ConfigArgs = Annotated[
    list[str] | None,
    typer.Argument(
        help="A YAML file first, if there is one, then key=value overrides such as data.train_batch_size=64.",
        metavar="[CONFIG.yaml] [KEY=VALUE]...",
        show_default=False,
    ),
]

LOOSE = {"ignore_unknown_options": True}
"""Of commands with such words: a key written with dashes becomes one of them, so that a sentence can say so."""

ConfigPath = Annotated[Path | None, typer.Option("--config-path", help="With --config-name: the folder of the file.")]
ConfigName = Annotated[str | None, typer.Option("--config-name", help="The configuration file, less its .yaml.")]


def split_config_args(
    words: list[str] | None, config_path: Path | None = None, config_name: str | None = None
) -> tuple[Path | None, list[str]]:
    """A leading word without `=`, or the name, is the configuration file; all others are overrides."""
    words = list(words or [])
    for word in words:
        if word.startswith("-"):
            key = "write a key without dashes" if "=" in word else "--help lists those there are"
            raise RallyError(f"there is no option {word}; {key}")
    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    if path is not None and (config_path or config_name):
        raise RallyError(f"--config-name and {path} both name a configuration; give one of them, then key=value")
    if config_path is not None and config_name is None:
        raise RallyError("--config-path names a folder; name the file in it with --config-name")
    if config_name is not None:
        path = (config_path or Path()) / f"{config_name.removesuffix('.yaml')}.yaml"
    stray = [w for w in words if "=" not in w]
    if stray:
        told = f"{stray[0]!r} is neither the configuration file (it comes first) nor key=value"
        raise RallyError(f"{told}; write a key and its value as one word, without spaces")
    return path, words


RecipeName = Annotated[
    str | None, typer.Option("--recipe", help="Run a recipe by its name; `rally recipes` lists them.")
]


def recipe_path(recipe: str | None, path: Path | None, command: Any) -> Path | None:
    """The configuration file of a run, which a recipe's name may stand for."""
    if recipe is None:
        return path
    if path is not None:
        raise RallyError(f"--recipe {recipe} and {path} both name a configuration; give one of them, then key=value")
    from rally.recipes import find_recipe

    return find_recipe(recipe, command)
