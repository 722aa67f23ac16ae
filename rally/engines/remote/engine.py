"""The engine over rollout servers: updates their weights, verifies them, and restarts launched servers that die.

After an update every server loads the new version and must pass a canary generation; one that does not gets no
requests. Before the next update it must pass it again. A launched server that dies is restarted with the current
weights, while requests go to the others or wait. Servers that share the trainer's GPU sleep during the update, so that
the trainer can use their memory.

Servers may join and leave while the run goes on (`joining`). One that joins gets requests after it has loaded the
published weights and passed the probe. One that leaves or dies loses no request: its requests are sent to others. One
that hangs while it loads weights or is checked holds up the run for `join_seconds` at most, and then leaves.

In asynchronous training servers sample while the trainer changes its weights. All servers that get requests have the
version published last, which a server that starts or joins gets too, from what was staged. It is checked against what
the trainer's forward gave when that version was published.
"""

from __future__ import annotations

import asyncio
import functools
import logging
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, TypeVar

from torch import Tensor

from rally.engines.base import NO_GRAMMAR, EngineError, ReplicaGone, UtilizationClock
from rally.engines.remote.canary import CanaryError, Oracle, canary, probe
from rally.engines.remote.client import HEALTH_SECONDS, ServerReplica
from rally.engines.remote.joining import JoinFolder, ServerAnnouncement
from rally.engines.remote.launched_server import LaunchedServer
from rally.engines.remote.server_api import HttpCall, InFlight
from rally.engines.remote.weight_updates import WeightTransport
from rally.engines.router.router import Router
from rally.engines.router.server_state import Duty, RouterSettings
from rally.platforms import named_platform
from rally.types import Generation, ImageSpan, SamplingParams
from rally.util.subprocesses import POLL_SECONDS

Result = TypeVar("Result")
JOINING = "joining"  # the watcher of servers that join
LOOKS = 20  # at a server that joined, in the time that it has
REST = 10  # a server that held up the run for a while is tried again after so many times as long

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
    join_seconds: float = 120.0
    """A server that joined leaves if it needs longer to load weights and to pass its check."""
    sleeps: bool = False
    """Servers release their GPU memory during the update."""
    router: RouterSettings = field(default_factory=RouterSettings)


class ServerClients(Protocol):
    """Other processes that send requests to the servers."""

    @property
    def busy_seconds(self) -> float: ...

    def lap(self) -> dict[str, float]:
        """Metrics since the last call."""
        ...


class RemoteEngine:
    """A `TrainingEngine` over servers. The router owns the servers and routes requests; this class manages weights and
    processes."""

    def __init__(
        self,
        servers: Sequence[ServerReplica],
        weights: WeightTransport,
        oracle: Oracle,
        settings: RemoteSettings,
        joining: JoinFolder | None = None,
    ) -> None:
        self.servers = list(servers)
        self.router = Router(servers, settings.router, max_model_len=settings.max_model_len)
        self.weights = weights
        self.oracle = replace(oracle, forward=self._published_logits)
        self.settings = settings
        self.restarts = 0
        self._forward = oracle.forward
        self._version = 0  # of the trainer's weights
        self._published = 0  # of the weights that servers have, or get when they start
        self._changing = False  # whether the trainer changes its weights now
        self._forward_lock = threading.Lock()  # the trainer's weights do not change during a forward
        self._known: tuple[tuple[int, ...], Tensor] | None = None  # tokens, and their logits by the published version
        self._requests = UtilizationClock()
        self._update_lock = asyncio.Lock()  # an update and a restart must not send weights at once
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self.clients: ServerClients | None = None  # processes that ask the servers by themselves
        self._joining = joining
        self.joined: dict[ServerAnnouncement, ServerReplica] = {}
        self._attempts: dict[ServerAnnouncement, asyncio.Task[None]] = {}  # to join or to leave
        self._join_problems: dict[ServerAnnouncement, str] = {}
        self._rests: dict[ServerAnnouncement, float] = {}  # servers that hung, and when they may try to join again

    @property
    def weight_version(self) -> int:
        return self._published

    @property
    def max_model_len(self) -> int:
        return self.settings.max_model_len

    @property
    def busy_seconds(self) -> float:
        return self._requests.seconds if self.clients is None else self.clients.busy_seconds

    def begin_at(self, version: int) -> None:
        assert not self._watchers, "the engine has already been started"
        self._version = self._published = version

    async def start(self) -> None:
        await self._stage_published()
        await _all(*(self._bring_up(server) for server in self.servers))
        own = [server for server in self.servers if isinstance(server, LaunchedServer)]
        self._watchers = {server.name: asyncio.create_task(self._watch(server)) for server in own}
        for name, watcher in self._watchers.items():
            watcher.add_done_callback(functools.partial(self._watcher_ended, name))
        if self._joining is not None:
            self._watchers[JOINING] = asyncio.create_task(self._watch_joining(self._joining))

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

    async def check_grammar(self, grammar: str) -> None:
        """Whether a server can compile it is found by `generate`."""
        if not all(server.api.applies_grammars for server in self.servers):
            raise EngineError(NO_GRAMMAR)

    def expect(self, session: str) -> None:
        self.router.expect(session)

    def dismiss(self, session: str) -> None:
        self.router.dismiss(session)

    async def rest(self) -> None:
        """Check that the servers still have the weights that they were given, because whoever reaches them may have
        replaced them since. Then put them to sleep, if they share the trainer's GPU. One that fails gets no more
        requests."""
        await self._check_all(sleep=self.settings.sleeps)

    async def verify(self) -> None:
        """Check that the servers still have the weights that they were given, while requests and an update go on."""
        await self._check_all(sleep=False)

    async def _check_all(self, *, sleep: bool) -> None:
        async with self._update_lock:
            servers = list(self.servers)
            outcomes = await asyncio.gather(*(self._check(s, sleep) for s in servers), return_exceptions=True)
        await self._drop_failed(servers, outcomes)

    @contextmanager
    def updating(self) -> Iterator[None]:
        """The weights may change inside. Servers keep the old ones, or sleep, until `publish`."""
        with self._forward_lock:
            self._changing = True
        try:
            yield
        finally:  # an update that failed may have changed weights too
            self._version += 1
            self._changing = False

    def _published_logits(self, ids: Sequence[int]) -> Tensor:
        """The logits of the published version over the tokens. When the trainer's weights are no longer those, only the
        logits of tokens that were computed before are known: those up to the first token that differs."""
        with self._forward_lock:
            if not self._changing and self._version == self._published:
                logits_TV = self._forward(ids)
                self._known = self._known or (tuple(ids), logits_TV)
                return logits_TV
        assert self._known is not None, "publish computes the logits of a version before it changes"
        known, logits_TV = self._known
        same = next((n for n, (a, b) in enumerate(zip(known, ids, strict=False)) if a != b), min(len(known), len(ids)))
        return logits_TV[:same]

    async def publish(self) -> dict[str, float]:
        start = time.perf_counter()
        async with self._update_lock:
            await self._stage(self._version)
            written = time.perf_counter()
            if self.settings.sleeps:
                named_platform("auto").empty_cache()  # servers need the memory that the update used
            servers = list(self.servers)
            for server in servers:  # at once: no request that begins from now on is sampled by an older version
                self.router.pause(server.name)
            self._published, self._known = self._version, None
            self.weights.expect([server for server in servers if self._announcement_of(server) is None])
            outcomes = await asyncio.gather(*(self._update(s) for s in servers), return_exceptions=True)
            if self._known is None:  # no server answered; those that start later are compared with this
                await asyncio.to_thread(self._published_logits, self.oracle.prompt())
        await self._drop_failed(servers, outcomes)
        differences = [outcome for outcome in outcomes if isinstance(outcome, float)]
        return {
            "timing_s/write_weights": written - start,
            "engine/servers": float(sum(server.serving for server in self.servers)),
            "engine/joined": float(len(self.joined)),
            "engine/restarts": float(self.restarts),
            **({"engine/canary_difference": max(differences)} if differences else {}),
            **self.router.lap(),
            **({} if self.clients is None else self.clients.lap()),
        }

    def describe_servers(self) -> dict[str, Any]:
        """The servers and their state, for processes that ask them by themselves."""
        return {
            "version": self._published,
            "servers": [
                {
                    "name": server.name,
                    "url": server.url,
                    "headers": server.headers,
                    "version": server.version,
                    "serving": server.serving and self.router.has_duty(server.name, Duty.ON),
                    "lost": self.router.has_duty(server.name, Duty.LOST),
                    "salt": server.salt,
                }
                for server in tuple(self.servers)
            ],
        }

    async def close(self) -> None:
        tasks = [*self._watchers.values(), *self._attempts.values()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.router.close()
        self.weights.close()

    async def _check(self, server: ServerReplica, sleep: bool) -> None:
        check = server.serving and server.version == self._published
        if (one := self._announcement_of(server)) is not None:
            if check:
                await self._in_time(one, server, canary(server, self.oracle))
            return
        if check:
            await canary(server, self.oracle)
        if sleep:
            self.router.pause(server.name)
            await server.sleep()

    async def _update(self, server: ServerReplica) -> float:
        """Load the published weights into a server, check them, and only then give it requests. Returns the canary's
        difference."""
        self.router.pause(server.name)
        update = functools.partial(self._send_and_check, server, lambda: canary(server, self.oracle))
        if (one := self._announcement_of(server)) is None:
            difference = await update()
        else:
            await server.call(HttpCall("/health"), HEALTH_SECONDS)  # a node that is gone is noticed at once
            difference = await self._in_time(one, server, update())
        self.router.back(server.name)
        return difference

    def _announcement_of(self, server: ServerReplica) -> ServerAnnouncement | None:
        """What a server that joined announced; None for a server of the run."""
        return next((one for one, joined in self.joined.items() if joined is server), None)

    async def _in_time(self, one: ServerAnnouncement, server: ServerReplica, work: Awaitable[Result]) -> Result:
        """Await work with a server that joins or has joined. It must not hold up the run, again and again. A time in
        which this event loop is blocked, as by an update, does not count."""
        seconds, waited = self.settings.join_seconds, 0.0
        task = asyncio.ensure_future(work)
        try:
            while waited < seconds and not task.done():
                before = time.monotonic()
                await asyncio.wait([task], timeout=seconds / LOOKS)
                waited += min(time.monotonic() - before, seconds / LOOKS)
            if task.done():
                return task.result()
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
        self._rests[one] = time.monotonic() + REST * seconds
        raise ReplicaGone(
            f"{server.name} did not load weights and pass its check within {seconds:g} s "
            f"(rollout.server.join_timeout); it may join again in {REST * seconds:g} s, or at once when its "
            "announcement is removed and written again"
        )

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

    async def _drop_failed(self, servers: Sequence[ServerReplica], outcomes: Sequence[object]) -> None:
        """Give no more requests to servers whose outcome is an error; those that joined leave. Raises on a failed
        canary, on an unexpected error, or if no server is left."""
        for outcome in outcomes:
            if isinstance(outcome, BaseException) and (
                isinstance(outcome, CanaryError) or not isinstance(outcome, EngineError)
            ):
                raise outcome
        failed = {
            server.name: outcome
            for server, outcome in zip(servers, outcomes, strict=True)
            if isinstance(outcome, EngineError)
        }
        if not failed:
            return
        for announcement, server in list(self.joined.items()):
            if (problem := failed.pop(server.name, None)) is not None:
                if isinstance(problem, ReplicaGone):  # its requests would wait until they time out
                    self.router.abandon(server.name)
                self._leave(announcement, str(problem))
        if not failed:
            return
        await asyncio.sleep(2 * POLL_SECONDS)  # let watchers notice processes that have died
        for server in self.servers:
            if server.name in failed and self.router.duty(server.name) is Duty.PAUSED:
                _log.warning("%s gets no requests: %s", server.name, failed[server.name])
                self.router.lost(server.name, str(failed[server.name]))
                if isinstance(failed[server.name], ReplicaGone):
                    self.router.abandon(server.name)
        if self.router.hopeless:
            raise next(iter(failed.values()))

    async def _bring_up(self, server: ServerReplica) -> None:
        await server.up(await self.weights.folder())
        window = self.settings.max_model_len
        await self._send_and_check(server, lambda: probe(server, self.oracle, self.settings.sampling, window))

    async def _watch_joining(self, joining: JoinFolder) -> None:
        """Let servers join and leave as they are announced."""
        while True:
            announced = await asyncio.to_thread(joining.read)
            self._rests = {one: until for one, until in self._rests.items() if one in announced}
            for one in announced - self.joined.keys() - self._attempts.keys():
                if time.monotonic() >= self._rests.get(one, 0.0):
                    self._begin(one, self._join(one, joining.make))
            if set(self.joined) - announced:
                async with self._update_lock:  # an update may be sending it weights
                    for one in set(self.joined) - announced:
                        self._leave(one, "it is no longer announced")
            await asyncio.sleep(self.settings.router.health_every)

    def _begin(self, one: ServerAnnouncement, work: Coroutine[Any, Any, None]) -> None:
        """Let a server join or leave in the background."""
        task = self._attempts[one] = asyncio.create_task(work)

        def ended(task: asyncio.Task[None]) -> None:
            if self._attempts.get(one) is task:
                del self._attempts[one]
            if not task.cancelled() and (problem := task.exception()) is not None:
                _log.warning("%s failed to join or to leave: %s: %s", one.name, type(problem).__name__, problem)

        task.add_done_callback(ended)

    async def _join(self, one: ServerAnnouncement, make: Callable[[ServerAnnouncement], ServerReplica]) -> None:
        """Load the published weights into a server and add it. If that fails it is tried again; a problem is reported
        when it changes."""
        server = None
        try:
            server = make(one)
            await server.call(HttpCall("/health"), HEALTH_SECONDS)
            async with self._update_lock:
                await self._stage_published()
                await self._in_time(one, server, self._bring_up(server))
                self.router.add(server)
                self.servers.append(server)
                self.joined[one] = server
        except EngineError as problem:
            if self._join_problems.get(one) != str(problem):
                self._join_problems[one] = str(problem)
                _log.warning("%s cannot join yet: %s", one.name, problem)
        else:
            self._join_problems.pop(one, None)
            _log.warning("%s joined the run with weights of version %d", server.name, self._published)
        finally:
            if server is not None and one not in self.joined:
                await server.close()

    def _leave(self, one: ServerAnnouncement, reason: str) -> None:
        """Give a server no more weights and no more requests; it is closed when those that it has have ended."""
        server = self.joined.pop(one)
        self.servers.remove(server)
        _log.warning("%s leaves the run: %s", server.name, reason)
        self._begin(one, self.router.remove(server.name))

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
        """Start the process again and load the published weights; ended if that fails."""
        async with self._update_lock:
            try:
                await self._stage_published()
                await server.up(await self.weights.folder())
                await self._catch_up(server)
            except EngineError:
                await server.down()
                raise

    async def _catch_up(self, server: ServerReplica) -> None:
        """Update the server. A transport that reads the trainer's memory is used again if the trainer's weights changed
        while the server loaded them or ran the canary."""
        while True:
            await self._stage_published()
            version = self._version
            try:
                await self._update(server)
                return
            except CanaryError:
                if version == self._version:
                    raise

    async def _stage_published(self) -> None:
        """Stage the published weights, if they are not. If the transport reads the trainer's memory, the published ones
        are those that the trainer has now."""
        if not self.weights.keeps_staged and self._published != self._version:
            self._published, self._known = self._version, None
        await self._stage(self._published)

    async def _stage(self, version: int) -> None:
        if self.weights.version != version:
            await self.weights.stage(version)

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
