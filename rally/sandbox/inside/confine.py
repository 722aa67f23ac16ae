"""Guarantees: what runs after `enter` and `confine` is held by the level's walls and by every cap of its order.

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
from rally.sandbox.inside.request import Order

LevelName = Literal["bubblewrap", "landlock", "unprotected"]

INNER_ID = 1000
UNPRIVILEGED = 65534  # who root becomes before a program comes near
# Within a network namespace of its own a program may use all; outside of one, none that could leave the tree.
_SOCKETS: dict[LevelName, tuple[str, ...]] = {"bubblewrap": ("unix", "inet", "inet6"), "landlock": ()}
_LIMIT_SLACK = 2  # the supervisor and the process that places files


def namespaces_of(level: LevelName) -> int:
    return syscalls.NEW_ALL if level == "bubblewrap" else 0


def prepare(level: LevelName) -> None:
    """Called once by the fork server: what all executions share is computed before there is one."""
    if level in _SOCKETS:
        seccomp.assembled(*_SOCKETS[level])


def enter(level: LevelName, order: Order, outer_ids: tuple[int, int]) -> None:
    """Called once by the supervisor of an execution, before anything of the program exists."""
    if level != "bubblewrap":
        os.setsid()
        syscalls.become_subreaper()
        return
    _map_ids(*outer_ids)
    covered = [(folder, os.open(folder, os.O_PATH | os.O_DIRECTORY)) for folder in _python_below("/tmp", "/mnt")]
    # One tmpfs under all three, so that one size caps them together.
    syscalls.mount_tmpfs("/tmp", order.caps.disk, order.caps.files)
    for name in ("tmp", "mnt", "shm"):
        os.mkdir(f"/tmp/{name}", 0o700)
    syscalls.bind("/tmp/mnt", "/mnt")
    syscalls.bind("/tmp/shm", "/dev/shm")
    syscalls.bind("/tmp/tmp", "/tmp")
    for folder, descriptor in covered:
        os.makedirs(folder)
        os.fchdir(descriptor)
        syscalls.bind(".", folder)
        os.close(descriptor)
    os.chdir("/")
    syscalls.mount_proc()
    syscalls.drop_capabilities()
    syscalls.set_dumpable(False)


def confine(level: LevelName, order: Order, seconds: float | None) -> None:
    """Called by every process that does something on the program's behalf; `seconds` of CPU time each at most."""
    # The program may look at itself; the supervisor, which it was forked from, it may not.
    syscalls.set_dumpable(True)
    _mark_as_first_to_go()
    _set_limits(level, order, seconds)
    if level == "landlock":
        landlock.restrict(order.readable, (order.folder,))
    if level in _SOCKETS:
        seccomp.refuse_dangerous_calls(*_SOCKETS[level])


def _python_below(*private: str) -> list[str]:
    """The folders of this Python that lie where a program's own files will: they must be shown again above those."""
    folders = sorted({os.path.realpath(folder) for folder in (sys.prefix, sys.base_prefix)})
    return [folder for folder in folders if any(folder.startswith(f"{place}/") for place in private)]


def _map_ids(uid: int, gid: int) -> None:
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{INNER_ID} {uid} 1"),
        ("gid_map", f"{INNER_ID} {gid} 1"),
    ):
        with open(f"/proc/self/{name}", "w") as file:
            file.write(text)


def _mark_as_first_to_go() -> None:
    """Should the machine itself run out of memory, let the kernel choose this process."""
    with open("/proc/self/oom_score_adj", "w") as file:
        file.write("1000")


def _set_limits(level: LevelName, order: Order, seconds: float | None) -> None:
    caps = order.caps
    limits = {
        # Counts on top of what the warm interpreter already holds, which forks share.
        resource.RLIMIT_DATA: caps.memory + _data_size(),
        resource.RLIMIT_FSIZE: caps.disk,
        resource.RLIMIT_NOFILE: caps.open_files,
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_MSGQUEUE: 0,
    }
    if level == "bubblewrap":  # elsewhere the kernel would count all processes of the user; there the watch counts ours
        limits[resource.RLIMIT_NPROC] = caps.processes + _LIMIT_SLACK
    if seconds is not None:
        limits[resource.RLIMIT_CPU] = int(seconds) + 2
    for limit, value in limits.items():
        hard = resource.getrlimit(limit)[1]
        value = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(limit, (value, value))
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGXFSZ, signal.SIGPIPE):
        signal.signal(number, signal.SIG_IGN)  # as Python itself starts: an error to handle, not a death


def _data_size() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmData"))
    return int(line.split()[1]) << 10
