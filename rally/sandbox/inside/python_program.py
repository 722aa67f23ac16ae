"""Runs Python code in this forked interpreter as `python main.py` would, without our own frames in tracebacks.

The code runs as the module `__main__` of an existing file, with the exit codes, tracebacks, threads and exit handlers
of a script. Random generators that the fork server loaded are seeded again, so that runs draw different numbers.
"""

from __future__ import annotations

import ast
import atexit
import json
import linecache
import os
import socket
import sys
import threading
import traceback
import types
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from rally.sandbox.inside.execution_request import ExecutionRequest

_SEEDED = (("numpy.random", "seed"), ("sympy.core.random", "seed"))


@dataclass(frozen=True)
class ProgramResult:
    """The exit code, and the repr of a final expression if asked for."""

    code: int
    echo: str | None = None


def run_script(request: ExecutionRequest, path: list[str], link: socket.socket) -> NoReturn:
    """Run a program from start to exit."""
    namespace = _fresh_main(request, path)
    result = execute(request.code, namespace, namespace["__file__"], request.echo)
    if result.echo is not None:
        _send_result(link, result)
    threading._shutdown()  # type: ignore[attr-defined]  # a script waits for its threads
    atexit._run_exitfuncs()
    _flush()
    # A full shutdown of the interpreter would take longer than most programs.
    os._exit(result.code)


def run_session(request: ExecutionRequest, path: list[str], link: socket.socket) -> NoReturn:
    """Run cells in one namespace, until the supervisor ends the process."""
    namespace = _fresh_main(request, path)
    for number, line in enumerate(_lines(link), start=1):
        name = f"<cell {number}>"
        cell = json.loads(line)["code"]
        linecache.cache[name] = (len(cell), None, cell.splitlines(keepends=True), name)
        result = execute(cell, namespace, name, request.echo)
        _flush()
        _send_result(link, result)
    os._exit(0)


def execute(code: str, namespace: dict[str, Any], name: str, echo: bool) -> ProgramResult:
    """Run `code`; with `echo`, also return the repr of a final expression that is not None."""
    try:
        parsed = ast.parse(code, name)
        last = parsed.body[-1] if echo and parsed.body else None
        if isinstance(last, ast.Expr):
            del parsed.body[-1]
        exec(compile(parsed, name, "exec", dont_inherit=True), namespace)
        if not isinstance(last, ast.Expr):
            return ProgramResult(0)
        value = eval(compile(ast.Expression(last.value), name, "eval", dont_inherit=True), namespace)
        return ProgramResult(0, None if value is None else repr(value))
    except SystemExit as end:
        return ProgramResult(_exit_code(end))
    except BaseException as error:  # noqa: BLE001 - any exception of the program is its result
        _show(error)
        return ProgramResult(1)


def _fresh_main(request: ExecutionRequest, path: list[str]) -> dict[str, Any]:
    main = types.ModuleType("__main__")
    main.__file__ = os.path.join(request.folder, request.main)
    sys.modules["__main__"] = main
    sys.argv = [request.main]
    sys.path[:] = [request.folder, *path]
    for module, function in _SEEDED:
        if module in sys.modules:
            getattr(sys.modules[module], function)()
    return main.__dict__


def _exit_code(end: SystemExit) -> int:
    if end.code is None or isinstance(end.code, int):
        return (end.code or 0) & 0xFF
    sys.stderr.write(f"{end.code}\n")
    return 1


def _show(error: BaseException) -> None:
    trace = error.__traceback__
    while trace is not None and trace.tb_frame.f_code.co_filename == __file__:
        trace = trace.tb_next
    with suppress(Exception):  # the program may have closed or replaced stderr
        if sys.excepthook is sys.__excepthook__:
            traceback.print_exception(type(error), error, trace)  # finds the source of cells in linecache
        else:
            sys.excepthook(type(error), error.with_traceback(trace), trace)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with suppress(Exception):  # closed by the program, or the disk is full
            stream.flush()


def _send_result(link: socket.socket, result: ProgramResult) -> None:
    with suppress(OSError):
        link.sendall(json.dumps({"code": result.code, "echo": result.echo}).encode() + b"\n")


def _lines(link: socket.socket) -> Iterator[bytes]:
    with link.makefile("rb") as stream:
        yield from stream
