"""The protocol of a node and of a process on it, and the node that is this machine."""

from __future__ import annotations

import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from rally.types import RallyError
from rally.util.subprocesses import ServerProcess

LOOPBACK = "127.0.0.1"


class NodeError(RallyError):
    """A node is missing, lost, or set up differently from this machine."""


class NodeProcess(Protocol):
    """A process of the run. It never outlives the run."""

    @property
    def alive(self) -> bool: ...

    async def ended(self) -> None:
        """Wait until it has ended, for whatever reason."""
        ...

    def log_tail(self) -> str:
        """The path of its log, and the last lines."""
        ...

    async def stop(self) -> None:
        """End it and everything it started."""
        ...


class Node(Protocol):
    """A machine on which processes of the run are started."""

    @property
    def name(self) -> str:
        """For messages."""
        ...

    @property
    def address(self) -> str:
        """Where its processes listen, and where other nodes reach them."""
        ...

    @property
    def gpus(self) -> tuple[str, ...]:
        """The GPUs reserved for the run, as the variable of visible devices names them."""
        ...

    @property
    def loss(self) -> str | None:
        """Why the node is lost; None while it responds."""
        ...

    def launch(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> NodeProcess:
        """Start a process. On this machine, call it in the main thread: processes end with the thread that started
        them."""
        ...

    def free_port(self) -> int:
        """A port of the node's address that no process uses now."""
        ...


class LocalNode:
    """This machine. Its processes listen on loopback only."""

    name, address = "this machine", LOOPBACK
    gpus: tuple[str, ...] = ()
    loss: str | None = None

    def launch(self, command: Sequence[str], environment: Mapping[str, str], log: Path) -> ServerProcess:
        return ServerProcess(command, environment, log)

    def free_port(self) -> int:
        return free_port(self.address)


LOCAL = LocalNode()


def free_port(address: str) -> int:
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as probe:
        probe.bind((address, 0))
        return int(probe.getsockname()[1])


@dataclass(frozen=True)
class RunNodes:
    """The nodes of a run. The first trainer node is that of rank 0; rollout nodes may be lost without ending the
    run."""

    trainer: Sequence[Node] = (LOCAL,)
    rollout: Sequence[Node] = ()

    @property
    def all(self) -> list[Node]:
        return [*self.trainer, *self.rollout]


THIS_MACHINE = RunNodes()
