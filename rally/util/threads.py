"""What a step leaves behind is written beside the training thread, in order, and is on disk before its metrics are."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait


class BackgroundJobs:
    """Jobs off the calling thread, one after the other. The interpreter waits for a running one before it exits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin `job` as soon as the one before it has ended."""
        self.wait()
        self._job = started(job, self._name)

    def check(self) -> None:
        """Raise what the last job raised, if it has already ended."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Let the last job end, and raise what it raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()


def started(job: Callable[[], None], name: str) -> Future[None]:
    """`job` on a thread of its own; where none can be had, it has ended when this returns. A pool would refuse it once
    the program has begun to end, and what is being written then must still become whole."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            job()
            outcome.set_result(None)
        except BaseException as failure:  # noqa: BLE001 - the thread must hand any failure to who waits
            outcome.set_exception(failure)

    try:
        threading.Thread(target=run, name=name).start()
    except RuntimeError:  # the system's limit; and Python 3.12.0 to 3.12.2 begin none while a program ends
        run()
    return outcome


def side_by_side(jobs: Sequence[Callable[[], None]], name: str) -> None:
    """All of them at once; when the last has ended, raise what the first that failed raised."""
    running = [started(job, name) for job in jobs]
    wait(running)
    for job in running:
        job.result()


class BackgroundWriter:
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


def available_cores() -> int:
    """Cores that this process may use; all, on a system that does not say."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
