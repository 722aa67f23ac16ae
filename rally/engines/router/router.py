"""The router: several servers as one engine. An episode stays on one server, and a server may die unnoticed by loops.

    router = Router([RallyReplica("http://127.0.0.1:8001"), RallyReplica("http://127.0.0.1:8002")], max_model_len=2048)
    generation = await router.generate(prompt_ids, params, session="episode 17")

`RoutingPolicy` makes every decision; this module waits, sends and checks health. A request is sent again only after it
failed, with the seed of the first try, and the tokens of a failed try are discarded, so nothing is counted twice. The
component that updates and restarts servers reports their state here (`pause`, `away`, `lost`, `back`). The router owns
its replicas and closes them.

Only one event loop at a time may use a router. It may outlive them: each step of a run may have its own loop.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

from rally.engines.base import EngineError, Replica, ReplicaBusy, ReplicaGone, SampleVoid
from rally.engines.prometheus import Metric, exposition, labelled
from rally.engines.router.routing_policy import RoutingPolicy
from rally.engines.router.server_state import Duty, RouterSettings, Ticket
from rally.models.token_masks import GrammarError
from rally.types import Generation, ImageSpan, SamplingParams

SEED_BITS = 31  # accepted by every kind of server


class Router:
    """An `Engine` over replicas. The component that updates the servers sets `weight_version`."""

    def __init__(
        self,
        replicas: Iterable[Replica],
        settings: RouterSettings | None = None,
        *,
        max_model_len: int,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """`clock`: another one than that of the machine, for simulations. Timers are those of the event loop."""
        self._clock = clock
        self.settings = settings or RouterSettings()
        self.weight_version = 0
        self._max_model_len = max_model_len
        self._policy = RoutingPolicy(self.settings)
        self._replicas: dict[str, Replica] = {}
        self._random = random.Random(self.settings.seed)
        self._waiting: dict[Ticket, asyncio.Future[None]] = {}  # tickets that wait to be sent
        self._timeouts: dict[Ticket, asyncio.Timeout] = {}  # of tickets in flight, to abandon them
        self._tokens: Counter[str] = Counter()
        self._drained: dict[str, asyncio.Event] = {}
        self._watch: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._last_failure = ""
        self._loss_reason = ""  # of the server lost last
        self._lap: Counter[str] = Counter()
        self._closed = False
        for replica in replicas:
            self.add(replica)
        if not self._replicas:
            raise EngineError("a router needs at least one server; add one")

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """All servers, usable or not."""
        return tuple(self._replicas.values())

    @property
    def hopeless(self) -> bool:
        """Whether every server is lost."""
        return self._policy.all_lost

    def add(self, replica: Replica, duty: Duty = Duty.ON) -> None:
        """Add a server, which gets requests from now on or, with another duty, when it is `back`."""
        self._policy.add(replica.name, self._clock(), duty)
        self._replicas[replica.name] = replica
        self._dispatch()

    async def remove(self, name: str) -> None:
        """Give a server no more requests, wait for those it has, and close it."""
        if name not in self._replicas or name in self._drained:
            raise EngineError(f"there is no server {name!r} to remove; choose one of {', '.join(self._replicas)}")
        drained = self._drained[name] = asyncio.Event()
        self._policy.remove(name, self._clock())
        self._dispatch()
        await drained.wait()
        await self._replicas.pop(name).close()

    def pause(self, name: str) -> None:
        """The server takes no requests for a moment; its sessions wait for it. Not a failure."""
        self._assign(name, Duty.PAUSED)

    def away(self, name: str) -> None:
        """The server is being restarted; requests go to others or wait, however long it takes."""
        self._assign(name, Duty.AWAY)

    def duty(self, name: str) -> Duty:
        """The server's current duty."""
        return self._policy.servers[name].duty

    def has_duty(self, name: str, duty: Duty) -> bool:
        """Whether the server is known and has this duty. May be asked from any thread."""
        server = self._policy.servers.get(name)
        return server is not None and server.duty is duty

    def lost(self, name: str, reason: str) -> None:
        """The server will not come back. If all servers are lost, requests fail at once with the reason."""
        self._loss_reason = reason
        self._assign(name, Duty.LOST)

    def back(self, name: str) -> None:
        """The server passed its checks; it gets requests from now on."""
        self._assign(name, Duty.ON)

    def _assign(self, name: str, duty: Duty) -> None:
        self._policy.assign(name, duty, self._clock())
        self._dispatch()

    async def generate(
        self,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        session: str | None = None,
        images: Sequence[ImageSpan] = (),
    ) -> Generation:
        if self._closed:
            raise EngineError("the router is closed; build a new one")
        if params.seed is None:
            params = replace(params, seed=self._random.getrandbits(SEED_BITS))
        self._start_health_checks()
        start = self._clock()
        ticket = self._policy.ask(session, start)
        try:
            while True:
                await self._turn(ticket)
                waited = self._clock() - start
                generation = await self._try(ticket, prompt_ids, params, images)
                if generation is not None:
                    return _after(waited, generation)
        finally:
            self._waiting.pop(ticket, None)
            self._policy.leave(ticket)
            self._dispatch()

    def expect(self, session: str) -> None:
        """Nothing to do: the first request of a session chooses its server."""

    def dismiss(self, session: str) -> None:
        """The session has ended; forget its server."""
        self._policy.forget(session)

    async def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        for ticket in list(self._waiting):
            self._wake(ticket, EngineError("the router was closed while this request waited"))
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    def metrics(self) -> dict[str, float]:
        """Counts since the router was made, and the current state."""
        return self._metrics(self._policy.counts + self._tokens)

    def lap(self) -> dict[str, float]:
        """The metrics of a training step: counts since the last call, and the current state."""
        before, self._lap = self._lap, self._policy.counts + self._tokens
        return self._metrics(self._lap - before)

    def _metrics(self, counts: Counter[str]) -> dict[str, float]:
        servers = self._policy.servers.values()
        later = counts["kept"] + counts["moved_from_busy"] + counts["moved_from_dead"]
        return {
            **{f"router/{name}": float(counts[name]) for name in (*COUNTS, *TOKENS)},
            "router/kept_rate": counts["kept"] / later if later else 1.0,
            "router/waiting": float(self._policy.waiting),
            "router/in_flight": float(sum(server.in_flight for server in servers)),
            "router/servers": float(len(servers)),
            "router/servers_usable": float(sum(server.usable for server in servers)),
        }

    def prometheus(self) -> str:
        """All metrics in the Prometheus text format."""
        servers = self._policy.servers.values()
        gauges = [
            Metric("rally_router_waiting", "Requests that wait for a server", "gauge", self._policy.waiting),
            Metric(
                "rally_router_in_flight",
                "Requests sent and not answered",
                "gauge",
                by=labelled("server", {s.name: s.in_flight for s in servers}),
            ),
            Metric(
                "rally_router_usable",
                "1 if the server gets requests",
                "gauge",
                by=labelled("server", {s.name: s.usable for s in servers}),
            ),
        ]
        counts = [Metric(f"rally_router_{n}_total", h, "counter", self._policy.counts[n]) for n, h in COUNTS.items()]
        tokens = [Metric(f"rally_router_{n}_total", h, "counter", self._tokens[n]) for n, h in TOKENS.items()]
        return exposition([*gauges, *counts, *tokens])

    async def _turn(self, ticket: Ticket) -> None:
        """Wait until the policy places the ticket."""
        turn = self._waiting[ticket] = asyncio.get_running_loop().create_future()
        self._dispatch()
        await turn

    async def _try(
        self, ticket: Ticket, prompt_ids: Sequence[int], params: SamplingParams, images: Sequence[ImageSpan]
    ) -> Generation | None:
        """The generation, or None if the request is queued again; raises if its tries are used up."""
        assert ticket.server is not None
        try:
            generation = await self._send(ticket, self._replicas[ticket.server], prompt_ids, params, images)
        except ReplicaBusy as busy:
            self._policy.refused(ticket, busy.retry_after, self._clock())
            return None
        except SampleVoid:
            self._policy.void(ticket, self._clock())
            self._tokens["recomputed_prompt_tokens"] += len(prompt_ids)
            return None
        except ReplicaGone as gone:
            self._last_failure = f"{ticket.server}: {gone}"
            self._tokens["recomputed_prompt_tokens"] += len(prompt_ids)
            if not self._policy.failed(ticket, self._clock()):
                raise ReplicaGone(
                    f"{ticket.failures} tries of one request failed, the last on {self._last_failure}"
                ) from gone
            return None
        except (EngineError, GrammarError):
            self._policy.done(ticket, self._clock())  # an invalid request, rightly rejected
            raise
        self._policy.done(ticket, self._clock())
        self._count(prompt_ids, generation)
        return generation

    async def _send(
        self,
        ticket: Ticket,
        replica: Replica,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        images: Sequence[ImageSpan],
    ) -> Generation:
        more: dict[str, Any] = {"images": images} if images else {}  # a text-only replica need not take it
        try:
            async with asyncio.timeout(None) as limit:
                self._timeouts[ticket] = limit
                return await replica.generate(prompt_ids, params, **more)
        except TimeoutError as late:
            raise ReplicaGone("it no longer answers health checks") from late
        finally:
            del self._timeouts[ticket]

    def _count(self, prompt_ids: Sequence[int], generation: Generation) -> None:
        self._tokens["prompt_tokens"] += len(prompt_ids)
        self._tokens["cached_tokens"] += generation.cached_tokens
        self._tokens["sampled_tokens"] += len(generation.ids)

    def _dispatch(self) -> None:
        """Send the tickets that the policy places, and set a timer for when time alone may change its decisions."""
        now = self._clock()
        for ticket in self._policy.place(now):
            self._wake(ticket)
        for ticket in self._policy.stranded(now):
            self._wake(ticket, self._outage_error())
        for name in [name for name in self._drained if name not in self._policy.servers]:
            self._drained.pop(name).set()
        self._set_alarm(self._policy.next_change(now), now)

    def _outage_error(self) -> EngineError:
        if self._policy.all_lost:
            return EngineError(self._loss_reason)
        last = f" (last {self._last_failure})" if self._last_failure else ""
        waited = f"no server has answered for {self.settings.give_up_after:g} s{last}"
        return EngineError(f"{waited}; start one, or check its log")

    def _wake(self, ticket: Ticket, error: EngineError | None = None) -> None:
        turn = self._waiting.pop(ticket)
        if turn.done():  # cancelled
            return
        if error is None:
            turn.set_result(None)
        else:
            turn.set_exception(error)

    def _set_alarm(self, when: float | None, now: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if when is not None:
            self._alarm = asyncio.get_running_loop().call_later(when - now, self._dispatch)

    def _start_health_checks(self) -> None:
        """Run health checks in the current event loop, if they are not running yet."""
        loop = asyncio.get_running_loop()
        if self._watch is None or self._watch.done() or self._watch.get_loop() is not loop:
            self._watch = loop.create_task(self._check_health())

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(self.settings.health_every)
            # Servers that are not on duty are not expected to answer.
            on_duty = [server.name for server in self._policy.servers.values() if server.duty is Duty.ON]
            await asyncio.gather(*(self._check(self._replicas[name]) for name in on_duty))
            self._dispatch()

    async def _check(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self.settings.health_timeout):
                ok = await replica.healthy()
        except TimeoutError:
            ok = False
        if self._policy.heard(replica.name, ok, self._clock()):
            self.abandon(replica.name)

    def abandon(self, name: str) -> None:
        """Time out the requests of a server that hangs, so that they are sent to another."""
        now = asyncio.get_running_loop().time()
        for ticket, limit in self._timeouts.items():
            if ticket.server == name and not limit.expired():  # an expired timeout cannot be rescheduled
                limit.reschedule(now)


def _after(waited: float, generation: Generation) -> Generation:
    """The generation with the time that it waited for a server added."""
    first = generation.first_token_seconds
    return replace(
        generation,
        seconds=generation.seconds + waited,
        queued_seconds=generation.queued_seconds + waited,
        first_token_seconds=first + waited if first else 0.0,
    )


COUNTS = {
    "requests": "Requests asked for",
    "first_turns": "Answered first requests of sessions",
    "kept": "Later requests of sessions answered by the same server as before",
    "moved_from_busy": "Later requests of sessions answered by another server because theirs was overloaded",
    "moved_from_dead": "Later requests of sessions answered by another server because theirs was gone",
    "failed_tries": "Tries during which the server failed; their tokens are discarded",
    "refusals": "Tries that a busy server rejected",
    "void_tries": "Tries during which weights changed at a token that the server did not report",
    "given_up": "Requests that failed after all tries",
    "circuits_opened": "Times a server got no more requests because of failures",
    "forgotten_sessions": "Sessions whose server was forgotten because there were too many",
}
TOKENS = {
    "prompt_tokens": "Prompt tokens of answered requests",
    "cached_tokens": "Prompt tokens that servers had cached",
    "sampled_tokens": "Sampled tokens of answered requests",
    "recomputed_prompt_tokens": "Prompt tokens of tries that failed or were void",
}
