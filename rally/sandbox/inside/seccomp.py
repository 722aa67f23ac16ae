"""The seccomp filter: denies system calls that a program does not need for computing.

Denied with EPERM: calls that inspect other processes, change mounts, namespaces, the clock or the kernel, or hold
memory that no limit counts (anonymous files, System V segments, message queues, rings, keys, huge pages; without a
memory cgroup also shared anonymous mappings). Only sockets of the given families are allowed (and pairs of unix
sockets): others, such as vsock, lead out of a network namespace. A call of another ABI kills the process.
"""

from __future__ import annotations

import ctypes
import errno
from collections.abc import Sequence
from functools import cache

from rally.sandbox.inside import syscalls

FAMILIES = {"unix": 1, "inet": 2, "inet6": 10}

# name: (x86_64, aarch64); None if the architecture has no such call
_DENIED: dict[str, tuple[int | None, int | None]] = {
    "ptrace": (101, 117),
    "process_vm_readv": (310, 270),
    "process_vm_writev": (311, 271),
    "kcmp": (312, 272),
    "pidfd_getfd": (438, 438),
    "process_madvise": (440, 440),
    "perf_event_open": (298, 241),
    "bpf": (321, 280),
    "userfaultfd": (323, 282),
    "io_uring_setup": (425, 425),
    "io_uring_enter": (426, 426),
    "io_uring_register": (427, 427),
    "unshare": (272, 97),
    "setns": (308, 268),
    "mount": (165, 40),
    "umount2": (166, 39),
    "pivot_root": (155, 41),
    "chroot": (161, 51),
    "open_tree": (428, 428),
    "move_mount": (429, 429),
    "fsopen": (430, 430),
    "fsconfig": (431, 431),
    "fsmount": (432, 432),
    "fspick": (433, 433),
    "mount_setattr": (442, 442),
    "open_by_handle_at": (304, 265),
    "fanotify_init": (300, 262),
    "quotactl": (179, 60),
    "quotactl_fd": (443, 443),
    "acct": (163, 89),
    "swapon": (167, 224),
    "swapoff": (168, 225),
    "reboot": (169, 142),
    "sethostname": (170, 161),
    "setdomainname": (171, 162),
    "ioperm": (173, None),
    "iopl": (172, None),
    "modify_ldt": (154, None),
    "init_module": (175, 105),
    "finit_module": (313, 273),
    "delete_module": (176, 106),
    "kexec_load": (246, 104),
    "kexec_file_load": (320, 294),
    "syslog": (103, 116),
    "vhangup": (153, 58),
    "settimeofday": (164, 170),
    "clock_settime": (227, 112),
    "clock_adjtime": (305, 266),
    "adjtimex": (159, 171),
    "personality": (135, 92),
    "add_key": (248, 217),
    "request_key": (249, 218),
    "keyctl": (250, 219),
    "memfd_create": (319, 279),
    "memfd_secret": (447, 447),
    "shmget": (29, 194),
    "semget": (64, 190),
    "msgget": (68, 186),
    "mq_open": (240, 180),
    "io_setup": (206, 0),
    "mbind": (237, 235),
    "migrate_pages": (256, 238),
    "move_pages": (279, 239),
}
_SOCKET, _SOCKETPAIR = {"x86_64": 41, "aarch64": 198}, {"x86_64": 53, "aarch64": 199}
_CLONE, _PRLIMIT = {"x86_64": 56, "aarch64": 220}, {"x86_64": 302, "aarch64": 261}
_MMAP, _SETSOCKOPT = {"x86_64": 9, "aarch64": 222}, {"x86_64": 54, "aarch64": 208}
_CLONE3 = 435
_AUDIT_ARCH = {"x86_64": 0xC000003E, "aarch64": 0xC00000B7}
_X32_BIT = 0x40000000
_NEW_NAMESPACES = 0x7E020000
_HUGE_PAGES = 0x40000
_MAPPING_KIND, _SHARED_ANONYMOUS = 0x2F, 0x21  # the type of a mapping and MAP_ANONYMOUS

_LOAD, _AND, _JUMP_EQUAL, _JUMP_AT_LEAST, _JUMP_BITS, _RETURN = 0x20, 0x54, 0x15, 0x35, 0x45, 0x06
_ALLOW, _KILL, _ERROR = 0x7FFF0000, 0x80000000, 0x00050000
_NUMBER_AT, _ARCH_AT = 0, 4
_FIRST_ARGUMENT_AT, _SECOND_ARGUMENT_AT, _THIRD_ARGUMENT_AT, _FOURTH_ARGUMENT_AT = 16, 24, 32, 40


class _Instruction(ctypes.Structure):
    _fields_ = (("code", ctypes.c_uint16), ("yes", ctypes.c_uint8), ("no", ctypes.c_uint8), ("k", ctypes.c_uint32))


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_uint16), ("first", ctypes.POINTER(_Instruction)))


Code = list[tuple[int, int, int, int]]


@cache
def assembled(families: tuple[str, ...], shared_memory: bool) -> _Program:
    """The filter, ready to install. The fork server builds it once for all executions."""
    code = _assembled(syscalls.MACHINE, [FAMILIES[name] for name in families], shared_memory)
    return _Program(len(code), (_Instruction * len(code))(*(_Instruction(*fields) for fields in code)))


def install_filter(families: tuple[str, ...], shared_memory: bool) -> None:
    """Filter this process and all that it starts, irrevocably."""
    syscalls.no_new_privileges()
    syscalls.set_filter(assembled(families, shared_memory))


def _assembled(machine: str, families: Sequence[int], shared_memory: bool) -> Code:
    column = list(_AUDIT_ARCH).index(machine)
    code: Code = [
        (_LOAD, 0, 0, _ARCH_AT),
        (_JUMP_EQUAL, 1, 0, _AUDIT_ARCH[machine]),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, _NUMBER_AT),
    ]
    if machine == "x86_64":
        code += [(_JUMP_AT_LEAST, 0, 1, _X32_BIT), (_RETURN, 0, 0, _KILL)]
    # ENOSYS makes the C library fall back to clone, whose flags a filter can read.
    code += _when_called(_CLONE3, [(_RETURN, 0, 0, _ERROR | errno.ENOSYS)])
    for numbers in _DENIED.values():
        number = numbers[column]
        if number is not None:
            code += _when_called(number, [(_RETURN, 0, 0, _ERROR | errno.EPERM)])
    code += _when_called(_CLONE[machine], _unless(_JUMP_BITS, [_NEW_NAMESPACES], errno.EPERM, wanted=False))
    code += _when_called(_MMAP[machine], _mapping_rules(shared_memory))
    if not shared_memory:
        code += _when_called(_SETSOCKOPT[machine], _BUFFER_RULES)
    code += _when_called(_PRLIMIT[machine], _unless(_JUMP_EQUAL, [0], errno.EPERM))
    code += _when_called(_SOCKET[machine], _unless(_JUMP_EQUAL, families, errno.EAFNOSUPPORT))
    code += _when_called(_SOCKETPAIR[machine], _unless(_JUMP_EQUAL, [FAMILIES["unix"]], errno.EAFNOSUPPORT))
    return [*code, (_RETURN, 0, 0, _ALLOW)]


def _when_called(number: int, then: Code) -> Code:
    return [(_JUMP_EQUAL, 0, len(then), number), *then]


def _mapping_rules(shared_memory: bool) -> Code:
    code: Code = [
        (_LOAD, 0, 0, _FOURTH_ARGUMENT_AT),
        (_JUMP_BITS, 0, 1, _HUGE_PAGES),
        (_RETURN, 0, 0, _ERROR | errno.ENOMEM),  # as if the machine had none
    ]
    if not shared_memory:
        code += [
            (_AND, 0, 0, _MAPPING_KIND),
            (_JUMP_EQUAL, 0, 1, _SHARED_ANONYMOUS),
            (_RETURN, 0, 0, _ERROR | errno.EPERM),
        ]
    return [*code, (_RETURN, 0, 0, _ALLOW)]


# Sizes of socket buffers (SOL_SOCKET, SO_SNDBUF and SO_RCVBUF) are accepted without effect, as the kernel does with
# sizes over its maximum, which may be high.
_BUFFER_RULES: Code = [
    (_LOAD, 0, 0, _SECOND_ARGUMENT_AT),
    (_JUMP_EQUAL, 0, 4, 1),
    (_LOAD, 0, 0, _THIRD_ARGUMENT_AT),
    (_JUMP_EQUAL, 1, 0, 7),
    (_JUMP_EQUAL, 0, 1, 8),
    (_RETURN, 0, 0, _ERROR),
    (_RETURN, 0, 0, _ALLOW),
]


def _unless(test: int, values: Sequence[int], error: int, wanted: bool = True) -> Code:
    """Allow a call whose first argument passes the test for one of the values (`wanted`) or for none, else `error`."""
    met, unmet = (_ALLOW, _ERROR | error) if wanted else (_ERROR | error, _ALLOW)
    code: Code = [(_LOAD, 0, 0, _FIRST_ARGUMENT_AT)]
    for value in values:
        code += [(test, 0, 1, value), (_RETURN, 0, 0, met)]
    return [*code, (_RETURN, 0, 0, unmet)]
