"""The languages of the sandbox: for each, a file name and one or two commands.

A language that is not installed raises UnsupportedProgram with the command that installs it.
"""

from __future__ import annotations

import importlib.util
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import metadata

from rally.sandbox.types import Program, SandboxError, UnsupportedProgram

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
LANGUAGES = ("python", "pytest", "bash", "nodejs", "cpp")

Command = dict[str, object]


@dataclass(frozen=True)
class CommandPlan:
    """The file that holds the code, and the commands to run."""

    main: str
    steps: list[Command]


def plan(program: Program) -> CommandPlan:
    """The commands that run `program`; UnsupportedProgram if its language is unknown or not installed."""
    if program.language not in _PLANS:
        known = ", ".join(LANGUAGES)
        raise UnsupportedProgram(f"the language {program.language!r} is not supported; use one of {known}")
    name, commands = _PLANS[program.language](program)
    while name in program.files:
        name = f"_{name}"
    steps = [_step(program, command, name, is_last=command is commands[-1]) for command in commands]
    return CommandPlan(name, steps)


def installed() -> list[str]:
    """The languages that are installed on this machine."""
    languages = []
    for language in LANGUAGES:
        try:
            plan(Program(code="", language=language))
        except SandboxError:
            continue
        languages.append(language)
    return languages


_Commands = tuple[str, list[list[str] | None]]
_MAIN = "\0main"  # a placeholder for the name of the file


def _python(program: Program) -> _Commands:
    if program.args:
        raise UnsupportedProgram("a python program takes no args; pass its input by stdin or files")
    return "main.py", [None]


def _pytest(program: Program) -> _Commands:
    if importlib.util.find_spec("pytest") is None:
        raise UnsupportedProgram("the language 'pytest' is not installed here; install it with: pip install pytest")
    command = ["/usr/bin/env", "PYTEST_DISABLE_PLUGIN_AUTOLOAD=1", sys.executable, "-m", "pytest"]
    for plugin in ("no:cacheprovider", *_plugins_named_in(program)):
        command += ["-p", plugin]
    return "test_main.py", [[*command, _MAIN, *program.args]]


def _plugins_named_in(program: Program) -> list[str]:
    """The installed pytest plugins whose name or module the tests mention. Loading all would take seconds."""
    text = "\n".join([program.code, *(content.decode("utf-8", "replace") for content in program.files.values())])
    words = set(re.findall(r"\w+", text))
    return [name for name, module in _pytest_plugins() if words & {name, module}]


@cache
def _pytest_plugins() -> list[tuple[str, str]]:
    """Name and top-level module of the installed plugins."""
    return [(entry.name, entry.module.partition(".")[0]) for entry in metadata.entry_points(group="pytest11")]


def _bash(program: Program) -> _Commands:
    return "main.sh", [[_which("bash", "bash"), _MAIN, *program.args]]


def _nodejs(program: Program) -> _Commands:
    return "main.js", [[_which("node", "nodejs"), _MAIN, *program.args]]


def _cpp(program: Program) -> _Commands:
    compiler = _which("g++", "g++")
    return "main.cpp", [[compiler, "-std=c++17", _MAIN, "-o", "program", "-lpthread"], ["./program", *program.args]]


_PLANS: dict[str, Callable[[Program], _Commands]] = {
    "python": _python,
    "pytest": _pytest,
    "bash": _bash,
    "nodejs": _nodejs,
    "cpp": _cpp,
}


def _which(command: str, package: str) -> str:
    """The path of a command in the system's folders, the only ones that a sandbox sees."""
    path = shutil.which(command, path=SYSTEM_PATH)
    if path is None:
        raise UnsupportedProgram(f"{command} is not installed in {SYSTEM_PATH}; on Debian: apt-get install {package}")
    return path


def _step(program: Program, command: list[str] | None, name: str, is_last: bool) -> Command:
    return {
        "name": "run" if is_last else "compile",
        "timeout": program.timeout if is_last else program.compile_timeout,
        "argv": None if command is None else [name if argument == _MAIN else argument for argument in command],
    }
