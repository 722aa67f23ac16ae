"""A run folder is handed on by one process at a time, and is rewound by none while another still reads it."""

from __future__ import annotations

import fcntl
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from rally.types import RallyError

PATIENCE = 60.0  # for what an earlier attempt still has to send


class StillSending(RallyError):
    """The process of an earlier attempt has not ended."""


@contextmanager
def alone(state: Path, patience: float = PATIENCE) -> Iterator[None]:
    """Wait until no other process hands the run of `state` on, and keep others waiting while the block lasts."""
    state.mkdir(parents=True, exist_ok=True)
    with (state / "lock").open("w") as lock:
        ends = time.monotonic() + patience
        while not _locked(lock):
            if time.monotonic() >= ends:
                raise StillSending(
                    f"trackers are still being sent what {state.parent} holds, by another run there or by the process "
                    "of an earlier one; wait for its end and try again"
                )
            time.sleep(0.1)
        yield


def _locked(lock: IO[str]) -> bool:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
