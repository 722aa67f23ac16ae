"""Rank 0: starts the workers and broadcasts the computations that all ranks run together.

If a worker is lost, the run ends within seconds with an error that quotes the worker's log. Workers never outlive this
process (`ServerProcess`). Messages are sent one at a time, from any thread.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import Tensor
from transformers import PreTrainedModel

from rally.distributed.process_group import ProcessGroup
from rally.models.sharding import Message
from rally.train.rank_messages import Shutdown
from rally.types import RallyError
from rally.util.subprocesses import ServerProcess

POLL_SECONDS = 0.2
NOTICE_SECONDS = 3.0  # a connection breaks before the death of its process is noticed
GRACE_SECONDS = 10.0  # for rank 0 to leave a computation that a lost rank cannot finish
STDERR = 2
T = TypeVar("T")


class LostRank(RallyError):
    """A worker has ended or stopped responding, which ends the run."""


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """The size of the process group, its device and its limits. `timeout_seconds` bounds every collective within a
    computation."""

    world_size: int
    device: str
    logs: Path
    timeout_seconds: float = 600.0
    start_seconds: float = 600.0
    reshard: bool = True


class Controller:
    """`Ranks` as rank 0 sees them. A context manager that stops the workers on exit."""

    rank = 0

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.workers: list[ServerProcess] = []
        self._home = Path(tempfile.mkdtemp(prefix=f"rally-ranks-{os.getpid()}-"))
        self._joined_group: ProcessGroup | None = None
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._current: int | None = None  # the number of the computation that is running
        self._broken = False  # whether a computation has failed
        self._loss: str | None = None
        self._stopping = threading.Event()

    @property
    def world_size(self) -> int:
        return self.settings.world_size

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._joined_group is not None:
            self._leave(self._joined_group)
        asyncio.run(_stop(self.workers))
        shutil.rmtree(self._home, ignore_errors=True)

    def start(self, plan: Message) -> None:
        """Start the workers and send them the plan. Call it in the main thread: workers end with the thread that
        started them."""
        settings = self.settings
        self.workers = [self._launch(rank) for rank in range(1, self.world_size)]
        threading.Thread(target=self._watch_workers, name="rally-ranks", daemon=True).start()
        deadline = time.monotonic() + settings.start_seconds
        with self._computation():
            while not all((self._home / ready_file(rank)).exists() for rank in range(1, self.world_size)):
                self._raise_if_lost()
                if time.monotonic() > deadline:
                    raise LostRank(
                        f"the other ranks did not start within {settings.start_seconds:g} s; "
                        f"see their logs in {settings.logs}"
                    )
                time.sleep(POLL_SECONDS / 4)
            self._joined_group = ProcessGroup(
                0, settings.world_size, self._home / RENDEZVOUS, settings.device, settings.timeout_seconds
            )
            self._joined_group.send(plan)

    def shard(self, model: PreTrainedModel) -> None:
        self._group.shard(model, ranks=self, reshard=self.settings.reshard)

    @asynccontextmanager
    async def watch(self) -> AsyncIterator[None]:
        task = asyncio.current_task()
        assert task is not None
        watcher = asyncio.create_task(self._cancel_when_lost(task))
        try:
            yield
        except asyncio.CancelledError:
            self._raise_if_lost()
            raise
        finally:
            watcher.cancel()

    @contextmanager
    def broadcast(self, message: Message) -> Iterator[None]:
        with self._computation():
            self._group.send(message)
            yield
            self._group.reshard()

    def summon(self, model: PreTrainedModel, work: Callable[..., T], *args: Any) -> T:
        return self._group.summon(model, work, *args)

    def all_gather(self, numbers_X: Tensor) -> list[Tensor]:
        return self._group.all_gather(numbers_X)

    def _leave(self, group: ProcessGroup) -> None:
        """All ranks leave together if the workers are waiting for a message. Otherwise a group of GPUs is left to the
        end of this process."""
        together = self._loss is None and self._current is None and not self._broken
        try:
            if together:
                group.send(Shutdown())
        except RuntimeError:  # a worker was lost after the last computation
            together = False
        if together or self.settings.device == "cpu":
            group.leave()

    @property
    def _group(self) -> ProcessGroup:
        assert self._joined_group is not None, "the ranks have not been started"
        return self._joined_group

    def _launch(self, rank: int) -> ServerProcess:
        settings = self.settings
        arguments = (rank, settings.world_size, self._home / RENDEZVOUS, settings.device, settings.timeout_seconds)
        command = [sys.executable, "-m", "rally.distributed.worker", *map(str, arguments)]
        return ServerProcess(command, {}, settings.logs / f"rank-{rank}.log")

    @contextmanager
    def _computation(self) -> Iterator[None]:
        """Runs one at a time. A failure that a lost rank caused is raised as `LostRank`."""
        with self._lock:
            self._raise_if_lost()
            self._current = next(self._numbers)
            succeeded = False
            try:
                yield
                succeeded = True
            except RuntimeError as problem:
                deadline = time.monotonic() + NOTICE_SECONDS
                while self._loss is None and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS / 4)
                self._raise_if_lost()
                if "timed out" in str(problem).lower():  # torch has no exception class for it
                    raise LostRank(self._timeout_message()) from problem
                raise
            finally:
                self._broken |= not succeeded
                self._current = None

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise LostRank(self._loss) from None

    def _watch_workers(self) -> None:
        """Runs in a thread. It exits the process if rank 0 hangs after a loss: an NCCL collective does not end by
        itself when a rank is missing."""
        while self._loss is None:
            if self._stopping.wait(POLL_SECONDS):
                return
            lost = [rank for rank, worker in enumerate(self.workers, 1) if not worker.alive]
            if lost:
                self._loss = self._loss_message(lost[0])
        stuck = self._current
        if not self._stopping.wait(GRACE_SECONDS) and stuck is not None and stuck == self._current:
            os.write(STDERR, f"\nrally: {self._loss}\n".encode())
            os._exit(1)

    def _loss_message(self, rank: int) -> str:
        again = "start the same command again to resume from the last checkpoint"
        log = self.workers[rank - 1].log_tail()
        return f"rank {rank} of {self.world_size}, which held a shard of the policy, has ended; {again}; {log}"

    def _timeout_message(self) -> str:
        waited = f"a collective timed out after {self.settings.timeout_seconds:g} s"
        again = "if no rank hangs, raise actor_rollout_ref.nccl_timeout and start the same command again"
        return f"{waited}; see the logs in {self.settings.logs}; {again}"

    async def _cancel_when_lost(self, task: asyncio.Task[Any]) -> None:
        while self._loss is None:
            await asyncio.sleep(POLL_SECONDS)
        task.cancel()


RENDEZVOUS = "rendezvous"


def ready_file(rank: int) -> str:
    """The name of the file that a worker creates right before it joins the process group."""
    return f"ready-{rank}"


async def _stop(workers: list[ServerProcess]) -> None:
    await asyncio.gather(*(worker.stop() for worker in workers))
