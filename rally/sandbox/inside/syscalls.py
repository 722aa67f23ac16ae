"""System calls that Python has no functions for. Each raises OSError on failure.

A raw `clone` is safe here because only the fork server calls it, which has one thread.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import platform
import signal
import socket
import struct
from typing import Any

# PyDLL holds the GIL, so that the interpreter is in a consistent state during a clone.
_LIBC = ctypes.PyDLL(None, use_errno=True)

MACHINE = platform.machine()
_CLONE = {"x86_64": 56, "aarch64": 220}.get(MACHINE, -1)

NEW_MOUNTS, NEW_UTS, NEW_IPC, NEW_USER = 0x00020000, 0x04000000, 0x08000000, 0x10000000
NEW_PIDS, NEW_NET = 0x20000000, 0x40000000
NEW_ALL = NEW_MOUNTS | NEW_UTS | NEW_IPC | NEW_USER | NEW_PIDS | NEW_NET

_READ_ONLY, _NOSUID, _NODEV, _NOEXEC, _REMOUNT, _BIND = 1, 2, 4, 8, 32, 4096
_PROC = _NOSUID | _NODEV | _NOEXEC
_SET_INTERFACE_FLAGS, _INTERFACE_UP = 0x8914, 1
_SET_DUMPABLE, _SET_SECCOMP, _CAPBSET_DROP, _SET_SUBREAPER, _SET_NO_NEW_PRIVS = 4, 22, 24, 36, 38


def syscall(number: int, *args: Any) -> int:
    ctypes.set_errno(0)
    result: int = _LIBC.syscall(ctypes.c_long(number), *args)
    return _checked(result, f"system call {number}")


def clone(namespaces: int) -> int:
    """Fork into new namespaces; returns 0 in the child."""
    flags, pid = ctypes.c_ulong(namespaces | signal.SIGCHLD), -1
    ctypes.pythonapi.PyOS_BeforeFork()  # Python 3.13 ends a child that releases locks which nobody took
    try:
        pid = syscall(_CLONE, flags, None, None, None, None)
    finally:
        (ctypes.pythonapi.PyOS_AfterFork_Child if pid == 0 else ctypes.pythonapi.PyOS_AfterFork_Parent)()
    return pid


def mount_tmpfs(target: str, size: int, inodes: int) -> None:
    _mount("tmpfs", target, "tmpfs", _NOSUID | _NODEV, f"size={size},nr_inodes={inodes},mode=755")


def mount_proc() -> None:
    _mount("proc", "/proc", "proc", _PROC)


def make_proc_read_only() -> None:
    _mount("proc", "/proc", None, _PROC | _READ_ONLY | _REMOUNT | _BIND)


def bring_loopback_up() -> None:
    """Enable 127.0.0.1 and ::1 of this network namespace."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SET_INTERFACE_FLAGS, struct.pack("16sH22x", b"lo", _INTERFACE_UP))


def bind(source: str, target: str) -> None:
    _mount(source, target, None, _BIND)


def drop_capabilities() -> None:
    """Drop the capabilities of this process and all that it starts, also across exec."""
    last = int(_read("/proc/sys/kernel/cap_last_cap"))
    for capability in range(last + 1):
        _prctl(_CAPBSET_DROP, capability)
    header = (ctypes.c_uint32 * 2)(0x20080522, 0)
    nothing = (ctypes.c_uint32 * 6)()
    _checked(_LIBC.capset(header, nothing), "capset")
    no_new_privileges()


def no_new_privileges() -> None:
    _prctl(_SET_NO_NEW_PRIVS, 1)


def set_dumpable(yes: bool) -> None:
    """Whether processes of the same user may trace this one and read its memory."""
    _prctl(_SET_DUMPABLE, int(yes))


def become_subreaper() -> None:
    """Make this process the parent of orphaned descendants, so that they stay in its tree."""
    _prctl(_SET_SUBREAPER, 1)


def set_filter(program: Any) -> None:
    """Install a seccomp filter, irrevocably."""
    _prctl(_SET_SECCOMP, 2, ctypes.byref(program))


def _mount(source: str, target: str, kind: str | None, flags: int, data: str | None = None) -> None:
    encoded = [text.encode() if text is not None else None for text in (source, target, kind, data)]
    result = _LIBC.mount(encoded[0], encoded[1], encoded[2], ctypes.c_ulong(flags), encoded[3])
    _checked(result, f"mount {target}")


def _prctl(option: int, value: Any, extra: Any = 0) -> None:
    _checked(_LIBC.prctl(option, _ulong(value), _ulong(extra), 0, 0), f"prctl {option}")


def _ulong(value: Any) -> Any:
    return ctypes.c_ulong(value) if isinstance(value, int) else value


def _read(path: str) -> str:
    with open(path) as file:
        return file.read()


def _checked(result: int, call: str) -> int:
    if result < 0:
        code = ctypes.get_errno()
        raise OSError(code, f"{call}: {os.strerror(code)}")
    return result
