"""Starts the program in a child process that confines itself first, and reads the files that it leaves.

Files are written and read by confined processes too, so a name such as `../../x` or a link to elsewhere is subject to
the same restrictions as the program's own calls.
"""

from __future__ import annotations

import base64
import json
import os
import socket
import stat
from dataclasses import dataclass, field
from typing import NoReturn

from rally.sandbox.inside import python_program
from rally.sandbox.inside.confine import LevelName, confine
from rally.sandbox.inside.execution_request import ExecutionRequest, Step
from rally.sandbox.inside.resource_monitor import ProgramCgroup

FETCH_BYTES = 32 << 20  # of all fetched files together
_LINK = 3
_SEND_SECONDS = 2.0


@dataclass(frozen=True)
class ProgramProcess:
    """A started program and our ends of its pipes. `link` carries cells, exit codes and values of final expressions."""

    pid: int
    out: int
    err: int
    link: socket.socket


@dataclass
class Fetched:
    """Fetched files as base64, and the number of those that were too large or not regular files."""

    contents: dict[str, str] = field(default_factory=dict)
    left_out: int = 0


def start(
    level: LevelName,
    request: ExecutionRequest,
    step: Step | None,
    path: list[str],
    cgroup: ProgramCgroup | None,
    first: bool = True,
) -> ProgramProcess:
    """Start a step, or a session if `step` is None. The first one also writes the files."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    ours, theirs = socket.socketpair()
    stdin = _stdin(request.stdin)
    pid = os.fork()
    if pid == 0:
        try:
            if cgroup is not None:
                cgroup.join()
            _redirect(stdin, out_write, err_write, theirs.detach())
            _become(level, request, step, path, first, counts_shared_memory=cgroup is not None)
        finally:
            os._exit(1)  # the child must never continue as a second supervisor
    for end in (out_write, err_write, stdin):
        os.close(end)
    theirs.close()
    for end in (out_read, err_read, ours.fileno()):
        os.set_blocking(end, False)
    return ProgramProcess(pid, out_read, err_read, ours)


def close(launched: ProgramProcess) -> None:
    os.close(launched.out)
    os.close(launched.err)
    launched.link.close()


def send_cell(launched: ProgramProcess, code: str) -> None:
    """Send code to a session; OSError if it does not read."""
    launched.link.settimeout(_SEND_SECONDS)
    launched.link.sendall(json.dumps({"code": code}).encode() + b"\n")
    launched.link.setblocking(False)


def fetch(level: LevelName, request: ExecutionRequest, cgroup: ProgramCgroup | None) -> Fetched:
    """Read the requested files that exist, in a confined process."""
    if not request.fetch:
        return Fetched()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            if cgroup is not None:
                cgroup.join()
            confine(level, request, None, counts_shared_memory=cgroup is not None)
            with os.fdopen(write_end, "w") as pipe:
                json.dump(_read_files(request), pipe)
        finally:
            os._exit(0)  # the child must never continue as a second supervisor
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return Fetched(**json.loads(text)) if text else Fetched(left_out=len(request.fetch))


def _stdin(text: str | None) -> int:
    """Standard input as a file, which unlike a pipe needs no writer."""
    if text is None:
        return os.open("/dev/null", os.O_RDONLY)
    end = os.memfd_create("stdin")
    with os.fdopen(os.dup(end), "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(end, 0, os.SEEK_SET)
    return end


def _redirect(stdin: int, out: int, err: int, link: int) -> None:
    # First copy to high numbers, so that no target overwrites a source.
    copies = [os.dup2(end, 100 + i) for i, end in enumerate((stdin, out, err, link))]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    os.closerange(_LINK + 1, os.sysconf("SC_OPEN_MAX"))
    os.set_inheritable(_LINK, False)


def _become(
    level: LevelName,
    request: ExecutionRequest,
    step: Step | None,
    path: list[str],
    first: bool,
    counts_shared_memory: bool,
) -> NoReturn:
    try:
        os.setsid()
        seconds = None if step is None else request.caps.cpu_seconds or step.timeout
        confine(level, request, seconds, counts_shared_memory)
        if first:
            _place_files(request)
        os.chdir(request.folder)
        if step is not None and step.argv is not None:
            os.execvp(step.argv[0], step.argv)
    except (OSError, ValueError) as error:  # ValueError: a file name with a null byte
        os.write(2, f"the sandbox could not start the program: {error}\n".encode())
        os._exit(1)
    link = socket.socket(fileno=_LINK)
    if step is None:
        python_program.run_session(request, path, link)
    python_program.run_script(request, path, link)


def _place_files(request: ExecutionRequest) -> None:
    os.makedirs(request.folder, exist_ok=True)
    for name, content in request.files.items():
        path = os.path.join(request.folder, name)
        os.makedirs(os.path.dirname(path), exist_ok=True)
        with open(path, "wb") as file:
            file.write(base64.b64decode(content))
    with open(os.path.join(request.folder, request.main), "wb") as file:
        file.write(request.code.encode("utf-8", "surrogatepass"))


def _read_files(request: ExecutionRequest) -> dict[str, object]:
    contents: dict[str, str] = {}
    left_out = 0
    space = FETCH_BYTES
    for name in request.fetch:
        try:
            # O_NONBLOCK: do not wait for a writer if it is a fifo.
            end = os.open(os.path.join(request.folder, name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue  # missing files are not reported, as in SandboxFusion's protocol
        status = os.fstat(end)
        if not stat.S_ISREG(status.st_mode) or status.st_size > space:
            left_out += 1
        else:
            contents[name] = base64.b64encode(os.read(end, status.st_size)).decode()
            space -= status.st_size
        os.close(end)
    return {"contents": contents, "left_out": left_out}
