"""Guarantees: whatever acts for the program is a child that confined itself before its first word of the program.

That holds for the program, for writing the files it is given and for reading the files it leaves: a name such as
`../../x` or a link to elsewhere meets the same walls as the program's own calls.
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
from rally.sandbox.inside.request import Order, Step

FETCH_BYTES = 32 << 20  # of all fetched files together
_LINK = 3
_LISTENS_WITHIN = 2.0


@dataclass(frozen=True)
class ProgramProcess:
    """A started program: the ends of its pipes that are ours. `link` carries cells, and the value of the last line."""

    pid: int
    out: int
    err: int
    link: socket.socket


@dataclass
class Fetched:
    contents: dict[str, str] = field(default_factory=dict)
    left_out: int = 0


def start(level: LevelName, order: Order, step: Step | None, path: list[str], first: bool = True) -> ProgramProcess:
    """Start a step, or a session when there is none; files are placed before the first."""
    out_read, out_write = os.pipe()
    err_read, err_write = os.pipe()
    ours, theirs = socket.socketpair()
    stdin = _stdin(order.stdin)
    pid = os.fork()
    if pid == 0:
        try:
            _wire_up(stdin, out_write, err_write, theirs.detach())
            _become(level, order, step, path, first)
        finally:
            os._exit(1)  # whatever happened, a child must not go on as a second supervisor
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
    """Hand code to a session; OSError when it does not listen."""
    launched.link.settimeout(_LISTENS_WITHIN)
    launched.link.sendall(json.dumps({"code": code}).encode() + b"\n")
    launched.link.setblocking(False)


def fetch(level: LevelName, order: Order) -> Fetched:
    """The files asked for that are there, as base64."""
    if not order.fetch:
        return Fetched()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            confine(level, order, None)
            with os.fdopen(write_end, "w") as pipe:
                json.dump(_read_files(order), pipe)
        finally:
            os._exit(0)  # whatever happened, a child must not go on as a second supervisor
    os.close(write_end)
    with os.fdopen(read_end) as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    return Fetched(**json.loads(text)) if text else Fetched(left_out=len(order.fetch))


def _stdin(text: str | None) -> int:
    """A file and not a pipe: nobody needs to feed it."""
    if text is None:
        return os.open("/dev/null", os.O_RDONLY)
    end = os.memfd_create("stdin")
    with os.fdopen(os.dup(end), "wb") as file:
        file.write(text.encode("utf-8", "surrogatepass"))
    os.lseek(end, 0, os.SEEK_SET)
    return end


def _wire_up(stdin: int, out: int, err: int, link: int) -> None:
    # Copies above all the others first, so that no target overwrites a source.
    copies = [os.dup2(end, 100 + place) for place, end in enumerate((stdin, out, err, link))]
    for target, copy in enumerate(copies):
        os.dup2(copy, target)
    os.closerange(_LINK + 1, os.sysconf("SC_OPEN_MAX"))
    os.set_inheritable(_LINK, False)


def _become(level: LevelName, order: Order, step: Step | None, path: list[str], first: bool) -> NoReturn:
    try:
        os.setsid()
        confine(level, order, None if step is None else order.caps.cpu_seconds or step.timeout)
        if first:
            _place_files(order)
        os.chdir(order.folder)
        if step is not None and step.argv is not None:
            os.execvp(step.argv[0], step.argv)
    except (OSError, ValueError) as error:  # a name may also hold what no file's can
        os.write(2, f"the sandbox could not start the program: {error}\n".encode())
        os._exit(1)
    link = socket.socket(fileno=_LINK)
    if step is None:
        python_program.run_session(order, path, link)
    python_program.run_script(order, path, link)


def _place_files(order: Order) -> None:
    os.makedirs(order.folder, exist_ok=True)
    for name, content in order.files.items():
        place = os.path.join(order.folder, name)
        os.makedirs(os.path.dirname(place), exist_ok=True)
        with open(place, "wb") as file:
            file.write(base64.b64decode(content))
    with open(os.path.join(order.folder, order.main), "wb") as file:
        file.write(order.code.encode("utf-8", "surrogatepass"))


def _read_files(order: Order) -> dict[str, object]:
    contents: dict[str, str] = {}
    left_out = 0
    room = FETCH_BYTES
    for name in order.fetch:
        try:
            # Not to wait for the writer of a fifo, should it be one.
            end = os.open(os.path.join(order.folder, name), os.O_RDONLY | os.O_NONBLOCK)
        except OSError:
            continue  # a missing file is no answer, as the protocol has it
        about = os.fstat(end)
        if not stat.S_ISREG(about.st_mode) or about.st_size > room:
            left_out += 1
        else:
            contents[name] = base64.b64encode(os.read(end, about.st_size)).decode()
            room -= about.st_size
        os.close(end)
    return {"contents": contents, "left_out": left_out}
