"""Measures and kills the process tree of an execution, and finds the limit that it exceeds.

Memory is what the kernel charges the program's cgroup, less what the files on its disk hold. Without a cgroup, shared
resident pages are first counted in each process, which is cheap and never too little. Only if that exceeds the limit
are they counted proportionally (PSS), so that a pool of forks is not killed for shared pages. Page tables, swap and
socket buffers count too, because memory could be hidden in them.
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass

from rally.sandbox.inside.execution_request import Caps

_TICK = os.sysconf("SC_CLK_TCK")
SOCKET_BYTES = 256 << 10  # the maximum of a socket's buffer, which without a cgroup programs cannot raise
_COUNTED = ("VmRSS:", "VmPTE:", "VmSwap:")
_KILL_ROUNDS = 1000  # a tree that forks while being killed needs several; with a pid namespace one is enough
_GONE = (FileNotFoundError, ProcessLookupError)  # the process has ended meanwhile


class ProcessTree:
    """The processes below this one: all others of its pid namespace, or its descendants without one."""

    def __init__(self, own_namespace: bool) -> None:
        self.own_namespace = own_namespace

    def members(self) -> list[int]:
        if self.own_namespace:
            return [int(name) for name in os.listdir("/proc") if name.isdigit() and name != "1"]
        members: list[int] = []
        unvisited = [os.getpid()]
        while unvisited:
            children = _children(unvisited.pop())
            members += children
            unvisited += children
        return members

    def signal(self, number: int) -> None:
        with suppress(ProcessLookupError):
            if self.own_namespace:
                os.kill(-1, number)
        if not self.own_namespace:
            for pid in self.members():
                with suppress(ProcessLookupError):
                    os.kill(pid, number)

    def kill(self) -> None:
        for _ in range(_KILL_ROUNDS):
            self.signal(signal.SIGKILL)
            reap(block=self.own_namespace)
            if self.own_namespace or not self.members():
                return


def reap(block: bool = False) -> dict[int, int]:
    """Exit status by pid of all children that have ended; with `block`, wait for all children."""
    ended: dict[int, int] = {}
    with suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, 0 if block else os.WNOHANG)
            if pid == 0:
                break
            ended[pid] = status
    return ended


@dataclass(frozen=True)
class Usage:
    """Resources that a process tree uses."""

    memory: int
    cpu_seconds: float
    processes: int


# Not counted: caches of files, which the kernel drops before it kills. Version 1, then version 2 of cgroups.
_CHARGED = ("rss ", "shmem ", "anon ", "kernel_stack ", "pagetables ", "percpu ", "sock ", "vmalloc ")


@dataclass(frozen=True)
class ProgramCgroup:
    """The memory cgroup of the program, by descriptors from the host. The supervisor is not in it, so that the kernel
    kills the program and not the supervisor."""

    processes: int
    usage: int
    events: int

    def join(self) -> None:
        """Move this process into it."""
        os.write(self.processes, b"0")

    def memory(self) -> int:
        """Bytes of its processes, shared memory and files in memory."""
        text = os.pread(self.usage, 1 << 16, 0).decode()
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith(_CHARGED))

    def kills(self) -> int:
        """How many of its processes the kernel has killed for memory."""
        text = os.pread(self.events, 1 << 12, 0).decode()
        return sum(int(line.split()[1]) for line in text.splitlines() if line.startswith("oom_kill "))


class ResourceWatch:
    """Compares the usage of a process tree with its limits."""

    def __init__(self, caps: Caps, tree: ProcessTree, folder: str, cgroup: ProgramCgroup | None) -> None:
        self._caps = caps
        self._tree = tree
        self._folder = folder
        self._cgroup = cgroup
        self._cpu_before = 0.0
        self.peak_memory = 0

    def restart(self) -> None:
        """Count CPU time from now on."""
        self._cpu_before = self._measure().cpu_seconds

    def breach(self, cpu_seconds: float) -> str | None:
        """The name of a limit that is exceeded now, or None."""
        usage = self._measure()
        self.peak_memory = max(self.peak_memory, usage.memory)
        if usage.memory > self._caps.memory or self.killed_for():
            return "memory"
        if usage.cpu_seconds - self._cpu_before > cpu_seconds:
            return "cpu"
        return None if self._tree.own_namespace else self._polled_breach(usage)

    def killed_for(self) -> str | None:
        """The limit for which the kernel has killed a process of the program, or None."""
        return "memory" if self._cgroup is not None and self._cgroup.kills() else None

    def _polled_breach(self, usage: Usage) -> str | None:
        """The limits that the kernel enforces only with namespaces and a private tmpfs."""
        if usage.processes > self._caps.processes:
            return "processes"
        sizes = [size for folder, _, names in os.walk(self._folder) for size in _each_size(folder, names)]
        return "disk" if sum(sizes) > self._caps.disk or len(sizes) > self._caps.files else None

    def _measure(self) -> Usage:
        members = self._tree.members()
        memory = self._memory(members) if self._cgroup is None else self._cgroup.memory() - self._disk()
        ended = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = ended.ru_utime + ended.ru_stime + sum(_each(members, _cpu_ticks)) / _TICK
        return Usage(memory=memory, cpu_seconds=cpu, processes=len(members))

    def _memory(self, members: list[int]) -> int:
        sockets = _sockets() * SOCKET_BYTES if self._tree.own_namespace else 0
        memory = sum(_each(members, _resident)) + sockets
        return memory if memory <= self._caps.memory else sum(_each(members, _share)) + sockets

    def _disk(self) -> int:
        """Bytes of the files on the private tmpfs, if there is one."""
        if not self._tree.own_namespace:
            return 0
        disk = os.statvfs("/tmp")
        return (disk.f_blocks - disk.f_bfree) * disk.f_frsize


def _each(members: Iterable[int], measure: Callable[[int], int]) -> Iterator[int]:
    for pid in members:
        with suppress(*_GONE):
            yield measure(pid)


def _each_size(folder: str, names: list[str]) -> Iterator[int]:
    for name in names:
        with suppress(*_GONE):
            yield os.lstat(os.path.join(folder, name)).st_blocks * 512


def _read(path: str) -> str:
    with open(path, errors="replace") as file:
        return file.read()


def _resident(pid: int) -> int:
    return _kilobytes(_read(f"/proc/{pid}/status"), _COUNTED)


def _share(pid: int) -> int:
    try:
        pages = _kilobytes(_read(f"/proc/{pid}/smaps_rollup"), ("Pss:",))
    except PermissionError:  # a process can hide its memory map, but not its size
        return _resident(pid)
    return pages + _kilobytes(_read(f"/proc/{pid}/status"), _COUNTED[1:])


def _kilobytes(text: str, names: tuple[str, ...]) -> int:
    return sum(int(line.split()[1]) << 10 for line in text.splitlines() if line.startswith(names))


def _cpu_ticks(pid: int) -> int:
    fields = _read(f"/proc/{pid}/stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))  # its own and its reaped children's, user and system


def _sockets() -> int:
    """The number of sockets in this network namespace."""
    return int(_read("/proc/self/net/sockstat").split()[2])


def _children(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(*_GONE):
        for thread in os.listdir(f"/proc/{pid}/task"):
            children += map(int, _read(f"/proc/{pid}/task/{thread}/children").split())
    return children
