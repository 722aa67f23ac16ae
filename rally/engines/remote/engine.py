"""The engine over servers: what it samples comes from the trainer's weights, from servers that have shown it.

After an update every server gets the new version and sings a canary; one that does not take it gets no requests. A
server of our own that dies is started again from the current weights, while requests go to the others or wait.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol

from rally.engines.base import EngineError
from rally.engines.busy import BusyClock
from rally.engines.remote.canary import CanaryError, Oracle, canary, probe
from rally.engines.remote.client import ServerReplica
from rally.engines.remote.own_server import OwnServer
from rally.engines.remote.process import POLL_SECONDS
from rally.engines.remote.weights import WeightTransport
from rally.engines.remote.wire import InFlight
from rally.engines.replica import ReplicaGone
from rally.types import Generation, SamplingParams


class Router(Protocol):
    """Who chooses the server of a request. An error that is a ReplicaGone means that none of them could be asked."""

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation: ...

    async def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """What a run wants of its servers."""

    max_model_len: int
    sampling: SamplingParams
    """As training samples; the probe at the start samples in the same way."""
    in_flight: InFlight = "keep"
    max_restarts: int = 3
    restart_delay: float = 2.0


class RemoteEngine:
    """A `TrainingEngine` over servers. `router` has their `generate`; weights and processes are minded here."""

    def __init__(
        self,
        servers: Sequence[ServerReplica],
        router: Router,
        weights: WeightTransport,
        oracle: Oracle,
        settings: RemoteSettings,
    ) -> None:
        self.servers = list(servers)
        self.router = router
        self.weights = weights
        self.oracle = oracle
        self.settings = settings
        self.restarts = 0
        self._version = 0
        self._requests = BusyClock()
        self._failure: EngineError | None = None
        self._minding = asyncio.Lock()  # one at a time gives weights to servers: an update, or one that comes back
        self._watchers: list[asyncio.Task[None]] = []

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
        own = [server for server in self.servers if isinstance(server, OwnServer)]
        self._watchers = [asyncio.create_task(self._watch(server)) for server in own]

    async def generate(
        self, prompt_ids: Sequence[int], params: SamplingParams, *, session: str | None = None
    ) -> Generation:
        for _ in range(self.settings.max_restarts):
            try:
                return await self._ask(prompt_ids, params, session)
            except ReplicaGone as gone:
                await self._help(gone)
        return await self._ask(prompt_ids, params, session)

    async def _ask(self, prompt_ids: Sequence[int], params: SamplingParams, session: str | None) -> Generation:
        with self._requests.working():
            return await self.router.generate(prompt_ids, params, session=session)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """Servers go on with the old weights meanwhile; `publish` gives them the new ones."""
        try:
            yield
        finally:  # an update that failed half way has changed weights too
            self._version += 1

    async def publish(self) -> dict[str, float]:
        async with self._minding:
            await self.weights.take(self._version)
            outcomes = await asyncio.gather(*(self._update(s) for s in self.servers), return_exceptions=True)
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and not isinstance(outcome, ReplicaGone):
                raise outcome
        for outcome in outcomes:
            if isinstance(outcome, ReplicaGone):
                await self._help(outcome)
        heard = [outcome for outcome in outcomes if isinstance(outcome, float)]
        return {
            "engine/servers": float(sum(server.serving for server in self.servers)),
            "engine/restarts": float(self.restarts),
            **({"engine/canary_difference": max(heard)} if heard else {}),
        }

    async def close(self) -> None:
        for watcher in self._watchers:
            watcher.cancel()
        await asyncio.gather(*self._watchers, return_exceptions=True)
        await self.router.close()
        await asyncio.gather(*(server.close() for server in self.servers))
        self.weights.close()

    async def _update(self, server: ServerReplica) -> float:
        """The canary's difference, once the server has the current weights."""
        await self.weights.send(server, self.settings.in_flight)
        try:
            return await canary(server, self.oracle)
        except EngineError:
            server.serving = False
            raise

    async def _introduce(self, server: ServerReplica) -> None:
        await server.up(self.weights.folder())
        await self.weights.send(server, self.settings.in_flight)
        await probe(server, self.oracle, self.settings.sampling, self.settings.max_model_len)

    async def _bring_back(self, server: ServerReplica) -> None:
        await server.up(self.weights.folder())
        await self._update(server)

    async def _watch(self, server: OwnServer) -> None:
        """Start it again when it dies, so often; then the engine has failed."""
        for _ in range(self.settings.max_restarts):
            await self._until_it_ends(server)
            await asyncio.sleep(self.settings.restart_delay)
            try:
                async with self._minding:
                    await self._bring_back(server)
            except CanaryError as problem:
                self._failure = problem
                return
            except EngineError as problem:
                self._failure = EngineError(f"{server.name} could not be started again: {problem}")
                return
            self.restarts += 1
        words = await self._until_it_ends(server)
        self._failure = EngineError(
            f"{server.name} has died {self.settings.max_restarts + 1} times (rollout.server.max_attempts="
            f"{self.settings.max_restarts} more were allowed); {words}"
        )

    async def _until_it_ends(self, server: OwnServer) -> str:
        assert server.process is not None
        await server.process.ended()
        server.serving = False
        return server.process.last_words()

    async def _help(self, gone: ReplicaGone) -> None:
        """Where nobody can be asked any more: wait until somebody can, or, if there is no hope, raise why not."""
        await asyncio.sleep(2 * POLL_SECONDS)  # a process may have died that nobody has noticed yet
        while not any(server.serving for server in self.servers):
            if self._failure is not None:
                raise self._failure
            restarting = any(isinstance(server, OwnServer) and not server.alive for server in self.servers)
            if not restarting and not self._minding.locked():
                raise gone
            await asyncio.sleep(POLL_SECONDS)


async def _all(*steps: Awaitable[None]) -> None:
    """Wait for all, then raise what the first that failed said: no other is left running."""
    for outcome in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
