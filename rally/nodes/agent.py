"""The agent of one node: starts processes for the run and reports whether they live.

It runs as a Ray actor and imports little, so that it responds at once and its heartbeat can be trusted. Its processes
end with it, and Ray ends it with the run or with its node.
"""

from __future__ import annotations

import asyncio
import os
import platform
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NamedTuple

from rally.nodes.base import free_port
from rally.util.subprocesses import ServerProcess

POLL_SECONDS = 1.0
COMPARED = ("rally-rl", "torch", "transformers")


class NodeDescription(NamedTuple):
    """What a node has, for comparison with the machine that runs rank 0."""

    hostname: str
    gpus: tuple[str, ...]
    versions: dict[str, str]
    missing: tuple[str, ...]  # of the folders and files that the run needs


class NodeAgent:
    """`python` is the interpreter of rank 0; commands that use it run with the node's own."""

    def __init__(self, address: str, folder: str, python: str) -> None:
        self._address, self._folder, self._python = address, folder, python
        self._processes: list[ServerProcess] = []
        threading.Thread(target=_end_with, args=(os.getppid(),), name="rally-raylet", daemon=True).start()

    def describe(self, needed: Sequence[str], variable: str) -> NodeDescription:
        """What this node has. `needed` are paths that must exist; the first is the working directory. `variable` lists
        the GPUs that Ray has reserved."""
        missing = tuple(path for path in needed if not Path(path).exists())
        if self._folder not in missing:
            os.chdir(self._folder)
        visible = os.environ.get(variable, "")
        return NodeDescription(platform.node(), tuple(filter(None, visible.split(","))), own_versions(), missing)

    def launch(self, command: Sequence[str], environment: Mapping[str, str], log: str) -> int:
        """Start a process and return its number on this node."""
        own = [sys.executable if word == self._python else word for word in command[:1]]
        self._processes.append(ServerProcess([*own, *command[1:]], environment, Path(log)))
        return len(self._processes) - 1

    def alive(self) -> list[bool]:
        """Whether each process is alive, by number. It is also the heartbeat of the node."""
        return [process.alive for process in self._processes]

    def log_tail(self, number: int) -> str:
        return self._processes[number].log_tail()

    def stop(self, numbers: Sequence[int] | None = None) -> None:
        """Begin to end the processes of these numbers, or all. It returns at once: the node must stay responsive."""
        chosen = self._processes if numbers is None else [self._processes[number] for number in numbers]

        async def stop_all() -> None:
            await asyncio.gather(*(process.stop() for process in chosen))

        threading.Thread(target=lambda: asyncio.run(stop_all()), name="rally-stop", daemon=True).start()

    def free_port(self) -> int:
        return free_port(self._address)


def _end_with(parent: int) -> None:
    """End this process, and with it all it started, when the raylet is gone. Ray leaves an idle actor running."""
    while os.getppid() == parent:
        time.sleep(POLL_SECONDS)
    os._exit(1)


def own_versions() -> dict[str, str]:
    """The versions of what must be equal on all nodes."""
    found = {"python": platform.python_version()}
    for package in COMPARED:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = "missing"
    return found
