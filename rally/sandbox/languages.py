"""Guarantees: a language is a file name and one or two commands, found here or refused with what to install."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass

from rally.sandbox.program import Program, SandboxError

SYSTEM_PATH = "/usr/local/bin:/usr/bin:/bin"
LANGUAGES = ("python", "pytest", "bash", "nodejs", "cpp")

Command = dict[str, object]


@dataclass(frozen=True)
class CommandPlan:
    main: str
    steps: list[Command]


def plan(program: Program) -> CommandPlan:
    """The commands that run `program`."""
    if program.language not in _PLANS:
        known = ", ".join(LANGUAGES)
        raise SandboxError(f"this sandbox does not run {program.language!r}; the languages are {known}")
    name, commands = _PLANS[program.language](program)
    while name in program.files:
        name = f"_{name}"
    steps = [_step(program, command, name, is_last=command is commands[-1]) for command in commands]
    return CommandPlan(name, steps)


def installed() -> list[str]:
    """The languages that would run on this machine."""
    found = []
    for language in LANGUAGES:
        try:
            plan(Program(code="", language=language))
        except SandboxError:
            continue
        found.append(language)
    return found


_Commands = tuple[str, list[list[str] | None]]
_MAIN = "\0main"  # stands for the file's name until that is known


def _python(program: Program) -> _Commands:
    if program.args:
        raise SandboxError("args are for the language 'pytest'; give a python program its input by stdin or files")
    return "main.py", [None]


def _pytest(program: Program) -> _Commands:
    if importlib.util.find_spec("pytest") is None:
        raise SandboxError("the language 'pytest' is not installed here; install it with: pip install pytest")
    return "test_main.py", [[sys.executable, "-m", "pytest", "-p", "no:cacheprovider", _MAIN, *program.args]]


def _bash(program: Program) -> _Commands:
    return "main.sh", [[_found("bash", "bash"), _MAIN, *program.args]]


def _nodejs(program: Program) -> _Commands:
    return "main.js", [[_found("node", "nodejs"), _MAIN, *program.args]]


def _cpp(program: Program) -> _Commands:
    compiler = _found("g++", "g++")
    return "main.cpp", [[compiler, "-std=c++17", _MAIN, "-o", "program", "-lpthread"], ["./program", *program.args]]


_PLANS: dict[str, Callable[[Program], _Commands]] = {
    "python": _python,
    "pytest": _pytest,
    "bash": _bash,
    "nodejs": _nodejs,
    "cpp": _cpp,
}


def _found(command: str, package: str) -> str:
    """Only below the system's folders: a sandbox sees no others."""
    path = shutil.which(command, path=SYSTEM_PATH)
    if path is None:
        raise SandboxError(f"{command} is not installed in {SYSTEM_PATH}; on Debian: apt-get install {package}")
    return path


def _step(program: Program, command: list[str] | None, name: str, is_last: bool) -> Command:
    return {
        "name": "run" if is_last else "compile",
        "timeout": program.timeout if is_last else program.compile_timeout,
        "argv": None if command is None else [name if word == _MAIN else word for word in command],
    }
