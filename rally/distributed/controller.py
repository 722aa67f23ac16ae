"""Rank 0: it starts the others and orders what all do together; one that is lost ends the run within seconds, in words.

The others never outlive this program, in whatever way it ends: the launcher of servers sees to that. Orders are given
one at a time, from whichever thread.
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
from rally.models.parallel import Message
from rally.train.messages import Shutdown
from rally.types import RallyError
from rally.util.subprocesses import ServerProcess

POLL_SECONDS = 0.2
NOTICE_SECONDS = 3.0  # a connection breaks before the process that held it is known to be dead
GRACE_SECONDS = 10.0  # for rank 0 to come out of an order that a lost rank cannot finish
STDERR = 2
Found = TypeVar("Found")


class LostRank(RallyError):
    """A process of the run has ended, and the run with it."""


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """How many ranks there are, on what, and how they behave. `order_seconds`: how long one waits for the others in
    the midst of an order."""

    count: int
    device: str
    logs: Path
    order_seconds: float = 600.0
    start_seconds: float = 600.0
    reshard: bool = True


class Controller:
    """`Ranks` as rank 0 sees them. A context: at its end the other ranks are gone."""

    number = 0

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.members: list[ServerProcess] = []
        self._home = Path(tempfile.mkdtemp(prefix=f"rally-ranks-{os.getpid()}-"))
        self._joined: ProcessGroup | None = None
        self._turn = threading.Lock()
        self._orders = itertools.count()
        self._current: int | None = None  # which order is under way
        self._broken = False  # whether an order was begun that did not end well
        self._loss: str | None = None
        self._over = threading.Event()

    @property
    def count(self) -> int:
        return self.settings.count

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        self._over.set()
        if self._joined is not None:
            self._part(self._joined)
        asyncio.run(_stop(self.members))
        shutil.rmtree(self._home, ignore_errors=True)

    def begin(self, plan: Message) -> None:
        """Start the others and tell them the plan. Call it in the main thread: they die with the one that made them."""
        self.members = [self._start(number) for number in range(1, self.count)]
        threading.Thread(target=self._watch, name="rally-ranks", daemon=True).start()
        deadline = time.monotonic() + self.settings.start_seconds
        with self._order():
            while not all((self._home / here(number)).exists() for number in range(1, self.count)):
                self._raise_if_lost()
                if time.monotonic() > deadline:
                    raise LostRank(f"the other ranks did not start in time; their logs are in {self.settings.logs}")
                time.sleep(POLL_SECONDS / 4)
            settings = self.settings
            self._joined = ProcessGroup(
                0, settings.count, self._home / MEETING, settings.device, settings.order_seconds
            )
            self._joined.tell(plan)

    def spread(self, model: PreTrainedModel) -> None:
        self._group.spread(model, carried=self, reshard=self.settings.reshard)

    @asynccontextmanager
    async def watching(self) -> AsyncIterator[None]:
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
    def doing(self, order: Message) -> Iterator[None]:
        with self._order():
            self._group.tell(order)
            yield
            self._group.rest()

    def within(self, model: PreTrainedModel, work: Callable[..., Found], *given: Any) -> Found:
        return self._group.within(model, work, *given)

    def gathered(self, numbers_X: Tensor) -> list[Tensor]:
        return self._group.gathered(numbers_X)

    def _part(self, group: ProcessGroup) -> None:
        """All leave together, if all wait for an order. Else those of GPUs stay joined until this program ends."""
        together = self._loss is None and self._current is None and not self._broken
        try:
            if together:
                group.tell(Shutdown())
        except RuntimeError:  # one was lost at the very end, when nothing was left to do
            together = False
        if together or self.settings.device == "cpu":
            group.leave()

    @property
    def _group(self) -> ProcessGroup:
        assert self._joined is not None, "the ranks have not begun"
        return self._joined

    def _start(self, number: int) -> ServerProcess:
        settings = self.settings
        words = (number, settings.count, self._home / MEETING, settings.device, settings.order_seconds)
        command = [sys.executable, "-m", "rally.distributed.worker", *map(str, words)]
        return ServerProcess(command, {}, settings.logs / f"rank-{number}.log")

    @contextmanager
    def _order(self) -> Iterator[None]:
        """One at a time. What fails because a rank is lost is told as that."""
        with self._turn:
            self._raise_if_lost()
            self._current = next(self._orders)
            well = False
            try:
                yield
                well = True
            except RuntimeError as problem:
                deadline = time.monotonic() + NOTICE_SECONDS
                while self._loss is None and time.monotonic() < deadline:
                    time.sleep(POLL_SECONDS / 4)
                self._raise_if_lost()
                if "timed out" in str(problem).lower():  # torch has no class of its own for it
                    raise LostRank(self._silence()) from problem
                raise
            finally:
                self._broken |= not well
                self._current = None

    def _raise_if_lost(self) -> None:
        if self._loss is not None:
            raise LostRank(self._loss) from None

    def _watch(self) -> None:
        """Runs beside everything else, and is the last resort: no collective of GPUs ends by itself when a rank does
        not come."""
        while self._loss is None:
            if self._over.wait(POLL_SECONDS):
                return
            lost = [number for number, member in enumerate(self.members, 1) if not member.alive]
            if lost:
                self._loss = self._told(lost[0])
        stuck = self._current
        if not self._over.wait(GRACE_SECONDS) and stuck is not None and stuck == self._current:
            os.write(STDERR, f"\nrally: {self._loss}\n".encode())
            os._exit(1)

    def _told(self, number: int) -> str:
        again = "start the same command again to go on from the last checkpoint"
        words = self.members[number - 1].log_tail()
        return f"rank {number} of {self.count}, which held a part of the policy, has ended; {again}; {words}"

    def _silence(self) -> str:
        waited = f"a rank did not hear from the others for {self.settings.order_seconds:g} s"
        again = "if nothing hangs there, raise actor_rollout_ref.nccl_timeout, and start the same command again"
        return f"{waited}; look into the logs in {self.settings.logs}; {again}"

    async def _cancel_when_lost(self, task: asyncio.Task[Any]) -> None:
        while self._loss is None:
            await asyncio.sleep(POLL_SECONDS)
        task.cancel()


MEETING = "meeting"


def here(number: int) -> str:
    """The file by which a rank says that it is about to join."""
    return f"here-{number}"


async def _stop(members: list[ServerProcess]) -> None:
    await asyncio.gather(*(member.stop() for member in members))
