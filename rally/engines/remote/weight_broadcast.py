"""Weights by broadcast: from the trainer to all servers at once, over NCCL between GPUs and over gloo between CPUs.

The trainer and its servers form a group of torch.distributed (`inside/rally_weight_group.py`). A version is copied into
main memory of the trainer when it is staged and sent from there, so it can still be sent after the policy has changed.
Servers that start or join, and all servers after a failure, get the same version as files.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import threading
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, TypeVar
from urllib.parse import urlsplit

import torch
from torch import Tensor

from rally.engines.base import EngineError
from rally.engines.remote.client import HEALTH_SECONDS, ServerReplica
from rally.engines.remote.inside.rally_weight_group import (
    FORMING,
    Bucket,
    GroupInvitation,
    TensorForm,
    WeightGroup,
    buckets_of,
)
from rally.engines.remote.server_api import HttpCall, InFlight, WeightBroadcast
from rally.engines.remote.weight_updates import WeightFiles
from rally.platforms import pinned_memory, platform_of
from rally.types import RallyError
from rally.util.rendezvous import GLOO, address_towards, host_store

BUCKET_BYTES = 256 << 20
LOOPBACKS = ("127.0.0.1", "::1", "localhost")
FAILURES = 3  # one after the other, and then files are used until the run ends
GATHER_SECONDS = 10.0  # for all servers of an update to be ready
SECONDS = 60.0  # for a group to form, and for each bucket

Result = TypeVar("Result")
_log = logging.getLogger(__name__)


class StagedWeights:
    """A version of the weights in main memory, in buckets. Tied weights are in it once, unless they are for servers
    that do not tie them. On a GPU the memory is pinned, and `copy` waits until it is complete."""

    def __init__(self, device: torch.device, bucket_bytes: int = BUCKET_BYTES, *, untied: bool = False) -> None:
        self.device, self.bucket_bytes, self._untied = device, bucket_bytes, untied
        self.forms: tuple[TensorForm, ...] = ()
        self._tied: dict[str, str] = {}
        self._buckets: tuple[Bucket, ...] = ()
        self._memory: list[Tensor] = []

    @torch.no_grad()
    def copy(self, weights: Mapping[str, Tensor]) -> None:
        seen: dict[int, str] = {}
        first = {name: seen.setdefault(weight.data_ptr() or id(weight), name) for name, weight in weights.items()}
        if self._untied:
            first = {name: name for name in weights}
        forms = tuple(TensorForm.of(name, weights[name]) for name in dict.fromkeys(first.values()))
        if forms != self.forms:
            self.forms, self._buckets = forms, tuple(buckets_of(forms, self.bucket_bytes))
            self._memory = [pinned_memory(bucket.bytes, self.device) for bucket in self._buckets]
        self._tied = {name: other for name, other in first.items() if name != other}
        for name, here in self._views():
            here.copy_(weights[name], non_blocking=True)
        for device in {weight.device for weight in weights.values()}:
            if platform := platform_of(device):
                platform.module.synchronize(device)

    def _views(self) -> Iterator[tuple[str, Tensor]]:
        for bucket, memory in zip(self._buckets, self._memory, strict=True):
            for place in bucket.places:
                yield place.form.name, place.view(memory)

    def weights(self) -> dict[str, Tensor]:
        """The weights by name, tied ones included."""
        views = dict(self._views())
        return views | {name: views[other] for name, other in self._tied.items()}

    def send(self, group: WeightGroup) -> None:
        for memory in self._memory:
            group.broadcast(memory.to(group.device, non_blocking=True))


@dataclass(kw_only=True)
class _Round:
    """One update of several servers."""

    waiting: set[ServerReplica]
    ready: list[ServerReplica] = field(default_factory=list)
    complete: asyncio.Event = field(default_factory=asyncio.Event)
    task: asyncio.Task[set[ServerReplica]] | None = None


class BroadcastWeights:
    """A `WeightTransport` by broadcast. `weights` returns the current policy, which is copied into `staged`. `files`
    writes what is staged there: servers start from these files, and a server that no broadcast reached gets them.
    `writes_later` says whether files can still be written when the policy has changed; otherwise every version is.
    With `names_of_files`, servers know weights by the names that they have in files: a model whose files have others
    goes by files. Each server is `workers` processes of the group."""

    keeps_staged = True

    def __init__(
        self,
        weights: Callable[[], Mapping[str, Tensor]],
        staged: StagedWeights,
        files: WeightFiles,
        *,
        writes_later: Callable[[], bool],
        names_of_files: bool = False,
        workers: int = 1,
        seconds: float = SECONDS,
    ) -> None:
        self._names_of_files, self._workers = names_of_files, workers
        self._weights, self._staged, self._files = weights, staged, files
        self._writes_later, self._seconds = writes_later, seconds
        self._writing: asyncio.Task[None] | None = None
        self.version: int | None = None
        self._round: _Round | None = None
        self._group: WeightGroup | None = None
        self._members: tuple[ServerReplica, ...] = ()
        self._failures = 0
        self.sent = 0  # broadcasts that reached all their servers

    async def stage(self, version: int) -> None:
        if self._writing is not None:  # for a server that was given up; it reads what is replaced here
            await asyncio.wait([self._writing])
        await asyncio.to_thread(lambda: self._staged.copy(self._weights()))
        self.version = version
        if not self._writes_later():
            await self.folder()

    def expect(self, servers: Sequence[ServerReplica]) -> None:
        """`send` will be called for these servers together; they get the weights by one broadcast."""
        able = self._failures < FAILURES and (self._writes_later() or not self._names_of_files)
        self._round = _Round(waiting=set(servers)) if servers and able else None

    async def send(self, server: ServerReplica, in_flight: InFlight) -> None:
        one = self._round
        if one is not None and server in one.waiting:
            one.waiting.remove(server)
            one.ready.append(server)
            one.task = one.task or asyncio.create_task(self._update(one, in_flight))
            if not one.waiting:
                one.complete.set()
            if server in await asyncio.shield(one.task):
                return
        await self._send_files(server, in_flight)

    async def _send_files(self, server: ServerReplica, in_flight: InFlight) -> None:
        if server in self._members:  # it was started again, and the new process is in no group
            self._leave()
        await self.folder()
        await self._files.send(server, in_flight)

    async def folder(self) -> str:
        assert self.version is not None, "no weights were staged yet"
        while self._files.version != self.version:
            if self._writing is None or self._writing.done():
                self._writing = asyncio.create_task(self._files.stage(self.version))
            await asyncio.shield(self._writing)  # once for all servers, also if one of them is given up meanwhile
        return await self._files.folder()

    def fall_back(self, problem: EngineError) -> bool:
        """A server that the broadcast reached does not have the weights."""
        changed, self._failures = self._failures < FAILURES, FAILURES
        if changed:
            _log.warning("weights are sent to servers as files from now on, because a broadcast failed: %s", problem)
        return changed

    def close(self) -> None:
        self._leave()
        self._files.close()

    def _leave(self) -> None:
        if self._group is not None:
            self._group.close()
        self._group, self._members = None, ()

    async def _update(self, one: _Round, in_flight: InFlight) -> set[ServerReplica]:
        """Send the staged version to the servers of a round. Returns those that have it."""
        with suppress(TimeoutError):
            await asyncio.wait_for(one.complete.wait(), GATHER_SECONDS)
        one.waiting.clear()  # who comes later gets files
        alive = await asyncio.gather(
            *(server.call(HttpCall("/health"), HEALTH_SECONDS) for server in one.ready), return_exceptions=True
        )
        servers = tuple(
            server for server, answer in zip(one.ready, alive, strict=True) if not isinstance(answer, BaseException)
        )
        try:
            if servers:
                await self._broadcast(servers, in_flight)
        except (RallyError, RuntimeError, OSError) as problem:  # torch's errors are RuntimeErrors
            self._leave()
            self._failures += 1
            then = "from now on" if self._failures == FAILURES else "this time"
            _log.warning("weights are sent to servers as files %s, because a broadcast failed: %s", then, problem)
            return set()
        self._failures, self.sent = 0, self.sent + 1
        return set(servers)

    async def _broadcast(self, servers: tuple[ServerReplica, ...], in_flight: InFlight) -> None:
        assert self.version is not None, "no weights were staged yet"
        if self._group is None or self._members != servers:
            self._leave()
            self._group = await self._form(servers)
            self._members = servers
        source = WeightBroadcast(self._group.name, self._staged.forms, self._staged.bucket_bytes)
        loads = [server.load(source, self.version, in_flight) for server in servers]
        await _together(asyncio.to_thread(self._staged.send, self._group), *loads, failed=self._leave)

    async def _form(self, servers: Sequence[ServerReplica]) -> WeightGroup:
        """A group of the trainer and these servers, under a new name: a group with a dead member cannot be mended."""
        store, place = host_store(address_towards(meeting_host([server.url for server in servers])))
        given_up = threading.Event()
        name, secret = f"weights-{uuid.uuid4().hex}", secrets.token_urlsafe(32)

        def invitation(rank: int) -> GroupInvitation:
            platform, size = platform_of(self._staged.device), 1 + len(servers) * self._workers
            backend = GLOO if platform is None else platform.backend
            return GroupInvitation(
                place=place,
                name=name,
                backend=backend,
                rank=rank,
                size=size,
                secret=secret,
                seconds=self._seconds,
            )

        joins = (
            server.call(server.api.join(vars(invitation(1 + number * self._workers))), (FORMING + 1) * self._seconds)
            for number, server in enumerate(servers)
        )
        mine = _in_daemon(lambda: WeightGroup(invitation(0), self._staged.device, store, given_up))
        group, *_ = await _together(mine, *joins, failed=given_up.set)
        assert isinstance(group, WeightGroup)
        return group


def _in_daemon(work: Callable[[], Result]) -> asyncio.Future[Result]:
    """Do work in a thread of its own, for which the program does not wait when it ends."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Result] = loop.create_future()

    def settle(result: Result | None, problem: BaseException | None) -> None:
        if future.done():
            return
        if problem is not None:
            future.set_exception(problem)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def run() -> None:
        result, problem = None, None
        try:
            result = work()
        except BaseException as raised:  # noqa: BLE001 - any failure is passed to who waits
            problem = raised
        with suppress(RuntimeError):  # the event loop is closed
            loop.call_soon_threadsafe(settle, result, problem)

    threading.Thread(target=run, name="rally-weight-group", daemon=True).start()
    return future


def meeting_host(urls: Sequence[str]) -> str:
    """The server from which the trainer is seen by an address that all of them reach: one on another machine, if any
    is."""
    hosts = [urlsplit(url).hostname or "" for url in urls]
    return next((host for host in hosts if host not in LOOPBACKS), hosts[0])


async def _together(*steps: Awaitable[Any], failed: Callable[[], None] = lambda: None) -> list[Any]:
    """Wait for all, and call `failed` as soon as one fails, so that the others need not wait for it. Then raise the
    first error, those of servers first: they say more than a broken connection."""
    tasks = [asyncio.ensure_future(step) for step in steps]
    done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    if any(task.exception() for task in done):
        failed()
    outcomes = await asyncio.gather(*tasks, return_exceptions=True)
    for outcome in [*outcomes[1:], outcomes[0]]:
        if isinstance(outcome, BaseException):
            raise outcome
    return list(outcomes)
