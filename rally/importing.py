"""Imports a user's module from a file, which may import modules of its folder, or from the import path.

Any failure raises `ImportFailed` with the reason. Imports from verl are resolved by `rally.compat.verl.import_names`.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rally.types import RallyError

_being_imported: list[Path | str] = []


def being_imported() -> Path | str | None:
    """The file or module that a function of this file imports now; None if there is none."""
    return _being_imported[-1] if _being_imported else None


class ImportFailed(RallyError):
    """A module cannot be imported. The text is only the reason; the caller adds which module, and what to do."""


def import_path(path: str, kind: str) -> ModuleType:
    """Import `my_reward.py`, `folder/my_reward.py`, `my_package.reward` or `pkg://my_package.reward`."""
    dotted = path.removeprefix("pkg://")
    if dotted == path and (path.endswith(".py") or "/" in path):
        return import_file(Path(path), kind)
    return import_module(dotted)


def import_functions(places: Sequence[tuple[str, str]], kind: str) -> list[Any]:
    """What (path, name) names, for each of `places`. Functions of one file share its module, which runs once."""
    modules = {path: import_path(path, kind) for path in dict.fromkeys(path for path, _ in places)}
    return [getattr(modules[path], name) for path, name in places]


def import_module(name: str) -> ModuleType:
    """Import a module by its dotted name, from the import path or the working directory."""
    offer_verl_names()
    look_in(Path.cwd())
    _being_imported.append(name)
    try:
        return importlib.import_module(name)
    except (Exception, SystemExit, GeneratorExit) as error:  # user code may raise anything
        raise ImportFailed(reason_of(error)) from error
    finally:
        _being_imported.pop()


def import_file(path: Path, kind: str) -> ModuleType:
    """Import a file. `kind` is part of the module name, so that a tool and a reward file may have the same name."""
    offer_verl_names()
    path = path.resolve()
    look_in(Path.cwd())
    look_in(path.parent)
    name = f"rally_{kind}_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportFailed("its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses and typing look up the module there
    _being_imported.append(path)
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit, GeneratorExit) as error:  # user code may raise anything
        del sys.modules[name]
        raise ImportFailed(reason_of(error)) from error
    finally:
        _being_imported.pop()
    return module


def look_in(folder: Path) -> None:
    """Append the folder to the import path. It is last, so that a user's file cannot hide an installed package."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def reason_of(error: BaseException) -> str:
    return " ".join(f"{type(error).__name__}: {error}".split())


def offer_verl_names() -> None:
    """Make verl's import names available. Imported by name, because that package is in a higher layer."""
    importlib.import_module("rally.compat.verl.import_names").offer_verl_names()


def of_installed_verl(cls: Any) -> bool:
    """Whether a class derives from a class of an installed verl, which Rally cannot use."""
    return isinstance(cls, type) and any(base.__module__.split(".")[0] == "verl" for base in cls.__mro__)


INSTALLED = "derives from the installed verl; use an environment without verl, where Rally provides its names"
