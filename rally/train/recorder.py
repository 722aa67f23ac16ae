"""What a step leaves behind is written beside the training thread, in order, and is on disk before its metrics are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Recorder:
    """One thread that writes; who fails is heard of at the next `wait`."""

    def __init__(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rally-record")
        self._pending: list[Future[None]] = []

    def write(self, work: Callable[[], None]) -> None:
        """Let `work` be done; what it reads must not change any more."""
        self._pending.append(self._thread.submit(work))

    def wait(self) -> None:
        """Return when everything is written; raises what went wrong."""
        pending, self._pending = self._pending, []
        for written in pending:
            written.result()

    def close(self) -> None:
        self._thread.shutdown()
