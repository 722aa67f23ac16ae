"""Child processes: `run_process` runs a program to its end, `ServerProcess` runs a server with a log.

Neither outlives this program, and ending one also ends everything it started: each child leads a process group of its
own, which `kill_group` kills.
"""

from __future__ import annotations

import asyncio
import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rally.util.private_files import private_folder


def kill_group(pid: int) -> None:
    """Kill the process group that the child `pid` leads. Call it before waiting for the child: afterwards the kernel
    may give the number to another process."""
    with suppress(ProcessLookupError, PermissionError):  # it has ended; a zombie is one or the other, by the system
        os.killpg(pid, signal.SIGKILL)


def start_tied(command: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
    """Start a Python program that calls `end_with_parent`. The thread that starts it lives as long as this program;
    that of the caller may end earlier, and the program with it."""
    return _starter(os.getpid()).submit(lambda: subprocess.Popen(command, **options)).result()


@functools.cache
def _starter(pid: int) -> ThreadPoolExecutor:
    """One for each process: a fork has no threads."""
    return ThreadPoolExecutor(1, thread_name_prefix="rally-starter")


MAX_OUTPUT = 1_000_000
_CHUNK = 65_536


@dataclass(frozen=True, kw_only=True)
class ProcessResult:
    """How a program ended. `code` is negative if a signal ended it; `cut` bytes of output were dropped."""

    code: int
    output: bytes
    cut: int = 0

    @property
    def text(self) -> str:
        return self.output.decode("utf-8", "replace")


async def run_process(
    command: Sequence[str],
    stdin: bytes = b"",
    *,
    max_output: int = MAX_OUTPUT,
    environment: Mapping[str, str] | None = None,
) -> ProcessResult:
    """Run a program to its end, output and errors together. Cancelling the call, as a deadline does, kills it.
    `environment` replaces the one of this process. What it leaves running in its process group is ended; nobody waits
    for a daemon that left the group and holds the output open."""
    process = await asyncio.create_subprocess_exec(
        *command,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.STDOUT,
        env=environment,
        start_new_session=True,  # so that one kill reaches what the program has started, too
    )
    output = _Output(max_output)
    try:
        async with asyncio.TaskGroup() as group:
            feeding, reading = group.create_task(_feed(process, stdin)), group.create_task(_read(process, output))
            group.create_task(_end_rest(process, output, feeding, reading))
        assert process.returncode is not None, "`_end_rest` has waited for it"
        return ProcessResult(code=process.returncode, output=bytes(output.kept), cut=output.cut)
    finally:
        kill_group(process.pid)
        process._transport.close()  # type: ignore[attr-defined]  # a daemon may hold its pipes open
        await process.wait()


@dataclass
class _Output:
    """The first bytes of an output, and the number of those after them."""

    most: int
    kept: bytearray = field(default_factory=bytearray)
    cut: int = 0

    def add(self, chunk: bytes) -> None:
        space = self.most - len(self.kept)
        self.kept += chunk[:space]
        self.cut += max(0, len(chunk) - space)

    @property
    def bytes(self) -> int:
        return len(self.kept) + self.cut


async def _feed(process: asyncio.subprocess.Process, stdin: bytes) -> None:
    assert process.stdin is not None
    with suppress(BrokenPipeError, ConnectionResetError):  # a program need not read what it is given
        process.stdin.write(stdin)
        await process.stdin.drain()
    process.stdin.close()


async def _end_rest(process: asyncio.subprocess.Process, output: _Output, *pipes: asyncio.Task[None]) -> None:
    """End what a program has left behind when it ended: it may hold the output open, which is read to its end. (`wait`
    of some Python versions waits for the output, too.) A daemon is in no group of the program: once nothing has come
    for REST_SECONDS, its pipes are left."""
    while process.returncode is None:
        await asyncio.sleep(POLL_SECONDS)
    kill_group(process.pid)
    before = -1
    while before != output.bytes:
        before = output.bytes
        if not (await asyncio.wait(pipes, timeout=REST_SECONDS))[1]:
            return
    for pipe in pipes:
        pipe.cancel()


async def _read(process: asyncio.subprocess.Process, output: _Output) -> None:
    assert process.stdout is not None
    while chunk := await process.stdout.read(_CHUNK):
        output.add(chunk)


POLL_SECONDS = 0.1
REST_SECONDS = 1.0
TERMINATE_SECONDS = 5.0
QUOTED_LINES = 12
QUOTED_BYTES = 64 * 1024  # a log may have any size


class ServerProcess:
    """A running server. Create it in the main thread: the kernel ties the child's life to the thread that made it."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> None:
        self.log = log
        private_folder(log.parent)
        launcher = [sys.executable, "-I", str(Path(__file__).with_name("process_guard.py")), str(TERMINATE_SECONDS)]
        with log.open("ab") as out:
            out.write(f"$ {' '.join(command)}\n".encode())
            out.flush()
            self._begins = out.tell()
            self._child = subprocess.Popen(
                [*launcher, *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                env={**os.environ, **environment},
                process_group=0,
            )

    @property
    def pid(self) -> int:
        return self._child.pid

    @property
    def alive(self) -> bool:
        """The child is waited for by `stop` alone: until then the kernel gives its number to no other process group."""
        if self._child.returncode is not None:
            return False
        try:
            return os.waitid(os.P_PID, self._child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        except ChildProcessError:  # another thread waits for it in `stop`
            return False

    async def ended(self) -> None:
        """Wait until it has ended, for whatever reason."""
        while self.alive:
            await asyncio.sleep(POLL_SECONDS)

    def log_tail(self) -> str:
        """The path of the log and its last lines, indented."""
        try:
            with self.log.open("rb") as file:
                file.seek(max(self._begins, file.seek(0, os.SEEK_END) - QUOTED_BYTES))
                lines = file.read(QUOTED_BYTES).decode(errors="replace").splitlines()
        except OSError as problem:
            return f"its log, {self.log}, cannot be read ({problem.strerror})"
        quoted = "\n".join(f"  {line}" for line in lines[-QUOTED_LINES:])
        return f"its log is {self.log} and ends with\n{quoted}" if quoted else f"its log, {self.log}, is empty"

    async def stop(self) -> None:
        """End it and everything it started."""
        if self.alive:
            self._child.send_signal(signal.SIGTERM)
            deadline = time.monotonic() + TERMINATE_SECONDS + 2
            while self.alive and time.monotonic() < deadline:
                await asyncio.sleep(POLL_SECONDS)
        if self._child.returncode is None:  # else the number may be another's
            kill_group(self._child.pid)  # its guard has done so, unless it was killed itself
        await asyncio.to_thread(self._child.wait)
