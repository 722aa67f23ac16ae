"""A tracker is told the whole configuration, as it was saved in the run folder: without its secrets."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

_USER = re.compile(r"//[^/@\s]+@")


@dataclass(frozen=True)
class Place:
    """The run as trackers know it."""

    folder: Path
    project: str
    name: str
    after: int

    def config(self) -> dict[str, Any]:
        saved = self.folder / "config.yaml"
        return dict(yaml.safe_load(saved.read_text("utf-8")) or {}) if saved.exists() else {}

    def config_text(self) -> str:
        saved = self.folder / "config.yaml"
        return saved.read_text("utf-8") if saved.exists() else ""


def without_password(text: str) -> str:
    """The text with no user and password in its addresses: those of servers and databases may have them."""
    return _USER.sub("//***@", text)


def flat(tree: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    """Every leaf under its dotted key, as text."""
    for key, value in tree.items():
        if isinstance(value, Mapping) and value:
            yield from flat(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", str(value)
