"""The fork server: turns each connection that it receives into one supervised execution, in its own namespaces.

It imports numpy and sympy once, unprivileged and inside the isolation, and every execution is a fork of it. It never
reads a program, so one execution cannot affect another.

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
from rally.sandbox.inside.execution_request import ExecutionRequest
from rally.sandbox.inside.resource_monitor import ProgramCgroup
from rally.sandbox.inside.supervisor import Supervisor


def main() -> None:
    level, fd, *modules = sys.argv[1:]
    control = socket.socket(fileno=int(fd))
    _drop_root(level)
    for name in modules:
        _load(name)
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # executions report to the host and need not be reaped here
    confine.prepare(cast(LevelName, level))
    gc.collect()
    gc.freeze()  # otherwise a garbage collection in a fork would copy every page
    control.send(b"warm")
    serve(cast(LevelName, level), control)


def serve(level: LevelName, control: socket.socket) -> None:
    """Fork an execution for each connection, until the control socket closes."""
    # Programs must not see our PYTHONPATH, unless it is site-packages, where other packages are too.
    ours = {os.environ.get("PYTHONPATH"), ""} - set(site.getsitepackages())
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
        _send_pidfd(fds[0], pid)


def _execution(level: LevelName, host: socket.socket, path: list[str], ids: tuple[int, int]) -> NoReturn:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # process 1 receives only signals that it handles
    try:
        _, descriptors, _, _ = socket.recv_fds(host, 1, 3)
        cgroup = ProgramCgroup(*descriptors) if descriptors else None
        request = ExecutionRequest.of(json_socket.receive(host))
        confine.enter(level, request, ids, counts_shared_memory=cgroup is not None)
        Supervisor(level, request, host, path, cgroup).run()
    except OSError as error:
        json_socket.send(host, {"failed": str(error)})
    finally:
        os._exit(0)


def _send_pidfd(connection: int, pid: int) -> None:
    """Send the host a pidfd of the execution, with which it can always kill it."""
    with socket.socket(fileno=connection) as host, suppress(ConnectionError, ProcessLookupError):
        pidfd = os.pidfd_open(pid)
        try:
            socket.send_fds(host, [b"+"], [pidfd])
        finally:
            os.close(pidfd)


def _drop_root(level: str) -> None:
    if os.geteuid() != 0:
        return
    if level == "bubblewrap":
        # As root, bubblewrap covers parts of /proc, and executions cannot mount their own over a covered one.
        syscalls.mount_proc()
    os.setgroups([])
    os.setresgid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    os.setresuid(UNPRIVILEGED, UNPRIVILEGED, UNPRIVILEGED)
    syscalls.set_dumpable(True)  # otherwise executions could not map their user


def _load(name: str) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError:
        return  # not installed, so programs do not have it either
    if name == "sympy":  # much of it is initialised on first use
        x = module.Symbol("x")
        module.integrate(module.sin(x) * module.exp(x), x)


if __name__ == "__main__":
    main()
