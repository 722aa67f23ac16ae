"""Lists the recipes of this package and finds them by name.

A recipe is a YAML file with `recipe:` notes; files without notes are parts of others. `gsm8k_tool` is train.yaml of
that folder for `rally train` and sft.yaml for `rally sft`; `gsm8k_tool/lora` is lora.yaml. Files whose names begin with
sft are for `rally sft`, those whose names begin with eval for `rally eval`.
"""

from __future__ import annotations

import functools
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple

from rally.config.yaml_files import read_document
from rally.types import RallyError

FOLDER = Path(__file__).parent
Command = Literal["train", "sft", "eval"]


_PREFIXES: tuple[Command, ...] = ("sft", "eval")


class RecipeError(RallyError):
    """There is no recipe of that name."""


class Recipe(NamedTuple):
    """One recipe: how it is run and what it needs."""

    name: str
    command: Command
    path: Path
    about: str
    hardware: str
    needs: tuple[str, ...]
    """The commands that make its input files, in order."""

    @property
    def line(self) -> str:
        """The command that runs it."""
        return f"rally {self.command} --recipe {self.name}"

    def summary_lines(self) -> list[str]:
        """The command, description and preparation, for `rally recipes`."""
        first = [f"    first: {command}" for command in self.needs]
        return [self.line, f"    {self.about}; {self.hardware}", *first]


@functools.cache
def list_recipes() -> tuple[Recipe, ...]:
    """All recipes by folder; in each folder first supervised fine-tuning, then the main recipe, its variants, and the
    evaluations."""
    recipes = [recipe for path in FOLDER.glob("*/*.yaml") if (recipe := _read(path)) is not None]
    place = {"sft": 0, "train": 1, "eval": 2}
    order = sorted(recipes, key=lambda r: (r.path.parent.name, place[r.command], r.path.stem != "train", r.name))
    return tuple(order)


def evaluations_of(name: str) -> list[str]:
    """The evaluations on other data that belong to a recipe: those of its folder."""
    folder = name.partition("/")[0]
    return [r.name for r in list_recipes() if r.command == "eval" and r.path.parent.name == folder]


def find_recipe(name: str, command: Command) -> Path:
    """The YAML of the recipe called `name`. `rally eval` takes recipes of training, too."""
    commands = (command, "train") if command == "eval" else (command,)
    known = [recipe for recipe in list_recipes() if recipe.command in commands]
    for recipe in known:
        if recipe.name == name:
            return recipe.path
    names = [recipe.name for recipe in known]
    close = get_close_matches(name, names, 1)
    advice = f"did you mean {close[0]}?" if close else f"the recipes are {', '.join(names)}."
    raise RecipeError(f"there is no recipe {name!r} for `rally {command}`; {advice}")


def _read(path: Path) -> Recipe | None:
    document = read_document(path)
    if not document.notes.about:
        return None
    command: Command = next((one for one in _PREFIXES if path.stem.startswith(one)), "train")
    name = path.parent.name if path.stem == command else f"{path.parent.name}/{path.stem}"
    # Computed from the merged document, because a file that an overlay replaces is not needed.
    needs = document.notes.read_by(document.merged)
    commands = tuple(dict.fromkeys(needs.values()))
    return Recipe(name, command, path, document.notes.about, document.notes.hardware, commands)
