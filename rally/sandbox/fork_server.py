"""Starts the sandbox's fork server behind one level of isolation (bubblewrap, Landlock or none).

This module lists everything that a program can see: system folders and the Python installation, all read-only. The fork
server ends when its control socket closes, so also when the process that started it is killed.
"""

from __future__ import annotations

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rally.sandbox import json_socket
from rally.sandbox.inside.confine import LevelName
from rally.sandbox.languages import SYSTEM_PATH
from rally.sandbox.memory_cgroups import MemoryCgroup, MemoryCgroups, NoMemoryCgroup
from rally.util.subprocesses import kill_group

START_SECONDS = 120.0
SEND_SECONDS = 2.0  # for three bytes; blocks only if hundreds of executions wait to be forked
INSTALL_BUBBLEWRAP = "apt-get install bubblewrap (as root), or run: make sandbox"
_SYSTEM = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64")
_SETTINGS = ("/etc/ld.so.cache", "/etc/ld.so.conf", "/etc/ld.so.conf.d", "/etc/alternatives", "/etc/localtime")
_DEVICES = ("null", "zero", "full", "random", "urandom")
_INSIDE = "/opt/rally"
_ETC = {
    "/etc/passwd": b"user:x:1000:1000:user:/tmp:/bin/bash\nnobody:x:65534:65534:nobody:/:/bin/false\n",
    "/etc/group": b"user:x:1000:\nnogroup:x:65534:\n",
    "/etc/hosts": b"127.0.0.1 localhost sandbox\n::1 localhost\n",
    "/etc/nsswitch.conf": b"passwd: files\ngroup: files\nhosts: files\n",
}
_log = logging.getLogger(__name__)


class ForkServerFailed(Exception):
    """A level of isolation is not available here; the text says why."""


def package_folder() -> Path:
    """The folder of the package `rally`."""
    return Path(__file__).resolve().parents[1]


def python_folders() -> list[str]:
    """The folders of this Python: its environment, its base, and the real location of its executable."""
    real = Path(sys.executable).resolve().parents[1]
    folders = dict.fromkeys(str(Path(folder)) for folder in (sys.base_prefix, real, sys.prefix))
    return [folder for folder in folders if not folder.startswith("/usr/") and folder not in ("/", "/usr")]


def readable_folders() -> tuple[str, ...]:
    """Everything that a program can read at a level without its own file system."""
    return (*_SYSTEM, *_SETTINGS, *python_folders(), str(package_folder()))


def environment(python_path: str, home: str) -> dict[str, str]:
    """The whole environment of a program. Nothing is inherited, so it contains no secrets."""
    return {
        "PATH": f"{Path(sys.executable).parent}:{SYSTEM_PATH}",
        "PYTHONPATH": python_path,
        "HOME": home,
        "TMPDIR": home,
        "LANG": "C.UTF-8",
        "MPLBACKEND": "Agg",
        "NODE_PATH": "/usr/local/lib/node_modules:/usr/lib/node_modules:/usr/share/nodejs",  # of npm install -g, apt
        "OMP_NUM_THREADS": "1",
        "OPENBLAS_NUM_THREADS": "1",
    }


@dataclass
class ForkServer:
    """A running fork server (inside/zygote.py), from which executions are forked."""

    level: LevelName
    process: subprocess.Popen[bytes]
    control: socket.socket
    cgroups: MemoryCgroups | None = None  # without, memory that no limit counts is denied to programs

    @classmethod
    def start(cls, level: LevelName, modules: Sequence[str]) -> ForkServer:
        """Start a fork server and wait until it has imported its modules; ForkServerFailed if it does not."""
        control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs, tempfile.TemporaryFile() as errors:
            command = [sys.executable, "-m", "rally.sandbox.inside.zygote", level, str(theirs.fileno()), *modules]
            try:
                fork_server = cls(level, _spawn(level, command, theirs, errors), control)
            except OSError as error:
                control.close()
                raise ForkServerFailed(str(error)) from None
            theirs.close()
            try:
                fork_server._wait_until_ready()
                fork_server.cgroups = MemoryCgroups.find()
            except OSError as error:
                fork_server.stop()
                raise ForkServerFailed(_last_line(errors) or str(error)) from None
            except NoMemoryCgroup as reason:
                _log.info("no memory cgroup for the sandbox (%s): shared anonymous memory is denied", reason)
        return fork_server

    def connect(self) -> socket.socket:
        """A connection whose other end becomes one execution. The first message on it carries a pidfd of that."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.control, [b"run"], [theirs.fileno()])
        return ours

    def send_cgroup(self, stream: socket.socket, limit: int) -> MemoryCgroup | None:
        """Send an execution the cgroup for its program, if there is one, before its request."""
        cgroup = None
        try:
            cgroup = self.cgroups.create(limit) if self.cgroups is not None else None
        except OSError as error:
            _log.warning("no memory cgroup for an execution (%s): shared anonymous memory is denied to it", error)
        socket.send_fds(stream, [b"+"], cgroup.descriptors if cgroup is not None else [])
        return cgroup

    @property
    def alive(self) -> bool:
        return self.process.poll() is None

    def stop(self) -> None:
        """End it and everything in it."""
        self.control.close()
        kill_group(self.process.pid)
        self.process.wait()
        if self.cgroups is not None:
            self.cgroups.close()

    def _wait_until_ready(self) -> None:
        self.control.settimeout(START_SECONDS)
        if not self.control.recv(1 << 10):
            raise json_socket.SocketClosed("it ended before it was ready")
        self.control.settimeout(SEND_SECONDS)


def _spawn(level: LevelName, command: list[str], theirs: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    if level == "bubblewrap":
        return _spawn_in_bubblewrap(command, theirs, errors)
    return subprocess.Popen(
        command,
        env=environment(str(package_folder().parent), "/nonexistent"),
        pass_fds=[theirs.fileno()],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=errors,
        cwd="/",
        start_new_session=True,
    )


def _spawn_in_bubblewrap(command: list[str], theirs: socket.socket, errors: IO[bytes]) -> subprocess.Popen[bytes]:
    bubblewrap = shutil.which("bwrap")
    if bubblewrap is None:
        raise ForkServerFailed(f"it is not installed; install it with: {INSTALL_BUBBLEWRAP}")
    with ExitStack() as stack:
        files = {path: stack.enter_context(_data(content)).fileno() for path, content in _ETC.items()}
        return subprocess.Popen(
            [bubblewrap, *bubblewrap_arguments(files), "--", *command],
            env={},
            pass_fds=[theirs.fileno(), *files.values()],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
            start_new_session=True,
        )


def bubblewrap_arguments(files: dict[str, int]) -> list[str]:
    """The arguments of bwrap; `files` maps paths to the descriptors that their content is read from."""
    arguments = ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    arguments += ["--hostname", "sandbox", "--dir", "/tmp", "--dir", "/mnt", "--proc", "/proc", "--tmpfs", "/dev"]
    for name in _DEVICES:
        arguments += ["--dev-bind", f"/dev/{name}", f"/dev/{name}"]
    for name, number in (("stdin", 0), ("stdout", 1), ("stderr", 2)):
        arguments += ["--symlink", f"/proc/self/fd/{number}", f"/dev/{name}"]
    arguments += ["--symlink", "/proc/self/fd", "/dev/fd", "--dir", "/dev/shm", "--remount-ro", "/dev"]
    for path in _SYSTEM:
        if os.path.islink(path):
            arguments += ["--symlink", os.readlink(path), path]
        elif os.path.isdir(path):
            arguments += ["--ro-bind", path, path]
    arguments += _open_folders([*python_folders(), f"{_INSIDE}/rally", *_SETTINGS])
    for path in (*python_folders(), *_SETTINGS):
        arguments += ["--ro-bind-try", path, path]
    arguments += ["--ro-bind", str(package_folder()), f"{_INSIDE}/rally"]
    for path, descriptor in files.items():
        arguments += ["--perms", "0644", "--ro-bind-data", str(descriptor), path]
    arguments += ["--remount-ro", "/", "--chdir", "/", "--clearenv"]
    for name, value in environment(_INSIDE, "/tmp").items():
        arguments += ["--setenv", name, value]
    return arguments


def _open_folders(paths: Sequence[str]) -> list[str]:
    """Arguments that create the parents of `paths`, readable for all: by default only root could read them."""
    above = {str(parent) for path in paths for parent in Path(path).parents} - {"/", "/usr"}
    return [argument for path in sorted(above) for argument in ("--perms", "0755", "--dir", path)]


def _data(content: bytes) -> IO[bytes]:
    file = os.fdopen(os.memfd_create("rally"), "w+b")
    file.write(content)
    file.seek(0)
    return file


def _last_line(errors: IO[bytes]) -> str:
    errors.seek(0)
    lines = errors.read().decode("utf-8", "replace").strip().splitlines()
    return lines[-1] if lines else ""
