"""Every YAML of this package that says what it is for is a recipe, and is found by its name.

`gsm8k_tool` is the file train.yaml of that folder for `rally train`, and sft.yaml for `rally sft`; `gsm8k_tool/lora` is
lora.yaml. Files whose name begins with sft are for `rally sft`. Files without `recipe:` notes are parts of others.
"""

from __future__ import annotations

import functools
from difflib import get_close_matches
from pathlib import Path
from typing import Literal, NamedTuple

from rally.config.files import read_document
from rally.types import RallyError

FOLDER = Path(__file__).parent
Command = Literal["train", "sft"]


class RecipeError(RallyError):
    """A recipe that does not exist as asked, in one sentence."""


class Recipe(NamedTuple):
    name: str
    command: Command
    path: Path
    about: str
    hardware: str
    needs: tuple[str, ...]
    """Commands that make what it reads, in order."""

    @property
    def line(self) -> str:
        """How it is run."""
        return f"rally {self.command} --recipe {self.name}"

    def told(self) -> list[str]:
        """What a user has to know of it, line by line."""
        first = [f"    first: {command}" for command in self.needs]
        return [self.line, f"    {self.about}; {self.hardware}", *first]


@functools.cache
def list_recipes() -> tuple[Recipe, ...]:
    """All recipes, folder by folder; in each the supervised start first, then the main one, then its variants."""
    found = [recipe for path in FOLDER.glob("*/*.yaml") if (recipe := _read(path)) is not None]
    return tuple(sorted(found, key=lambda r: (r.path.parent.name, r.command != "sft", r.path.stem != "train", r.name)))


def find_recipe(name: str, command: Command) -> Path:
    """The YAML of the recipe called `name`."""
    known = [recipe for recipe in list_recipes() if recipe.command == command]
    for recipe in known:
        if recipe.name == name:
            return recipe.path
    names = [recipe.name for recipe in known]
    close = get_close_matches(name, names, 1)
    advice = f"did you mean {close[0]}?" if close else f"there are {', '.join(names)}."
    raise RecipeError(f"`rally {command}` has no recipe {name!r}; {advice}")


def _read(path: Path) -> Recipe | None:
    document = read_document(path)
    if not document.notes.about:
        return None
    command: Command = "sft" if path.stem.startswith("sft") else "train"
    name = path.parent.name if path.stem == command else f"{path.parent.name}/{path.stem}"
    # What an overlay replaces is no longer read: needs are asked of the whole, not of each layer.
    needs = document.notes.read_by(document.merged)
    commands = tuple(dict.fromkeys(needs.values()))
    return Recipe(name, command, path, document.notes.about, document.notes.hardware, commands)
