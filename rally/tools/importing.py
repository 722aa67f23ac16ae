"""Guarantees: a user's tool class or file is found where users expect it, or one sentence says why it is not."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from types import ModuleType
from typing import Any

from rally.importing import ImportFailed, import_file, import_module, look_in
from rally.tools.schema import ToolConfigError
from rally.verl_names import INSTALLED, of_installed_verl


def import_class(dotted: str, folders: Iterable[Path], where: str) -> Any:
    """What `package.module.Name` names, looked for on the import path, then below each of `folders`."""
    module_name, _, name = dotted.rpartition(".")
    if not module_name:
        raise ToolConfigError(f"{where}: class_name {dotted!r} must be written as package.module.Class")
    module = _import_module(module_name, folders, where)
    try:
        found = getattr(module, name)
    except AttributeError:
        raise ToolConfigError(f"{where}: module {module_name} has no {name!r}") from None
    if of_installed_verl(found):
        raise ToolConfigError(f"{where}: {dotted} {INSTALLED}")
    return found


def import_tool_file(path: Path) -> ModuleType:
    """The module in the file `path`, which may import its neighbours."""
    if not path.is_file():
        raise ToolConfigError(f"the tool file {path} does not exist")
    if path.suffix != ".py":
        raise ToolConfigError(f"the tool file {path} is not a Python file")
    try:
        return import_file(path, "tools_of")
    except ImportFailed as failed:
        raise _broken(f"the tool file {path}", failed) from failed


def _import_module(name: str, folders: Iterable[Path], where: str) -> ModuleType:
    candidates = [Path(folder).resolve() for folder in folders]
    relative = Path(*name.split("."))
    for folder in candidates:
        if (folder / relative.with_suffix(".py")).is_file() or (folder / relative / "__init__.py").is_file():
            look_in(folder)
    try:
        return import_module(name)
    except ImportFailed as failed:
        cause = failed.__cause__
        absent = isinstance(cause, ModuleNotFoundError) and f"{name}.".startswith(f"{cause.name}.")
        if not absent:
            raise _broken(f"{where}: module {name}", failed) from failed
        looked = ", ".join(dict.fromkeys(map(str, candidates)))
        raise ToolConfigError(f"{where}: there is no module {name!r}, neither installed nor below {looked}") from None


def _broken(what: str, failed: ImportFailed) -> ToolConfigError:
    advice, cause = "", failed.__cause__
    if isinstance(cause, ImportError) and (cause.name or "").split(".")[0] == "verl":
        advice = "; the names of verl that Rally stands in for are listed in docs/from_verl.md"
    return ToolConfigError(f"{what} cannot be imported: {failed}{advice}")
