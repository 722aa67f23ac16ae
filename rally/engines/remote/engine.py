"""The engine over servers: what it samples comes from the trainer's weights, from servers that have shown it.

After an update every server gets the new version and sings a canary; one that does not take it gets no requests. A
server of our own that dies is started again from the current weights, while requests go to the others or wait. Where
servers share the trainer's GPU they sleep during the update, and what they held is the trainer's.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TypeVar

import torch

from rally.engines.base import EngineError, UtilizationClock
from rally.engines.remote.canary import CanaryError, Oracle, canary, probe
from rally.engines.remote.client import ServerReplica
from rally.engines.remote.launched_server import LaunchedServer
from rally.engines.remote.server_api import InFlight
from rally.engines.remote.weight_updates import WeightTransport
from rally.engines.router.router import Router
from rally.engines.router.server_state import Duty, RouterSettings
from rally.types import Generation, ImageSpan, SamplingParams
from rally.util.subprocesses import POLL_SECONDS

Told = TypeVar("Told")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """What a run wants of its servers."""

    max_model_len: int
    sampling: SamplingParams
    """As training samples; the probe at the start samples in the same way."""
    in_flight: InFlight = "keep"
    max_restarts: int = 3
    restart_delay: float = 2.0
    sleeps: bool = False
    """Servers give their GPU memory to the update."""
    router: RouterSettings = field(default_factory=RouterSettings)


class RemoteEngine:
    """A `TrainingEngine` over servers, which belong to its router; weights and processes are minded here."""

    def __init__(
        self, servers: Sequence[ServerReplica], weights: WeightTransport, oracle: Oracle, settings: RemoteSettings
    ) -> None:
        self.servers = list(servers)
        self.router = Router(servers, settings.router, max_model_len=settings.max_model_len)
        self.weights = weights
        self.oracle = oracle
        self.settings = settings
        self.restarts = 0
        self._version = 0
        self._requests = UtilizationClock()
        self._minding = asyncio.Lock()  # one at a time gives weights to servers: an update, or one that comes back
        self._watchers: dict[str, asyncio.Task[None]] = {}

    @property
    def weight_version(self) -> int:
        return self._version

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len

    @property
    def busy_seconds(self) -> float:
        return self._requests.seconds

    def begin_at(self, version: int) -> None:
        assert not self._watchers, "the engine is already at work"
        self._version = version

    async def start(self) -> None:
        await self.weights.take(self._version)
        await _all(*(self._introduce(server) for server in self.servers))
        own = [server for server in self.servers if isinstance(server, LaunchedServer)]
        self._watchers = {server.name: asyncio.create_task(self._watch(server)) for server in own}
        for name, watcher in self._watchers.items():
            watcher.add_done_callback(functools.partial(self._stopped_watching, name))

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Generation:
        with self._requests.working():
            return await self.router.generate(prompt_ids, params, session=session, images=images)

    def expect(self, session: str) -> None:
        self.router.expect(session)

    def dismiss(self, session: str) -> None:
        self.router.dismiss(session)

    async def rest(self) -> None:
        """A server that cannot be put to sleep is as one that does not take weights: it gets no requests."""
        if not self.settings.sleeps:
            return
        async with self._minding:
            outcomes = await asyncio.gather(*(self._put_to_sleep(s) for s in self.servers), return_exceptions=True)
        await self._settle(outcomes)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Servers go on with the old weights meanwhile, or sleep; `publish` gives them the new ones."""
        try:
            yield
        finally:  # an update that failed half way has changed weights too
            self._version += 1

    async def publish(self) -> dict[str, float]:
        began = time.perf_counter()
        async with self._minding:
            await self._hold_current()
            written = time.perf_counter()
            if self.settings.sleeps:
                torch.cuda.empty_cache()  # what the update no longer needs, servers want back
            outcomes = await asyncio.gather(*(self._update(s) for s in self.servers), return_exceptions=True)
        await self._settle(outcomes)
        heard = [outcome for outcome in outcomes if isinstance(outcome, float)]
        return {
            "timing_s/write_weights": written - began,
            "engine/servers": float(sum(server.serving for server in self.servers)),
            "engine/restarts": float(self.restarts),
            **({"engine/canary_difference": max(heard)} if heard else {}),
            **self.router.lap(),
        }

    async def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        await self.router.close()
        self.weights.close()

    async def _put_to_sleep(self, server: ServerReplica) -> None:
        self.router.pause(server.name)
        await server.sleep()

    async def _update(self, server: ServerReplica) -> float:
        """The canary's difference, once the server has the current weights; only then it gets requests."""
        self.router.pause(server.name)
        difference = await self._give(server, lambda: canary(server, self.oracle))
        self.router.back(server.name)
        return difference

    async def _give(self, server: ServerReplica, check: Callable[[], Awaitable[Told]]) -> Told:
        """Send it the weights, and again if `check` does not find them there and another way is left."""
        version = self._version
        await self.weights.send(server, self.settings.in_flight)
        try:
            return await check()
        except EngineError as problem:
            server.serving = False
            if not isinstance(problem, CanaryError) or version != self._version or not self.weights.doubt(problem):
                raise
        return await self._give(server, check)

    async def _settle(self, outcomes: Sequence[object]) -> None:
        """After servers were asked something: those that failed get no requests; raise if that is no way to go on."""
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and (
                isinstance(outcome, CanaryError) or not isinstance(outcome, EngineError)
            ):
                raise outcome
        gone = {
            server.name: outcome
            for server, outcome in zip(self.servers, outcomes, strict=True)
            if isinstance(outcome, EngineError)
        }
        if not gone:
            return
        await asyncio.sleep(2 * POLL_SECONDS)  # a process may have died that its watcher has not noticed yet
        for server in self.servers:
            if server.name in gone and self.router.duty(server.name) is Duty.PAUSED:
                _log.warning("%s gets no requests: %s", server.name, gone[server.name])
                self.router.lost(server.name, str(gone[server.name]))
        if self.router.hopeless:
            raise next(iter(gone.values()))

    async def _introduce(self, server: ServerReplica) -> None:
        await server.up(await self.weights.folder())
        window = self.settings.max_model_len
        await self._give(server, lambda: probe(server, self.oracle, self.settings.sampling, window))

    async def _watch(self, server: LaunchedServer) -> None:
        """Start it again when it dies, so often; then it is lost."""
        allowed = self.settings.max_restarts
        why = await self._until_it_ends(server)
        for _ in range(allowed):
            await asyncio.sleep(self.settings.restart_delay)
            try:
                await self._bring_back(server)
            except EngineError as problem:
                why = str(problem)
                continue
            self.restarts += 1
            why = await self._until_it_ends(server)
        tried = f"rollout.server.max_attempts={allowed} attempts to start it again"
        self.router.lost(server.name, f"{server.name} is lost after {tried}: {why}")

    async def _bring_back(self, server: LaunchedServer) -> None:
        """Start it and give it the current weights; one that does not take them is ended."""
        async with self._minding:
            try:
                await self._hold_current()
                await server.up(await self.weights.folder())
                await self._catch_up(server)
            except EngineError:
                await server.down()
                raise

    async def _catch_up(self, server: ServerReplica) -> None:
        """The trainer waits for nobody: its weights may have changed while the server started, or sang."""
        while True:
            await self._hold_current()
            version = self._version
            try:
                await self._update(server)
                return
            except CanaryError:
                if version == self._version:
                    raise

    async def _hold_current(self) -> None:
        """What is taken while the trainer changes it is taken again: its version is not the current one then."""
        while self.weights.version != self._version:
            await self.weights.take(self._version)

    def _stopped_watching(self, name: str, watcher: asyncio.Task[None]) -> None:
        """A watcher that failed brings nobody back, so nobody may wait for that."""
        if not watcher.cancelled() and (problem := watcher.exception()) is not None:
            self.router.lost(name, f"{name} could not be started again: {type(problem).__name__}: {problem}")

    async def _until_it_ends(self, server: LaunchedServer) -> str:
        assert server.process is not None
        await server.process.ended()
        server.serving = False
        self.router.away(server.name)
        return f"it has died; {server.process.log_tail()}"


async def _all(*steps: Awaitable[None]) -> None:
    """Wait for all, then raise what the first that failed said: no other is left running."""
    for outcome in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
