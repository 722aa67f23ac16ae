"""A port is given to one server of this machine at a time, also by runs that look for one at the same moment."""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Iterator
from itertools import repeat
from pathlib import Path
from typing import NamedTuple

from rally.engines.base import EngineError
from rally.engines.remote.locks import Lock, hold

PORTS = 1000  # how far a free one is looked for


class Port(NamedTuple):
    """A port that is nobody else's until its lock is released."""

    number: int
    lock: Lock


def reserve_port(start: int | None) -> Port:
    """The first port from `start` on that nobody uses or is about to use; without a start, any."""
    for wanted in _wanted(start):
        number = _bound(wanted)
        lock = None if number is None else hold(Path(tempfile.gettempdir()) / f"rally-port-{number}.lock")
        if number is None or lock is None:
            continue
        if _bound(number) is not None:  # whoever locked it until now may have opened it
            return Port(number, lock)
        lock.release()
    where = "of this machine" if start is None else f"from rollout.port_start={start} on"
    raise EngineError(f"none of the ports {where} is free; choose another rollout.port_start")


def _wanted(start: int | None) -> Iterator[int]:
    return repeat(0, PORTS) if start is None else iter(range(start, min(start + PORTS, 65536)))


def _bound(port: int) -> int | None:
    """The port, or for 0 any, if it can be opened."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return None
        return int(probe.getsockname()[1])
