"""A user's module is found where users expect it: a file, which may import its neighbours, or an installed module; or
`ImportFailed` says in a few words why it cannot be had. What it imports from verl is there (`verl_names.py`)."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

from rally.types import RallyError


class ImportFailed(RallyError):
    """The text is the reason alone; who wanted the module says in a sentence what for, and what to do."""


def import_path(path: str, kind: str) -> ModuleType:
    """`my_reward.py` or `folder/my_reward.py`, `my_package.reward`, or `pkg://my_package.reward`."""
    dotted = path.removeprefix("pkg://")
    if dotted == path and (path.endswith(".py") or "/" in path):
        return import_file(Path(path), kind)
    return import_module(dotted)


def import_module(name: str) -> ModuleType:
    offer_verl_names()
    try:
        return importlib.import_module(name)
    except Exception as error:  # foreign code: whatever its import raises is the user's to read
        raise ImportFailed(reason_of(error)) from error


def import_file(path: Path, kind: str) -> ModuleType:
    """The file as a module of its own; `kind` keeps a tool and a reward of the same name apart."""
    offer_verl_names()
    path = path.resolve()
    look_in(path.parent)
    name = f"rally_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportFailed("its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # foreign code: whatever its import raises is the user's to read
        del sys.modules[name]
        raise ImportFailed(reason_of(error)) from error
    return module


def look_in(folder: Path) -> None:
    """Last on the import path, so that a user's file cannot hide an installed package."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def reason_of(error: Exception) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def offer_verl_names() -> None:
    """Let files written for verl find the names they import. Found by name: that package stands above this one."""
    importlib.import_module("rally.compat.verl.import_names").offer_verl_names()


def of_installed_verl(cls: Any) -> bool:
    """Whether a class derives from one of a verl that is installed here, which Rally knows nothing of."""
    return isinstance(cls, type) and any(base.__module__.split(".")[0] == "verl" for base in cls.__mro__)


INSTALLED = "derives from the verl that is installed here; use an environment without it, where its names are Rally's"
