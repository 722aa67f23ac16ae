"""Runs Python programs in processes forked from one that has imported torch, transformers and Rally already, which
saves seconds of every program. All test processes share this one. It imports when the first program is asked for.

A program has its own working folder, environment, arguments, files and session. What is read before the imports, such
as OMP_NUM_THREADS, is that of the tests.

`python forked.py run WORDS` stands for `python WORDS`: it ends as the program does, passes SIGTERM, SIGINT and SIGHUP
on, and the program does not outlive it. It starts in a hundredth of a second.
"""

from __future__ import annotations

import gc
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any

PLACE = "RALLY_TESTS_TEMPLATE"
"""The environment variable with the address of the process."""

IMPORTED = (
    *("torch", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.modeling_auto", "httpx"),
    *("transformers.models.auto.tokenization_auto", "pyarrow.parquet", "uvicorn", "starlette.applications", "peft"),
    *("torch.distributed.tensor", "torch.distributed.fsdp"),
    *("jsonschema", "langchain_openai", "langgraph.prebuilt", "mcp", "mcp_types", "mlflow", "openai", "pytest"),
    *("tensorboard.backend.event_processing.event_accumulator", "wandb"),
    *("rally.runs.train", "rally.runs.sft", "rally.runs.evaluate", "rally.runs.build", "rally.services.engine"),
)
PASSED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


class Template:
    """The process to fork from. It ends with the tests."""

    def __init__(self) -> None:
        self._home = tempfile.mkdtemp(prefix="rally-tests-")
        place = f"{self._home}/socket"
        listener = socket.socket(socket.AF_UNIX)
        listener.bind(place)
        listener.listen(64)
        self._ours, theirs = socket.socketpair()
        files = [listener.fileno(), theirs.fileno()]
        self._process = subprocess.Popen([sys.executable, __file__, "listen", *map(str, files)], pass_fds=files)
        listener.close()
        theirs.close()
        os.environ[PLACE] = place

    def close(self) -> None:
        self._ours.close()
        self._process.wait()
        shutil.rmtree(self._home)


def forked_command(words: Sequence[str]) -> list[str]:
    """Stands for `[sys.executable, *words]`; `words` is `-m module`, `-c program` or a file, and its arguments, and may
    begin with -u."""
    return [sys.executable, "-ISE", __file__, "run", *words]


def run_forked(
    words: Sequence[str], cwd: str | os.PathLike[str], env: Mapping[str, str], timeout: float = 250.0
) -> subprocess.CompletedProcess[str]:
    """Like `subprocess.run([sys.executable, *words], ...)` with captured text."""
    command, env = forked_command(words), {**env, PLACE: os.environ[PLACE]}
    return subprocess.run(command, cwd=cwd, env=env, timeout=timeout, capture_output=True, text=True)


@contextmanager
def forked_children() -> Iterator[None]:
    """Meanwhile, what is started as `sys.executable -m rally...` is forked."""
    real = sys.executable
    with tempfile.TemporaryDirectory(prefix="rally-tests-") as folder:
        script = Path(folder) / "python"
        script.write_text(FORKS.format(real=real, here=__file__))
        script.chmod(0o755)
        sys.executable = str(script)
        try:
            yield
        finally:
            sys.executable = real


FORKS = """#!/bin/sh
case "$1 $2" in "-m rally" | "-m rally.cli" | "-m rally.distributed."*) exec {real} -ISE {here} run "$@" ;; esac
exec {real} "$@"
"""


def path_that_forks(folder: Path) -> str:
    """A PYTHONPATH with which `python -m rally.cli`, ranks and loop workers are forked, whatever starts them."""
    (folder / "sitecustomize.py").write_text(SITE.format(here=__file__))
    return f"{folder}{os.pathsep}{Path(__file__).parents[2]}"


SITE = """import os, sys
words = sys.orig_argv[1:]
if words[:1] == ["-m"] and (words[1] == "rally.cli" or words[1].startswith("rally.distributed.")):
    os.execv(sys.executable, [sys.executable, "-ISE", {here!r}, "run", *words])
"""


def listen(listener: socket.socket, tests: socket.socket) -> None:
    """Forks for each connection, until the tests end."""
    imported = False
    while True:
        ready, _, _ = select.select([listener, tests], [], [])
        if tests in ready:
            return _reap(time.monotonic() + 5)
        connection, _ = listener.accept()
        if not imported:
            gc.disable()  # imports leave no garbage
            for name in IMPORTED:
                with suppress(ImportError):  # an extra that is missing
                    __import__(name)
            gc.freeze()
            gc.enable()
            imported = True
        if os.fork() == 0:
            listener.close()
            tests.close()
            _supervise(connection)
        connection.close()
        _reap()


def _reap(until: float = 0.0) -> None:
    """Wait for what has ended, or for all until then."""
    with suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0] or time.monotonic() < until:
            time.sleep(0.01 if until else 0.0)


def _supervise(connection: socket.socket) -> None:
    """Forks the program, passes signals on to it, and tells its exit code. It kills the program if nobody waits."""
    head, files, _, _ = socket.recv_fds(connection, 8, 3)
    data = b""
    while head and len(data) < int.from_bytes(head, "little"):
        data += connection.recv(1 << 16)
    if not head:  # the tests were killed
        os._exit(0)
    pid = os.fork()
    if pid == 0:
        connection.close()
        _become(json.loads(data), files)
    for number in files:
        os.close(number)
    program = os.pidfd_open(pid)
    while program not in (ready := select.select([program, connection], [], [])[0]):
        assert connection in ready
        if number := connection.recv(1):
            os.kill(pid, number[0])
        else:
            os.killpg(pid, signal.SIGKILL)
            break
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    try:
        connection.sendall(f"{code}".encode())
    finally:
        os._exit(0)


def _become(request: Mapping[str, Any], files: Sequence[int]) -> None:
    import atexit
    import runpy
    import threading
    import traceback

    os.setsid()
    for number, file in enumerate(files):
        os.dup2(file, number)
        os.close(file)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    words = [word for word in request["words"][:1] if word != "-u"] + request["words"][1:]
    paths = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    first = str(Path(words[0]).resolve().parent) if words[0] not in ("-m", "-c") else os.getcwd()
    sys.path[:] = [first, *paths, *(path for path in sys.path[1:] if path not in paths)]
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
        elif words[0] == "-c":
            sys.argv = ["-c", *words[2:]]
            sys.modules["__main__"] = main = ModuleType("__main__")
            exec(compile(words[1], "<string>", "exec"), main.__dict__)
        else:
            sys.argv = [*words]
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
        if code == 1 and not isinstance(end.code, int):
            sys.stderr.write(f"{end.code}\n")
    except BaseException:  # noqa: BLE001 - like the interpreter
        traceback.print_exc()
        code = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def run(words: Sequence[str]) -> None:
    """Ask for the program, and end as it does."""
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[PLACE])
    for number in PASSED_ON:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    data = json.dumps({"words": [*words], "cwd": os.getcwd(), "env": dict(os.environ)}).encode()
    socket.send_fds(connection, [len(data).to_bytes(8, "little")], [0, 1, 2])
    connection.sendall(data)
    code = int(connection.recv(20) or -signal.SIGKILL)
    if code < 0:
        signal.signal(-code, signal.SIG_DFL) if -code != signal.SIGKILL else None
        os.kill(os.getpid(), -code)
    os._exit(code)


if __name__ == "__main__":
    if sys.argv[1] == "run":
        run(sys.argv[2:])
    else:
        listen(*(socket.socket(fileno=int(number)) for number in sys.argv[2:]))
