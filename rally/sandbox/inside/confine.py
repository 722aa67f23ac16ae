"""Applies a level of isolation and the limits of a request: `enter` to the supervisor, `confine` to the program.

level        the supervisor enters                         the program is confined by
bubblewrap   its own user, pid, mount, network, IPC and    rlimits, a seccomp filter
             host-name namespaces, a private tmpfs
landlock     the head of a process tree                    rlimits, Landlock, a seccomp filter without sockets
unprotected  the head of a process tree                    rlimits
"""

from __future__ import annotations

import os
import resource
import signal
import sys
from typing import Literal

from rally.sandbox.inside import landlock, seccomp, syscalls
from rally.sandbox.inside.execution_request import ExecutionRequest
from rally.sandbox.inside.resource_monitor import SOCKET_BYTES

LevelName = Literal["bubblewrap", "landlock", "unprotected"]

INNER_ID = 1000
UNPRIVILEGED = 65534  # the user that replaces root before any program runs
# Socket families: all within the program's own network namespace; without one, none that could reach other processes.
_SOCKETS: dict[LevelName, tuple[str, ...]] = {"bubblewrap": ("unix", "inet", "inet6"), "landlock": ()}
_LIMIT_SLACK = 2  # the supervisor and the process that places files


def namespaces_of(level: LevelName) -> int:
    """The clone flags of the namespaces that an execution gets."""
    return syscalls.NEW_ALL if level == "bubblewrap" else 0


def prepare(level: LevelName) -> None:
    """Called once by the fork server: compute what all executions share."""
    if level in _SOCKETS:
        for shared_memory in (True, False):
            seccomp.assembled(_SOCKETS[level], shared_memory)


def enter(level: LevelName, request: ExecutionRequest, outer_ids: tuple[int, int], counts_shared_memory: bool) -> None:
    """Called once by the supervisor of an execution, before the program starts."""
    _prefer_for_oom_kill()  # programs cannot undo it: their /proc is read-only
    if level != "bubblewrap":
        os.setsid()
        syscalls.become_subreaper()
        return
    _map_ids(*outer_ids)
    covered = [(folder, os.open(folder, os.O_PATH | os.O_DIRECTORY)) for folder in _python_below("/tmp", "/mnt")]
    # One tmpfs under all three, so that one size limits them together.
    syscalls.mount_tmpfs("/tmp", request.caps.disk, request.caps.files)
    for name in ("tmp", "mnt", "shm"):
        os.mkdir(f"/tmp/{name}", 0o700)
    syscalls.bind("/tmp/mnt", "/mnt")
    syscalls.bind("/tmp/shm", "/dev/shm")
    if not counts_shared_memory:
        _replace_zero_device("/tmp/zero")
    syscalls.bind("/tmp/tmp", "/tmp")
    for folder, descriptor in covered:
        os.makedirs(folder)
        os.fchdir(descriptor)
        syscalls.bind(".", folder)
        os.close(descriptor)
    os.chdir("/")
    syscalls.mount_proc()
    if _limit_tcp_buffers() or counts_shared_memory:
        syscalls.bring_loopback_up()
    syscalls.make_proc_read_only()
    syscalls.drop_capabilities()
    syscalls.set_dumpable(False)


def confine(level: LevelName, request: ExecutionRequest, seconds: float | None, counts_shared_memory: bool) -> None:
    """Called by every process that acts for the program; `seconds` is the maximum of CPU time of each."""
    # The program may inspect itself, but not the supervisor that it was forked from.
    syscalls.set_dumpable(True)
    _set_limits(level, request, seconds)
    if level == "landlock":
        landlock.restrict(request.readable, (request.folder,))
    if level in _SOCKETS:
        seccomp.install_filter(_SOCKETS[level], counts_shared_memory)


def _python_below(*private: str) -> list[str]:
    """The folders of this Python below `private`, which the tmpfs will cover: they must be mounted again on top."""
    folders = sorted({os.path.realpath(folder) for folder in (sys.prefix, sys.base_prefix)})
    return [folder for folder in folders if any(folder.startswith(f"{parent}/") for parent in private)]


def _map_ids(uid: int, gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INNER_ID} {uid} 1"),
        ("gid_map", f"{INNER_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _replace_zero_device(file: str) -> None:
    """A shared mapping of the device is memory that no limit counts; one of an empty file is part of the disk."""
    with open(file, "wb") as zeros:
        zeros.truncate(1 << 60)
    os.chmod(file, 0o444)
    syscalls.bind(file, "/dev/zero")


def _limit_tcp_buffers() -> bool:
    """Limit the memory in connections to what ResourceWatch counts for a socket; returns whether that was possible."""
    try:
        for name in ("tcp_rmem", "tcp_wmem"):
            with open(f"/proc/sys/net/ipv4/{name}", "w") as file:
                file.write(f"4096 65536 {SOCKET_BYTES}")
    except OSError:
        return False
    return True


def _prefer_for_oom_kill() -> None:
    """If the machine runs out of memory, let the kernel kill this process and what it starts first."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _set_limits(level: LevelName, request: ExecutionRequest, seconds: float | None) -> None:
    caps = request.caps
    limits = {
        # In addition to what the warm interpreter already uses, which forks share.
        resource.RLIMIT_DATA: caps.memory + _data_size(),
        resource.RLIMIT_FSIZE: caps.disk,
        resource.RLIMIT_NOFILE: caps.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if level == "bubblewrap":  # elsewhere the kernel counts all processes of the user, and ResourceWatch counts ours
        limits[resource.RLIMIT_NPROC] = caps.processes + _LIMIT_SLACK
    if seconds is not None:
        limits[resource.RLIMIT_CPU] = int(seconds) + 2
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGXFSZ, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # as in a normal Python start: an error to handle, not a fatal signal


def _data_size() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmData"))
    return int(line.split()[1]) << 10
