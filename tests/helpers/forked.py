"""Runs Python programs in processes forked from one that has imported torch and transformers already, which saves
seconds of every program. Nothing of Rally is imported before the fork.

A program has its own working folder, environment, arguments and output. What is read before the imports, such as
OMP_NUM_THREADS, is that of the tests.
"""

from __future__ import annotations

import atexit
import json
import os
import runpy
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

IMPORTED = (
    *("torch", "transformers.models.qwen2.modeling_qwen2", "transformers.models.auto.modeling_auto", "httpx"),
    *("transformers.models.auto.tokenization_auto", "pyarrow.parquet", "uvicorn", "starlette.applications"),
)


class Template:
    """The process to fork from. It ends with the tests."""

    def __init__(self) -> None:
        self._ours, theirs = socket.socketpair()
        self._process = subprocess.Popen([sys.executable, __file__, str(theirs.fileno())], pass_fds=[theirs.fileno()])
        theirs.close()

    def close(self) -> None:
        self._ours.close()
        self._process.wait()

    def run(
        self, words: Sequence[str], cwd: str | os.PathLike[str], env: Mapping[str, str], timeout: float = 250.0
    ) -> subprocess.CompletedProcess[str]:
        """Like `subprocess.run([sys.executable, *words], ...)` with captured text; `words` is `-m module` or a file."""
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            answer, theirs = socket.socketpair()
            request = {"words": [*words], "cwd": os.fspath(cwd), "env": dict(env)}
            data, files = json.dumps(request).encode(), [out.fileno(), err.fileno(), theirs.fileno()]
            socket.send_fds(self._ours, [len(data).to_bytes(8, "little")], files)
            self._ours.sendall(data)
            theirs.close()
            pid = int(answer.recv(20))
            answer.settimeout(timeout)
            try:
                code = int(answer.recv(20))
            except TimeoutError:
                os.kill(pid, signal.SIGKILL)
                raise
            finally:
                answer.close()
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess([*words], code, out.read(), err.read())


def serve(requests: socket.socket) -> None:
    """Forks for each request, until the tests close the connection."""
    for name in IMPORTED:
        __import__(name)
    while True:
        head, files, _, _ = socket.recv_fds(requests, 8, 3)
        if not head:
            return
        data = b""
        while len(data) < int.from_bytes(head, "little"):
            data += requests.recv(1 << 16)
        pid = os.fork()
        if pid == 0:
            requests.close()
            _supervise(json.loads(data), *files)
        for number in files:
            os.close(number)
        os.waitpid(pid, 0)


def _supervise(request: Mapping[str, Any], out: int, err: int, answer: int) -> None:
    """Forks the program, and tells its process id and then its exit code."""
    pid = os.fork()
    if pid == 0:
        os.close(answer)
        _become(request, out, err)
    os.write(answer, str(pid).encode().ljust(20))
    code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(answer, str(code).encode().ljust(20))
    os._exit(0)


def _become(request: Mapping[str, Any], out: int, err: int) -> None:
    os.dup2(out, 1)
    os.dup2(err, 2)
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["env"])
    words = request["words"]
    paths = [path for path in request["env"].get("PYTHONPATH", "").split(os.pathsep) if path]
    first = os.getcwd() if words[0] == "-m" else str(Path(words[0]).resolve().parent)
    sys.path[:] = [first, *paths, *(path for path in sys.path[1:] if path not in paths)]
    code = 0
    try:
        if words[0] == "-m":
            sys.argv = [words[1], *words[2:]]
            runpy.run_module(words[1], run_name="__main__", alter_sys=True)
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


if __name__ == "__main__":
    serve(socket.socket(fileno=int(sys.argv[1])))
