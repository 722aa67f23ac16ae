"""Guarantees: a user's tool class or file is found where users expect it, or one sentence says why it is not."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rally.tools.schema import ToolConfigError


def import_class(dotted: str, folders: Iterable[Path], where: str) -> Any:
    """What `package.module.Name` names, looked for on the import path, then below each of `folders`."""
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise ToolConfigError(f"{where}: class_name {dotted!r} must be written as package.module.Class")
    module = _import_module(module_name, folders, where)
    try:
        return getattr(module, name)
    except AttributeError:
        raise ToolConfigError(f"{where}: module {module_name} has no {name!r}") from None


def import_file(path: Path) -> ModuleType:
    """The module in the file `path`, which may import its neighbours."""
    if not path.is_file():
        raise ToolConfigError(f"the tool file {path} does not exist")
    _look_in(path.parent)
    name = f"rally_tools_of_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ToolConfigError(f"the tool file {path} is not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # type hints and dataclasses look their module up there
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # a user's file may fail in any way
        del sys.modules[name]
        raise _broken(f"the tool file {path}", error) from error
    return module


def _import_module(name: str, folders: Iterable[Path], where: str) -> ModuleType:
    candidates = [Path(folder).resolve() for folder in folders]
    relative = Path(*name.split("."))
    for folder in candidates:
        if (folder / relative.with_suffix(".py")).is_file() or (folder / relative / "__init__.py").is_file():
            _look_in(folder)
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise _broken(f"{where}: module {name}", error) from error
        looked = ", ".join(map(str, candidates))
        raise ToolConfigError(f"{where}: there is no module {name!r}, neither installed nor below {looked}") from None
    except Exception as error:  # a user's module may fail in any way
        raise _broken(f"{where}: module {name}", error) from error


def _look_in(folder: Path) -> None:
    """Last on the import path, so that a user's file cannot hide an installed package."""
    if str(folder.resolve()) not in sys.path:
        sys.path.append(str(folder.resolve()))


def _broken(what: str, error: Exception) -> ToolConfigError:
    advice = ""
    if isinstance(error, ModuleNotFoundError) and (error.name or "").split(".")[0] == "verl":
        advice = "; import BaseTool and ToolResponse from rally.tools instead, BaseInteraction from rally.interactions"
    reason = str(error).splitlines()[0] if str(error) else "no reason given"
    return ToolConfigError(f"{what} cannot be imported: {type(error).__name__}: {reason}{advice}")
