"""Guarantees: a connection handed to this fork server becomes one supervised execution in namespaces of its own.

The server is warm: it has imported numpy and sympy once, unprivileged and inside the isolation, and every execution is
a fork of it. It never reads a program, so nothing that one run sends or does can reach another.

Launch: python -m rally.sandbox.inside.zygote LEVEL CONTROL_FD [MODULE ...]
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import site
import socket
import sys
from contextlib import suppress
from typing import NoReturn, cast

from rally.sandbox import json_socket
from rally.sandbox.inside import confine, syscalls
from rally.sandbox.inside.confine import UNPRIVILEGED, LevelName
from rally.sandbox.inside.request import Order
from rally.sandbox.inside.supervisor import Supervisor


def main() -> None:
    level, fd, *modules = sys.argv[1:]
    control = socket.socket(fileno=int(fd))
    _drop_root(level)
    for name in modules:
        _load(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # executions report to the host; nobody waits for them here
    confine.prepare(cast(LevelName, level))
    gc.collect()
    gc.freeze()  # a collection in a fork would otherwise copy every page
    control.send(b"warm")
    serve(cast(LevelName, level), control)


def serve(level: LevelName, control: socket.socket) -> None:
    ours = {os.environ.get("PYTHONPATH"), ""} - set(site.getsitepackages())  # where we are installed others are too
    path = [entry for entry in sys.path if entry not in ours]
    del os.environ["PYTHONPATH"]
    ids = os.getuid(), os.getgid()
    while True:
        _, fds, _, _ = socket.recv_fds(control, 16, 1)
        if not fds:
            return
        try:
            pid = syscalls.clone(confine.namespaces_of(level))
        except OSError as error:
            with socket.socket(fileno=fds[0]) as connection, suppress(ConnectionError):
                connection.send(f"!{error}".encode())
            continue
        if pid == 0:
            control.close()
            _execution(level, socket.socket(fileno=fds[0]), path, ids)
        _hand_over(fds[0], pid)


def _execution(level: LevelName, host: socket.socket, path: list[str], ids: tuple[int, int]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a handler is the one way for a program to disturb process 1
    try:
        order = Order.of(json_socket.receive(host))
        confine.enter(level, order, ids)
        Supervisor(level, order, host, path).run()
    except OSError as error:
        json_socket.send(host, {"failed": str(error)})
    finally:
        os._exit(0)


def _hand_over(connection: int, pid: int) -> None:
    """The host gets a handle on the execution, with which it can end it whatever happens in there."""
    with socket.socket(fileno=connection) as host, suppress(ConnectionError, ProcessLookupError):
        handle = os.pidfd_open(pid)
        try:
            socket.send_fds(host, [b"+"], [handle])
        finally:
            os.close(handle)


def _drop_root(level: str) -> None:
    if os.geteuid() != 0:
        return
    if level == "bubblewrap":
        # bubblewrap covers parts of /proc for root, and over a covered one executions could not mount their own.
        syscalls.mount_proc()
    os.setgroups([])
    os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    syscalls.set_dumpable(True)  # or executions could not map their user


def _load(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError:
        return  # then programs do not have it either
    if name == "sympy":  # much of it is built at the first use
        x = module.Symbol("x")
        module.integrate(module.sin(x) * module.exp(x), x)


if __name__ == "__main__":
    main()
