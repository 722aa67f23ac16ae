"""Finds agent loops by registered name, dotted path, or an entry of `agent_loop_config_path`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import yaml

from rally.importing import INSTALLED, ImportFailed, import_module, look_in, of_installed_verl
from rally.loops.base import AgentLoopBase, LoopError
from rally.util.checksums import UNREADABLE, reason

Loop = TypeVar("Loop", bound=type[AgentLoopBase])
_LOOPS: dict[str, type[AgentLoopBase]] = {}
# Loops of packages above this one, imported by path when they are requested, like a user's loop.
_BY_PATH = {"black_box": "rally.gateway.BlackBoxAgentLoop"}


@dataclass(frozen=True)
class LoopSpec:
    """A loop class and the options it is made with."""

    cls: type[AgentLoopBase]
    options: Mapping[str, Any] = field(default_factory=dict)


def register(name: str) -> Callable[[Loop], Loop]:
    """Class decorator that registers a loop under `name` (for a row's `agent_name` or `agent.default_agent_loop`)."""

    def add(cls: Loop) -> Loop:
        _LOOPS[name] = _checked(cls, getattr(cls, "__qualname__", repr(cls)))
        return cls

    return add


def find_loop(name: str, extra: Mapping[str, LoopSpec] | None = None) -> LoopSpec:
    """The loop called `name`: from a config file's entries, from the registry, or by dotted path."""
    if extra and name in extra:
        return extra[name]
    if name in _LOOPS:
        return LoopSpec(_LOOPS[name])
    if "." in name or name in _BY_PATH:
        return LoopSpec(import_loop(_BY_PATH.get(name, name)))
    known = ", ".join(sorted({*_LOOPS, *_BY_PATH, *(extra or {})}))
    raise LoopError(f"there is no agent loop called {name!r}; known are {known}, or give a dotted path to a class")


def import_loop(path: str) -> type[AgentLoopBase]:
    """Import `package.module.Class` from the import path or the working directory."""
    module_name, _, class_name = path.rpartition(".")
    look_in(Path.cwd())
    try:
        module = import_module(module_name)
    except ImportFailed as failed:
        raise LoopError(
            f"the agent loop {path} cannot be imported ({failed}); correct its path or the file"
        ) from failed
    if not hasattr(module, class_name):
        raise LoopError(f"there is no class {class_name} in {module_name}; correct the name of the agent loop {path}")
    return _checked(getattr(module, class_name), path)


def _checked(cls: Any, name: str) -> type[AgentLoopBase]:
    if of_installed_verl(cls):
        raise LoopError(f"{name} {INSTALLED}")
    if not (isinstance(cls, type) and issubclass(cls, AgentLoopBase)):
        raise LoopError(f"{name} is not a subclass of rally.loops.AgentLoopBase; an agent loop must be one")
    return cls


def load_loop_config(path: str | Path) -> dict[str, LoopSpec]:
    """The entries of `agent.agent_loop_config_path`: a YAML list of {name, _target_, ...options}."""
    try:
        entries = yaml.safe_load(Path(path).read_text(encoding="utf-8"))
    except (yaml.YAMLError, *UNREADABLE) as broken:
        raise LoopError(f"the agent loop file {path} cannot be read ({reason(broken)}); correct it") from broken
    shape = f"{path} must be a list of entries with name and _target_"
    if not isinstance(entries, list):
        raise LoopError(shape)
    specs: dict[str, LoopSpec] = {}
    for entry in entries:
        named = isinstance(entry, dict) and all(isinstance(entry.get(key), str) for key in ("name", "_target_"))
        if not named:
            raise LoopError(f"{shape}, not {entry!r}")
        options = {k: v for k, v in entry.items() if k not in ("name", "_target_")}
        specs[entry["name"]] = LoopSpec(import_loop(entry["_target_"]), options)
    return specs
