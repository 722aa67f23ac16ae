"""Landlock rules. After `restrict` this process and all that it starts can read only the given paths, write only the
given folders, open no TCP connection, and signal no process outside. Irrevocable. Needs Linux 6.12 (Landlock ABI 6)."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence

from rally.sandbox.inside import syscalls

NEEDED_ABI = 6
_CREATE_RULESET, _ADD_RULE, _RESTRICT_SELF = 444, 445, 446
_PATH_BENEATH = 1
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR, _TRUNCATE = 1 << 0, 1 << 1, 1 << 2, 1 << 3, 1 << 14
_ALL = (1 << 16) - 1
_FOR_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_DEVICES = ("/dev/null", "/dev/full", "/dev/random", "/dev/urandom")
_READ_ONLY_DEVICES = ("/dev/zero",)  # a shared mapping of it is memory that no limit counts; it needs a writable file


class _Ruleset(ctypes.Structure):
    _fields_ = (("files", ctypes.c_uint64), ("network", ctypes.c_uint64), ("scoped", ctypes.c_uint64))


class _PathRule(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("access", ctypes.c_uint64), ("parent", ctypes.c_int32))


def abi() -> int:
    """The kernel's Landlock version; 0 without Landlock."""
    try:
        return syscalls.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), 1)
    except OSError:
        return 0


def restrict(readable: Sequence[str], writable: Sequence[str]) -> None:
    """Apply the rules to this process."""
    rules = _Ruleset(files=_ALL, network=3, scoped=3)
    ruleset = syscalls.syscall(_CREATE_RULESET, ctypes.byref(rules), ctypes.c_size_t(ctypes.sizeof(rules)), 0)
    for path in readable:
        _allow(ruleset, path, _EXECUTE | _READ_FILE | _READ_DIR)
    for path in _DEVICES:
        _allow(ruleset, path, _READ_FILE | _WRITE_FILE)
    for path in _READ_ONLY_DEVICES:
        _allow(ruleset, path, _READ_FILE)
    for path in writable:
        _allow(ruleset, path, _ALL)
    syscalls.no_new_privileges()
    syscalls.syscall(_RESTRICT_SELF, ruleset, 0)
    os.close(ruleset)


def _allow(ruleset: int, path: str, access: int) -> None:
    if not os.path.exists(path):
        return
    parent = os.open(path, os.O_PATH | os.O_CLOEXEC)
    if not os.path.isdir(path):
        access &= _FOR_FILES
    rule = _PathRule(access=access, parent=parent)
    syscalls.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), 0)
    os.close(parent)
