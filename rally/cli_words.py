"""The words of a command that runs a configuration: a file, if there is one, then overrides."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from rally.types import RallyError

Words = Annotated[
    list[str] | None,
    typer.Argument(
        help="A YAML file first, if there is one, then key=value overrides such as data.train_batch_size=64.",
        metavar="[CONFIG.yaml] [KEY=VALUE]...",
        show_default=False,
    ),
]


def split_words(words: list[str] | None) -> tuple[Path | None, list[str]]:
    """A leading word without `=` is the configuration file; all others are overrides."""
    words = list(words or [])
    path = Path(words.pop(0)) if words and "=" not in words[0] else None
    stray = [w for w in words if "=" not in w]
    if stray:
        raise RallyError(f"{stray[0]!r} is neither the configuration file (it comes first) nor key=value")
    return path, words
