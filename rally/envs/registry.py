"""Finds environments by name: `adapter/environment` for those of other packages, or the dotted path of a user's class.

The package of an adapter is imported when one of its environments is asked for; if it is missing, the error names the
install command.
"""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

from rally.envs.base import EnvError, Environment
from rally.importing import ImportFailed, import_module, look_in


class EnvAdapter(NamedTuple):
    """An adapter: the package it imports, and how that is installed. `rally env make` installs `requirements` into an
    environment of its own, without what they require themselves."""

    package: str
    install: str
    requirements: tuple[str, ...] = ()


ADAPTERS = {
    "reasoning_gym": EnvAdapter("reasoning_gym", "pip install 'rally-rl[reasoning-gym]'"),
    "gymnasium": EnvAdapter("gymnasium", "pip install 'rally-rl[gymnasium]'"),
    "textarena": EnvAdapter("textarena", "pip install 'rally-rl[textarena]'"),
    "aviary": EnvAdapter("aviary.core", "pip install 'rally-rl[aviary]'"),
    "tau2": EnvAdapter("tau2.gym.gym_agent", "pip install git+https://github.com/sierra-research/tau2-bench"),
    "openenv": EnvAdapter("openenv.core", "pip install openenv in an environment of its own, and set env.python"),
    "bfcl": EnvAdapter(
        "bfcl_eval",
        "rally env make bfcl --out envs/bfcl, and set env.python=envs/bfcl/bin/python",
        # What its data and checkers import: 130 MB instead of 5.9 GB with the SDKs of all vendors.
        (
            *("bfcl-eval==2026.3.23", "filelock==3.20.0", "mpmath==1.3.0", "numpy==1.26.4", "overrides==7.7.0"),
            *("soundfile==0.14.0", "cffi", "pycparser", "tqdm", "typing_extensions"),
            *("tree_sitter==0.21.3", "tree-sitter-java==0.21.0", "tree-sitter-javascript==0.21.4"),
        ),
    ),
}
"""The adapters by name. Each is a module of `rally.envs.adapters` with `make(name, **args)` and `names()`."""


def find_environment(name: str) -> Callable[..., Environment]:
    """What makes the objects of an environment from its arguments."""
    prefix, slash, rest = name.partition("/")
    if slash and rest and prefix in ADAPTERS:
        return partial(adapter_module(prefix).make, rest)
    module_name, dot, class_name = name.rpartition(".")
    if slash or not dot:
        known = ", ".join(f"{adapter}/..." for adapter in ADAPTERS)
        raise EnvError(f"there is no environment {name!r}; write {known}, or the dotted path of a class of your own")
    look_in(Path.cwd())
    try:
        found = getattr(import_module(module_name), class_name, None)
    except ImportFailed as failed:
        raise EnvError(f"the environment {name} cannot be imported ({failed}); correct its path or the file") from None
    if not (inspect.isclass(found) and issubclass(found, Environment)):
        raise EnvError(f"{module_name} has no class {class_name} that is a rally.envs.Environment; correct env.name")
    return found


def adapter_module(adapter: str) -> ModuleType:
    """The module of an adapter. Raises EnvError with the install command if its package is missing."""
    package, install, _ = ADAPTERS[adapter]
    try:
        importlib.import_module(package)
    except ImportError as error:
        missing = f" (it cannot be imported: {error})" if not isinstance(error, ModuleNotFoundError) else ""
        if isinstance(error, ModuleNotFoundError) and (error.name or "") not in package:
            missing = f" (its dependency {error.name} is missing)"
        raise EnvError(f"environments of {adapter} need the package {package}{missing}; run: {install}") from None
    return importlib.import_module(f"rally.envs.adapters.{adapter}")


def names_of(adapter: str) -> Sequence[str]:
    """The environments of an adapter, with its prefix."""
    return [f"{adapter}/{name}" for name in adapter_module(adapter).names()]
