"""Plays environments in a process of another Python environment (`env.python`), for packages whose pins conflict.

One process per Python serves all episodes. Requests and answers are JSON lines over its stdin and stdout. A process
that ends fails the episodes that it plays, with its exit code and last lines; the next episode starts another. A call
that hangs past its deadline fails its episode, and the process is killed when that episode cannot be closed. What it
started in its process group ends with it. The kernel kills it when this program ends, even if it hangs or is stopped.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import queue
import subprocess
import threading
from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from concurrent.futures import TimeoutError as FutureTimeout
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rally.envs.base import EnvError, Environment, EnvTurn
from rally.redact import redact
from rally.util.subprocesses import kill_group, start_tied

LOAD_SECONDS = 120.0  # to start the process and import a package
CLOSE_SECONDS = 10.0
EXIT_SECONDS = 2.0  # for a process that has closed its pipe to exit by itself
QUOTED_LINES = 5

# Only Rally is importable beside the other environment's packages: this one's would replace them.
BOOT = (
    "import importlib.util as u, sys; p = sys.argv[1]; "
    "s = u.spec_from_file_location('rally', p + '/__init__.py', submodule_search_locations=[p]); "
    "m = u.module_from_spec(s); sys.modules['rally'] = m; s.loader.exec_module(m); "
    "from rally.envs.child_worker import main; main()"
)
_PROCESSES: dict[str, EnvProcess] = {}
_LOCK = threading.Lock()


class EnvProcess:
    """One process with its environment objects. Threads read its answers and its errors."""

    def __init__(self, python: str) -> None:
        self.python = python
        try:
            self._process = start_tied(
                [python, "-c", BOOT, str(Path(__file__).parents[1])],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                encoding="utf-8",
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise EnvError(f"env.python={python} cannot be started ({error}); name a Python of 3.11 or later") from None
        self.ended: str | None = None  # how it ended, once it has
        self.killed = False  # then it ends soon
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[dict[str, Any]]] = {}
        self._requests: queue.SimpleQueue[str] = queue.SimpleQueue()
        self._errors: deque[str] = deque(maxlen=QUOTED_LINES)
        self._error_thread = threading.Thread(target=self._read_errors, name="rally-env-errors", daemon=True)
        self._error_thread.start()
        self._watcher = threading.Thread(target=self._watch, name="rally-env-watch", daemon=True)
        self._watcher.start()
        threading.Thread(target=self._read_answers, name="rally-env-process", daemon=True).start()
        threading.Thread(target=self._write_requests, name="rally-env-requests", daemon=True).start()

    def next_number(self) -> int:
        return next(self._numbers)

    def request(self, **fields: Any) -> Future[dict[str, Any]]:
        """Send a request. The answer fails with EnvError if the environment raised, or if the process ended."""
        answer: Future[dict[str, Any]] = Future()
        call = self.next_number()
        line = json.dumps({"call": call, **fields}) + "\n"
        with self._lock:
            if self.ended is not None:
                answer.set_exception(EnvError(self.ended))
                return answer
            self._waiting[call] = answer
            self._requests.put(line)
        return answer

    def kill(self) -> None:
        self.killed = True
        if self._process.returncode is None:  # else the number may be another's
            kill_group(self._process.pid)

    def _watch(self) -> None:
        """End what it leaves behind when it ends, which may hold its pipes open. It is waited for in `_end`."""
        with suppress(ChildProcessError):
            os.waitid(os.P_PID, self._process.pid, os.WEXITED | os.WNOWAIT)
            kill_group(self._process.pid)

    def _write_requests(self) -> None:
        """Runs in a thread: a pipe that the process does not read would block the callers, who have deadlines."""
        assert self._process.stdin is not None
        with suppress(BrokenPipeError, OSError):  # it has ended; the reader reports it
            while line := self._requests.get():
                self._process.stdin.write(line)
                self._process.stdin.flush()

    def _read_answers(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            try:
                answer = json.loads(line)
                with self._lock:
                    waiting = self._waiting.pop(answer["call"], None)
                raised = _raised(answer) if "error" in answer else None
            except (ValueError, RecursionError, TypeError, LookupError) as problem:
                self._errors.append(f"it answered something that cannot be read ({type(problem).__name__}: {problem})")
                self.kill()
                break
            if waiting is None:
                continue
            with suppress(InvalidStateError):  # its caller has given up, perhaps at this moment
                if raised is not None:
                    waiting.set_exception(raised)
                else:
                    waiting.set_result(answer)
        self._end()

    def _read_errors(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            if line.strip():
                self._errors.append(line.rstrip())

    def _end(self) -> None:
        """Tell everyone who waits how the process ended."""
        self._watcher.join(EXIT_SECONDS)
        if self._watcher.is_alive():
            self.kill()
            self._watcher.join()
        code = self._process.wait()
        self._error_thread.join(EXIT_SECONDS)
        said = redact("; ".join(self._errors))
        how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
        with self._lock:
            self.ended = f"the environment process {self.python} ended {how}" + (f": {said}" if said else "")
            waiting, self._waiting = self._waiting, {}
            self._requests.put("")  # ends the writer
        for answer in waiting.values():
            with suppress(InvalidStateError):  # its caller has given up
                answer.set_exception(EnvError(self.ended))


def _raised(answer: Mapping[str, Any]) -> Exception:
    return EnvError(answer["error"]) if answer["kind"] == "env" else EnvChildFailed(answer["error"])


class EnvChildFailed(Exception):
    """An exception of an environment in another process. The text begins with its type."""


def process_of(python: str) -> EnvProcess:
    """The running process of a Python; another one is started if it has ended."""
    with _LOCK:
        process = _PROCESSES.get(python)
        if process is None or process.killed or process.ended is not None:
            process = _PROCESSES[python] = EnvProcess(python)
        return process


class ChildEnvironment(Environment):
    """An environment whose object is in another process."""

    def __init__(self, python: str, name: str, /, **args: Any) -> None:
        if not os.access(python, os.X_OK):
            raise EnvError(
                f"env.python={python} is no program; name the python of an environment, such as .../bin/python"
            )
        self._process = process_of(python)
        self._object = self._process.next_number()
        self._closed = False
        try:
            self._wait("make", LOAD_SECONDS, name=name, args=dict(args))
        except EnvError:
            self.close()
            raise

    def tasks(self) -> Sequence[Mapping[str, Any]] | None:
        found: Sequence[Mapping[str, Any]] | None = self._wait("tasks", LOAD_SECONDS)
        return found

    def seats(self) -> int:
        if (count := self._wait("seats", LOAD_SECONDS)) != 1:
            raise EnvError(f"an environment with {count} trained seats cannot run in a process of env.python")
        return 1

    async def reset(self, row: Mapping[str, Any], seed: int) -> Any:
        return await self._ask("reset", arguments=[dict(row), seed])

    async def step(self, turn: EnvTurn) -> Any:
        return await self._ask("step", turn=asdict(turn))

    def close(self) -> None:
        if self._closed:
            return
        self._closed = True
        try:
            self._wait("close", CLOSE_SECONDS)
        except EnvError:
            if self._process.ended is None:
                self._process.kill()  # a call of this object hangs, or its close failed
            raise

    def _wait(self, method: str, seconds: float, **fields: Any) -> Any:
        try:
            return self._read(self._process.request(object=self._object, method=method, **fields).result(seconds))
        except EnvChildFailed as error:
            raise EnvError(str(error)) from None
        except FutureTimeout:
            self._process.kill()
            raise EnvError(
                f"{method} of an environment did not return within {seconds:g} seconds in {self._process.python}, "
                "which was ended"
            ) from None

    async def _ask(self, method: str, **fields: Any) -> Any:
        answer = self._process.request(object=self._object, method=method, **fields)
        ended = await asyncio.wrap_future(answer)
        returned = self._read(ended)
        return tuple(returned) if isinstance(returned, list) else returned

    def _read(self, answer: Mapping[str, Any]) -> Any:
        self.added_tools = answer.get("added_tools", ())
        self.arguments_as_written = bool(answer.get("as_written"))
        return answer["value"]
