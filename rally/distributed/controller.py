"""Rank 0: starts the workers and broadcasts the computations that all ranks run together.

Ranks are numbered node by node. If a worker or its node is lost, the run ends within seconds with an error that quotes
the worker's log. Workers never outlive this process. Messages are sent one at a time, from any thread.
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
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

from torch import OutOfMemoryError, Tensor
from torch._C._distributed_c10d import FileStore, Store
from transformers import PreTrainedModel

from rally.distributed.process_group import SECRET_VARIABLE, ProcessGroup, RankLayout, Rendezvous, new_secret
from rally.models.sequence_parallel import SequenceGroup
from rally.models.sharding import HostedEngine, M, Message
from rally.nodes import LOCAL, Node, NodeError, NodeProcess
from rally.platforms import PLATFORMS
from rally.train.rank_messages import Shutdown
from rally.types import LOST_EXIT_CODE, RallyError
from rally.util.rendezvous import host_store

POLL_SECONDS = 0.2
CLOSING_SECONDS = 60.0
GRACE_SECONDS = 5.0  # for rank 0 to leave a computation that a lost rank cannot finish
STDERR = 2
T = TypeVar("T")


class LostRank(RallyError):
    """A worker has ended or stopped responding, which ends the run."""

    exit_code = LOST_EXIT_CODE


@dataclass(frozen=True, kw_only=True)
class ControllerSettings:
    """The size of the process group, its device and its limits. `timeout_seconds` bounds every collective within a
    computation. A connection may break `notice_seconds` before the loss of its process or node is noticed. Every node
    has equally many ranks; rank 0 is on the first."""

    world_size: int
    device: str
    nodes: Sequence[Node] = (LOCAL,)
    logs: Path
    timeout_seconds: float = 600.0
    start_seconds: float = 600.0
    notice_seconds: float = 3.0
    reshard: bool = True
    layout: RankLayout = field(default_factory=RankLayout)

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // len(self.nodes)

    def node(self, rank: int) -> Node:
        return self.nodes[rank // self.ranks_per_node]


class Controller:
    """`Ranks` as rank 0 sees them. A context manager that stops the workers on exit."""

    rank = 0

    def __init__(self, settings: ControllerSettings) -> None:
        self.settings = settings
        self.workers: list[NodeProcess] = []
        self._home = Path(tempfile.mkdtemp(prefix=f"rally-ranks-{os.getpid()}-"))
        self._place = str(self._home / RENDEZVOUS)
        self._secret = new_secret()
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

    @property
    def address(self) -> str:
        return self._group.address

    @property
    def token(self) -> str:
        return self._group.token

    def host(self, engine: HostedEngine) -> None:
        self._group.hosted = engine

    @property
    def sequence_group(self) -> SequenceGroup | None:
        return self._group.sequence_group

    def __enter__(self) -> Controller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, problem: BaseException | None, where: TracebackType | None
    ) -> None:
        self._stopping.set()
        if self._joined_group is not None:
            self._joined_group.close_engine()
            self._leave(self._joined_group)
        asyncio.run(_stop(self.workers))
        shutil.rmtree(self._home, ignore_errors=True)

    def start(self, plan: Message) -> None:
        """Start the workers and send them the plan. Call it in the main thread: workers end with the thread that
        started them."""
        settings = self.settings
        store: Store
        if list(settings.nodes) == [LOCAL]:
            store = FileStore(self._place, settings.world_size)
        else:
            store, self._place = host_store(settings.nodes[0].address)
        for rank in range(1, self.world_size):
            try:
                self.workers.append(self._launch(rank))
            except NodeError as problem:
                raise LostRank(f"rank {rank} of {self.world_size} cannot be started: {problem}") from None
        threading.Thread(target=self._watch_workers, name="rally-ranks", daemon=True).start()
        deadline = time.monotonic() + settings.start_seconds
        with self._computation():
            while not store.check([ready_key(rank) for rank in range(1, self.world_size)]):
                self._raise_if_lost()
                if time.monotonic() > deadline:
                    raise LostRank(
                        f"the other ranks did not start within {settings.start_seconds:g} s; "
                        f"see their logs in {settings.logs}"
                    )
                time.sleep(POLL_SECONDS / 4)
            self._joined_group = ProcessGroup(
                0, settings.world_size, self._rendezvous(0), settings.device, settings.timeout_seconds, store
            )
            self._joined_group.send(plan)
            self._joined_group.arrange(settings.layout)

    def shard(self, model: PreTrainedModel, *, offload: bool = False) -> None:
        self._group.shard(model, ranks=self, reshard=self.settings.reshard, offload=offload)

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
            with self._group.during(message):
                yield
                self._group.reshard()

    def scatter(self, messages: Sequence[M]) -> M:
        return self._group.scatter(messages)

    def summon(self, model: PreTrainedModel, work: Callable[..., T], *args: Any) -> T:
        return self._group.summon(model, work, *args)

    def all_gather(self, numbers_X: Tensor) -> list[Tensor]:
        return self._group.all_gather(numbers_X)

    def report(self, ticket: str, text: str) -> None:
        raise AssertionError("rank 0 gets the reports of the others")

    def reports(self, ticket: str) -> list[str]:
        """Raises `LostRank` if a worker is lost, and if the run ends, before all have reported."""
        return self._group.reports(ticket, self._raise_if_over)

    def _raise_if_over(self) -> None:
        self._raise_if_lost()
        if self._stopping.is_set():
            raise LostRank("the run ended before every rank had written its part of the checkpoint")

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

    def _rendezvous(self, rank: int) -> Rendezvous:
        settings = self.settings
        return Rendezvous(
            place=self._place,
            secret=self._secret,
            address=settings.node(rank).address,
            local_rank=rank % settings.ranks_per_node,
        )

    def _launch(self, rank: int) -> NodeProcess:
        settings, meeting = self.settings, self._rendezvous(rank)
        arguments = (
            *(rank, settings.world_size, meeting.place, meeting.address, meeting.local_rank),
            *(settings.device, settings.timeout_seconds),
        )
        command = [sys.executable, "-m", "rally.distributed.worker", *map(str, arguments)]
        node = settings.node(rank)
        environment = {SECRET_VARIABLE: self._secret}
        if node.gpus:
            environment[PLATFORMS[settings.device].visible_devices] = ",".join(node.gpus)
        return node.launch(command, environment, self._log(rank))

    def _log(self, rank: int) -> Path:
        return self.settings.logs / f"rank-{rank}.log"

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
            except OutOfMemoryError:  # no connection has broken
                raise
            except RuntimeError as problem:
                deadline = time.monotonic() + self.settings.notice_seconds
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
            os._exit(LOST_EXIT_CODE)

    def _loss_message(self, rank: int) -> str:
        again = "start the same command again to resume from the last checkpoint"
        loss = self.settings.node(rank).loss
        reason = "has ended" if loss is None else f"is lost because {loss}"
        log = f"its log is {self._log(rank)}" if loss else self.workers[rank - 1].log_tail()
        return f"rank {rank} of {self.world_size}, which held a shard of the policy, {reason}; {again}; {log}"

    def _timeout_message(self) -> str:
        waited = f"a collective timed out after {self.settings.timeout_seconds:g} s"
        again = "if no rank hangs, raise actor_rollout_ref.nccl_timeout and start the same command again"
        return f"{waited}; see the logs in {self.settings.logs}; {again}"

    async def _cancel_when_lost(self, task: asyncio.Task[Any]) -> None:
        while self._loss is None:
            await asyncio.sleep(POLL_SECONDS)
        if self._broken:  # rank 0 failed first, as the others did, and says why when it has closed what it plays
            await asyncio.sleep(CLOSING_SECONDS)
        task.cancel()


RENDEZVOUS = "rendezvous"


def ready_key(rank: int) -> str:
    """What a worker sets in the store right before it joins the process group."""
    return f"ready-{rank}"


async def _stop(workers: list[NodeProcess]) -> None:
    await asyncio.gather(*(worker.stop() for worker in workers))
