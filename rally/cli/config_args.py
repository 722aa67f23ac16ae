"""Arguments of commands that run a configuration: an optional file, then key=value overrides."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
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
"""Settings of commands with such arguments: a key with dashes is accepted as an argument and then reported."""

ConfigPath = Annotated[Path | None, typer.Option("--config-path", help="With --config-name: the folder of the file.")]
ConfigName = Annotated[str | None, typer.Option("--config-name", help="The configuration file, less its .yaml.")]


def split_config_args(
    args: list[str] | None, config_path: Path | None = None, config_name: str | None = None
) -> tuple[Path | None, list[str]]:
    """The configuration file and the overrides. A leading argument without `=` is the file, as is --config-name."""
    overrides = list(args or [])
    for arg in overrides:
        if arg.startswith("-"):
            advice = "write a key without dashes" if "=" in arg else "--help lists the options"
            raise RallyError(f"there is no option {arg}; {advice}")
    path = Path(overrides.pop(0)) if overrides and "=" not in overrides[0] else None
    if path is not None and (config_path or config_name):
        raise RallyError(f"--config-name and {path} both name a configuration; give one of them, then key=value")
    if config_path is not None and config_name is None:
        raise RallyError("--config-path names a folder; name the file in it with --config-name")
    if config_name is not None:
        path = (config_path or Path()) / f"{config_name.removesuffix('.yaml')}.yaml"
    stray = [arg for arg in overrides if "=" not in arg]
    if stray:
        raise RallyError(
            f"{stray[0]!r} is neither the configuration file (it comes first) nor key=value; write a key and its value "
            "as one word, without spaces"
        )
    return path, overrides


@contextmanager
def written_as(options: Mapping[str, str]) -> Iterator[None]:
    """A block that shares code with a run: its errors name a key of the configuration by the option it came from."""
    try:
        yield
    except RallyError as mistake:
        text = str(mistake)
        longest_first = sorted(options, key=len, reverse=True)
        keys = "|".join(re.escape(key) + (r"(?!\w)" if key[-1].isalnum() else "") for key in longest_first)
        named = re.sub(rf"(?<![\w.])(?:{keys})", lambda key: options[key.group()], text)
        if named == text:
            raise
        renamed = RallyError(named)
        renamed.exit_code = mistake.exit_code
        raise renamed from mistake


RecipeName = Annotated[
    str | None, typer.Option("--recipe", help="Run a recipe by its name; `rally recipes` lists them.")
]


def recipe_path(recipe: str | None, path: Path | None, command: Any) -> Path | None:
    """The configuration file of a run, or that of the named recipe."""
    if recipe is None:
        return path
    if path is not None:
        raise RallyError(f"--recipe {recipe} and {path} both name a configuration; give one of them, then key=value")
    from rally.recipes import find_recipe

    return find_recipe(recipe, command)
