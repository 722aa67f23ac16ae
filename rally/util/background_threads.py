"""Background threads: jobs that run one after another, a writer thread, and parallel jobs."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait


class BackgroundJobs:
    """Runs jobs in a thread, one after another. The interpreter waits for a running job before it exits."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Wait for the previous job, then start `job`."""
        self.wait()
        self._job = started(job, self._name)

    def check(self) -> None:
        """If the last job has ended, raise what it raised."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Wait for the last job, and raise what it raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()


def started(job: Callable[[], None], name: str) -> Future[None]:
    """Start `job` in a new thread; if no thread can be started, run it now. A thread pool would reject jobs during
    interpreter shutdown, when a checkpoint may still have to be completed."""
    outcome: Future[None] = Future()

    def run() -> None:
        try:
            job()
            outcome.set_result(None)
        except BaseException as failure:  # noqa: BLE001 - any failure is passed to the waiting thread
            outcome.set_exception(failure)

    try:
        threading.Thread(target=run, name=name).start()
    except RuntimeError:  # the system's limit; Python 3.12.0 to 3.12.2 start no thread during shutdown
        run()
    return outcome


def side_by_side(jobs: Sequence[Callable[[], None]], name: str) -> None:
    """Run all jobs in parallel, wait for all, then raise the error of the first that failed."""
    running = [started(job, name) for job in jobs]
    wait(running)
    for job in running:
        job.result()


class BackgroundWriter:
    """One thread that runs write jobs in order. Errors are raised at the next `wait`. A job begins `delay` seconds
    after it was queued, or when somebody waits for it."""

    def __init__(self, delay: float = 0.0) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="rally-record")
        self._pending: list[Future[None]] = []
        self._delay, self._awaited = delay, threading.Event()

    def write(self, work: Callable[[], None]) -> None:
        """Queue `work`. The data that it reads must not change any more."""
        due = time.monotonic() + self._delay

        def run() -> None:
            self._awaited.wait(max(0.0, due - time.monotonic()))
            work()

        self._pending.append(self._thread.submit(run))

    def wait(self) -> None:
        """Wait until everything is written; raises the first error."""
        pending, self._pending = self._pending, []
        self._awaited.set()
        try:
            for written in pending:
                written.result()
        finally:
            self._awaited.clear()

    def close(self) -> None:
        self._awaited.set()
        self._thread.shutdown()


def available_cores() -> int:
    """The number of cores that this process may use; all of them if the system does not report it."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
