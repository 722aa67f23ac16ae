"""Loads the simulated users of an interaction YAML. A mistake raises one InteractionError that names the entry.

interaction:
  - class_name: my_users.Teacher         # below the working folder, the YAML's folder, or installed
    name: teacher                        # default: the class name without "Interaction", in lower case
    config: {patience: 3}
  - name: gsm8k                          # built-in
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rally.interactions.base import BaseInteraction, InteractionError
from rally.interactions.gsm8k import Gsm8kInteraction
from rally.tools.loader import import_class, read_yaml
from rally.types import RallyError

BUILT_IN: dict[str, type[BaseInteraction]] = {"gsm8k": Gsm8kInteraction}
SAME_AS_BUILT_IN = {"verl.interactions.gsm8k_interaction.Gsm8kInteraction": "gsm8k"}
ENTRY_KEYS = {"name", "class_name", "config"}


def load_interactions(source: str | Path | Mapping[str, Any]) -> list[BaseInteraction]:
    """The simulated users of a YAML file, or of a mapping of the same form."""
    if isinstance(source, Mapping):
        where, content, folder = "the interaction config", source, Path.cwd()
    else:
        path = Path(source).expanduser()
        where, content, folder = str(path), _read(path), path.resolve().parent
    entries = content.get("interaction") if isinstance(content, Mapping) else None
    if not isinstance(entries, (list, tuple)) or not entries:
        raise InteractionError(f"{where} must have a list under the key `interaction`")
    return [_interaction(entry, folder, f"{where}, entry {index + 1}") for index, entry in enumerate(entries)]


def _read(path: Path) -> Any:
    try:
        return read_yaml(path, "the interaction config")
    except RallyError as error:
        raise InteractionError(str(error)) from None


def _interaction(entry: Any, folder: Path, where: str) -> BaseInteraction:
    if not isinstance(entry, Mapping):
        raise InteractionError(f"{where}: an entry must be a mapping with class_name, or the name of a built-in one")
    unknown = sorted(map(str, set(entry) - ENTRY_KEYS))
    if unknown:
        raise InteractionError(f"{where}: unknown key {unknown[0]!r}; known are {', '.join(sorted(ENTRY_KEYS))}")
    config = entry.get("config") or {}
    if not isinstance(config, Mapping):
        raise InteractionError(f"{where}: config must be a mapping, not {type(config).__name__}")
    if not isinstance(entry.get("name") or "", str):
        raise InteractionError(f"{where}: name must be a text, not {entry['name']!r}")
    cls = _class(entry, folder, where)
    name = entry.get("name") or cls.__name__.removesuffix("Interaction").lower()
    try:
        interaction = cls({**config, "name": name})
    except RallyError as error:
        raise InteractionError(f"{where}: {error}") from None
    except (Exception, SystemExit, GeneratorExit) as error:  # a user's constructor may fail in any way
        raise InteractionError(f"{where}: the constructor failed: {type(error).__name__}: {error}") from error
    interaction.name = name  # a constructor need not call super().__init__
    return interaction


def _class(entry: Mapping[str, Any], folder: Path, where: str) -> type[BaseInteraction]:
    if "class_name" not in entry:
        name = entry.get("name")
        if name not in BUILT_IN:
            known = ", ".join(BUILT_IN)
            raise InteractionError(f"{where}: {name!r} is not a built-in one ({known}); for your own, write class_name")
        return BUILT_IN[name]
    class_name = str(entry["class_name"])
    if class_name in SAME_AS_BUILT_IN:
        return BUILT_IN[SAME_AS_BUILT_IN[class_name]]
    try:
        cls = import_class(class_name, (Path.cwd(), folder), where)
    except RallyError as error:
        raise InteractionError(str(error)) from error
    if not (isinstance(cls, type) and issubclass(cls, BaseInteraction)):
        raise InteractionError(f"{where}: {class_name} must be a subclass of rally.interactions.BaseInteraction")
    if cls.generate_response is BaseInteraction.generate_response:
        raise InteractionError(f"{where}: {class_name} has no method generate_response; define one")
    return cls
