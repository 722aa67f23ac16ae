"""The engine over rollout servers: updates their weights, verifies them, and restarts launched servers that die.

After an update every server loads the new version and must pass a canary generation; one that does not gets no
requests. Before the next update it must pass it again. A launched server that dies is restarted with the current
weights, while requests go to the others or wait. Servers that share the trainer's GPU sleep during the update, so that
the trainer can use their memory.
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

Result = TypeVar("Result")

_log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RemoteSettings:
    """Settings of a remote engine."""

    max_model_len: int
    sampling: SamplingParams
    """The sampling parameters of training; the probe at the start uses them too."""
    in_flight: InFlight = "keep"
    max_restarts: int = 3
    restart_delay: float = 2.0
    sleeps: bool = False
    """Servers release their GPU memory during the update."""
    router: RouterSettings = field(default_factory=RouterSettings)


class RemoteEngine:
    """A `TrainingEngine` over servers. The router owns the servers and routes requests; this class manages weights and
    processes."""

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
        self._update_lock = asyncio.Lock()  # an update and a restart must not send weights at once
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
        assert not self._watchers, "the engine has already been started"
        self._version = version

    async def start(self) -> None:
        await self.weights.stage(self._version)
        await _all(*(self._bring_up(server) for server in self.servers))
        own = [server for server in self.servers if isinstance(server, LaunchedServer)]
        self._watchers = {server.name: asyncio.create_task(self._watch(server)) for server in own}
        for name, watcher in self._watchers.items():
            watcher.add_done_callback(functools.partial(self._watcher_ended, name))

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
        """Check that the servers still have the weights that they were given, because whoever reaches them may have
        replaced them since. Then put them to sleep, if they share the trainer's GPU. One that fails gets no more
        requests."""
        async with self._update_lock:
            outcomes = await asyncio.gather(*(self._rest(s) for s in self.servers), return_exceptions=True)
        await self._drop_failed(outcomes)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The weights may change inside. Servers keep the old ones, or sleep, until `publish`."""
        try:
            yield
        finally:  # an update that failed may have changed weights too
            self._version += 1

    async def publish(self) -> dict[str, float]:
        start = time.perf_counter()
        async with self._update_lock:
            await self._stage_current()
            written = time.perf_counter()
            if self.settings.sleeps:
                torch.cuda.empty_cache()  # servers need the memory that the update used
            outcomes = await asyncio.gather(*(self._update(s) for s in self.servers), return_exceptions=True)
        await self._drop_failed(outcomes)
        differences = [outcome for outcome in outcomes if isinstance(outcome, float)]
        return {
            "timing_s/write_weights": written - start,
            "engine/servers": float(sum(server.serving for server in self.servers)),
            "engine/restarts": float(self.restarts),
            **({"engine/canary_difference": max(differences)} if differences else {}),
            **self.router.lap(),
        }

    async def close(self) -> None:
        for watcher in self._watchers.values():
            watcher.cancel()
        await asyncio.gather(*self._watchers.values(), return_exceptions=True)
        await self.router.close()
        self.weights.close()

    async def _rest(self, server: ServerReplica) -> None:
        if server.serving and server.version == self._version:
            await canary(server, self.oracle)
        if self.settings.sleeps:
            self.router.pause(server.name)
            await server.sleep()

    async def _update(self, server: ServerReplica) -> float:
        """Load the current weights into a server, check them, and only then give it requests. Returns the canary's
        difference."""
        self.router.pause(server.name)
        difference = await self._send_and_check(server, lambda: canary(server, self.oracle))
        self.router.back(server.name)
        return difference

    async def _send_and_check(self, server: ServerReplica, check: Callable[[], Awaitable[Result]]) -> Result:
        """Send the weights, and again if `check` fails and the transport has another way."""
        version = self._version
        await self.weights.send(server, self.settings.in_flight)
        try:
            return await check()
        except EngineError as problem:
            server.serving = False
            if not isinstance(problem, CanaryError) or version != self._version or not self.weights.fall_back(problem):
                raise
        return await self._send_and_check(server, check)

    async def _drop_failed(self, outcomes: Sequence[object]) -> None:
        """Give no more requests to servers whose outcome is an error. Raises on a failed canary, on an unexpected
        error, or if no server is left."""
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and (
                isinstance(outcome, CanaryError) or not isinstance(outcome, EngineError)
            ):
                raise outcome
        failed = {
            server.name: outcome
            for server, outcome in zip(self.servers, outcomes, strict=True)
            if isinstance(outcome, EngineError)
        }
        if not failed:
            return
        await asyncio.sleep(2 * POLL_SECONDS)  # let watchers notice processes that have died
        for server in self.servers:
            if server.name in failed and self.router.duty(server.name) is Duty.PAUSED:
                _log.warning("%s gets no requests: %s", server.name, failed[server.name])
                self.router.lost(server.name, str(failed[server.name]))
        if self.router.hopeless:
            raise next(iter(failed.values()))

    async def _bring_up(self, server: ServerReplica) -> None:
        await server.up(await self.weights.folder())
        window = self.settings.max_model_len
        await self._send_and_check(server, lambda: probe(server, self.oracle, self.settings.sampling, window))

    async def _watch(self, server: LaunchedServer) -> None:
        """Restart a server when it dies, up to `max_restarts` times; then it is lost."""
        allowed = self.settings.max_restarts
        reason = await self._wait_for_end(server)
        for _ in range(allowed):
            await asyncio.sleep(self.settings.restart_delay)
            try:
                await self._restart(server)
            except EngineError as problem:
                reason = str(problem)
                continue
            self.restarts += 1
            reason = await self._wait_for_end(server)
        tried = f"rollout.server.max_attempts={allowed} attempts to start it again"
        self.router.lost(server.name, f"{server.name} is lost after {tried}: {reason}")

    async def _restart(self, server: LaunchedServer) -> None:
        """Start the process again and load the current weights; ended if that fails."""
        async with self._update_lock:
            try:
                await self._stage_current()
                await server.up(await self.weights.folder())
                await self._catch_up(server)
            except EngineError:
                await server.down()
                raise

    async def _catch_up(self, server: ServerReplica) -> None:
        """Update the server until it has the current weights: they may change while it loads or runs the canary."""
        while True:
            await self._stage_current()
            version = self._version
            try:
                await self._update(server)
                return
            except CanaryError:
                if version == self._version:
                    raise

    async def _stage_current(self) -> None:
        """Stage the current weights. Repeats if the version changed meanwhile."""
        while self.weights.version != self._version:
            await self.weights.stage(self._version)

    def _watcher_ended(self, name: str, watcher: asyncio.Task[None]) -> None:
        """Mark the server as lost if its watcher failed, because nothing would restart it."""
        if not watcher.cancelled() and (problem := watcher.exception()) is not None:
            self.router.lost(name, f"{name} could not be started again: {type(problem).__name__}: {problem}")

    async def _wait_for_end(self, server: LaunchedServer) -> str:
        assert server.process is not None
        await server.process.ended()
        server.serving = False
        self.router.away(server.name)
        return f"it died; {server.process.log_tail()}"


async def _all(*steps: Awaitable[None]) -> None:
    """Wait for all, then raise the first exception, so that none is left running."""
    for outcome in await asyncio.gather(*steps, return_exceptions=True):
        if isinstance(outcome, BaseException):
            raise outcome
