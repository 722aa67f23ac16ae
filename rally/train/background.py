"""One job at a time beside the training thread; whatever it raises is raised there too, and it is never cut short by
the end of the program."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor


class Background:
    """Jobs off the calling thread, one after the other. The interpreter waits for a running one before it exits."""

    def __init__(self, name: str) -> None:
        self._pool = ThreadPoolExecutor(1, thread_name_prefix=name)
        self._job: Future[None] | None = None

    def start(self, job: Callable[[], None]) -> None:
        """Begin `job` as soon as the one before it has ended."""
        self.wait()
        self._job = self._pool.submit(job)

    def check(self) -> None:
        """Raise what the last job raised, if it has already ended."""
        if self._job is not None and self._job.done():
            self.wait()

    def wait(self) -> None:
        """Let the last job end, and raise what it raised."""
        job, self._job = self._job, None
        if job is not None:
            job.result()
