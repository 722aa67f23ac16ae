"""Several servers look like one engine: an episode stays with one of them, and one may die without the loops noticing.

    router = Router([RallyReplica("http://127.0.0.1:8001"), RallyReplica("http://127.0.0.1:8002")], max_model_len=2048)
    generation = await router.generate(prompt_ids, params, session="episode 17")

`RoutingPolicy` makes every decision; this module waits, sends and checks health. A request is sent again only after it
failed, with the seed of the first try, and what a failed try sampled is in no answer: nothing is counted twice.
Whoever gives servers weights and starts them again tells it here (`pause`, `away`, `lost`, `back`); until then health
checks are all that is known of them. Replicas belong to the router, which closes them.

One event loop at a time may use a router; it outlives them, so that each step of a run may have its own.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace

from rally.engines.base import NO_IMAGES, EngineError, Replica, ReplicaBusy, ReplicaGone, SampleVoid
from rally.engines.prometheus import Metric, exposition, labelled
from rally.engines.router.routing_policy import RoutingPolicy
from rally.engines.router.server_state import Duty, RouterSettings, Ticket
from rally.types import Generation, ImageSpan, SamplingParams

SEED_BITS = 31  # every kind of server takes a seed of so many


class Router:
    """An `Engine` over replicas. `weight_version` is set by whoever gives the servers their weights."""

    def __init__(
        self, replicas: Iterable[Replica], settings: RouterSettings | None = None, *, max_model_len: int
    ) -> None:
        self.settings = settings or RouterSettings()
        self.weight_version = 0
        self._max_model_len = max_model_len
        self._board = RoutingPolicy(self.settings)
        self._replicas: dict[str, Replica] = {}
        self._random = random.Random(self.settings.seed)
        self._turns: dict[Ticket, asyncio.Future[None]] = {}  # who waits to be sent off
        self._limits: dict[Ticket, asyncio.Timeout] = {}  # who is in flight, and how to end it
        self._tokens: Counter[str] = Counter()
        self._drained: dict[str, asyncio.Event] = {}
        self._watch: asyncio.Task[None] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._last_failure = ""
        self._loss = ""  # why the last server was lost
        self._lap: Counter[str] = Counter()
        self._closed = False
        for replica in replicas:
            self.add(replica)
        if not self._replicas:
            raise EngineError("a router needs at least one server; name one")

    @property
    def max_model_len(self) -> int:
        return self._max_model_len

    @property
    def replicas(self) -> tuple[Replica, ...]:
        """Those that are given requests, or will be when they are well again."""
        return tuple(self._replicas.values())

    @property
    def hopeless(self) -> bool:
        """Whether every server is lost."""
        return self._board.all_lost

    def add(self, replica: Replica) -> None:
        """Give a new server requests from now on."""
        self._board.add(replica.name, time.monotonic())
        self._replicas[replica.name] = replica
        self._dispatch()

    async def remove(self, name: str) -> None:
        """Give a server no more requests, wait for those it has, and close it."""
        if name not in self._replicas or name in self._drained:
            raise EngineError(f"there is no server {name!r} to remove; there are {', '.join(self._replicas)}")
        drained = self._drained[name] = asyncio.Event()
        self._board.remove(name, time.monotonic())
        self._dispatch()
        await drained.wait()
        await self._replicas.pop(name).close()

    def pause(self, name: str) -> None:
        """It takes no requests for a moment, which is no failure; those of its sessions wait for it."""
        self._assign(name, Duty.PAUSED)

    def away(self, name: str) -> None:
        """It is being brought back, however long that takes: requests go elsewhere, or wait."""
        self._assign(name, Duty.AWAY)

    def duty(self, name: str) -> Duty:
        """What was said of it last."""
        return self._board.servers[name].duty

    def lost(self, name: str, why: str) -> None:
        """Nobody brings it back; where every server is lost, requests fail with the reason at once."""
        self._loss = why
        self._assign(name, Duty.LOST)

    def back(self, name: str) -> None:
        """It has shown that it is well: requests go to it from now on."""
        self._assign(name, Duty.ON)

    def _assign(self, name: str, duty: Duty) -> None:
        self._board.assign(name, duty, time.monotonic())
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
        if images:
            raise EngineError(NO_IMAGES)
        if params.seed is None:
            params = replace(params, seed=self._random.getrandbits(SEED_BITS))
        self._watch_over()
        asked = time.monotonic()
        ticket = self._board.ask(session, asked)
        try:
            while True:
                await self._turn(ticket)
                waited = time.monotonic() - asked
                generation = await self._try(ticket, prompt_ids, params)
                if generation is not None:
                    return _after(waited, generation)
        finally:
            self._turns.pop(ticket, None)
            self._board.leave(ticket)
            self._dispatch()

    def expect(self, session: str) -> None:
        """An exchange begins: nothing to prepare, its first request finds a server."""

    def dismiss(self, session: str) -> None:
        """An exchange has ended: its server need not be remembered."""
        self._board.forget(session)

    async def close(self) -> None:
        self._closed = True
        if self._watch is not None:
            self._watch.cancel()
        if self._alarm is not None:
            self._alarm.cancel()
        for ticket in list(self._turns):
            self._wake(ticket, EngineError("the router was closed while this request waited"))
        await asyncio.gather(*(replica.close() for replica in self._replicas.values()))

    def metrics(self) -> dict[str, float]:
        """Everything since the beginning."""
        return self._told(self._board.counts + self._tokens)

    def lap(self) -> dict[str, float]:
        """What a run logs at each step: what was counted since it was last asked for, and how things stand now."""
        before, self._lap = self._lap, self._board.counts + self._tokens
        return self._told(self._lap - before)

    def _told(self, counts: Counter[str]) -> dict[str, float]:
        servers = self._board.servers.values()
        later = counts["kept"] + counts["moved_from_busy"] + counts["moved_from_dead"]
        return {
            **{f"router/{name}": float(counts[name]) for name in (*COUNTS, *TOKENS)},
            "router/kept_rate": counts["kept"] / later if later else 1.0,
            "router/waiting": float(self._board.waiting),
            "router/in_flight": float(sum(server.in_flight for server in servers)),
            "router/servers": float(len(servers)),
            "router/servers_usable": float(sum(server.usable for server in servers)),
        }

    def prometheus(self) -> str:
        servers = self._board.servers.values()
        gauges = [
            Metric("rally_router_waiting", "Requests that wait for a server", "gauge", self._board.waiting),
            Metric(
                "rally_router_in_flight",
                "Requests sent and not answered",
                "gauge",
                by=labelled("server", {s.name: s.in_flight for s in servers}),
            ),
            Metric(
                "rally_router_usable",
                "1 if the server is given requests",
                "gauge",
                by=labelled("server", {s.name: s.usable for s in servers}),
            ),
        ]
        counts = [Metric(f"rally_router_{n}_total", h, "counter", self._board.counts[n]) for n, h in COUNTS.items()]
        tokens = [Metric(f"rally_router_{n}_total", h, "counter", self._tokens[n]) for n, h in TOKENS.items()]
        return exposition([*gauges, *counts, *tokens])

    async def _turn(self, ticket: Ticket) -> None:
        """Wait until the board sends the ticket off."""
        turn = self._turns[ticket] = asyncio.get_running_loop().create_future()
        self._dispatch()
        await turn

    async def _try(self, ticket: Ticket, prompt_ids: Sequence[int], params: SamplingParams) -> Generation | None:
        """The answer, or None when the request waits for its turn again; raises when it has been tried enough."""
        assert ticket.server is not None
        try:
            generation = await self._send(ticket, self._replicas[ticket.server], prompt_ids, params)
        except ReplicaBusy as busy:
            self._board.refused(ticket, busy.retry_after, time.monotonic())
            return None
        except SampleVoid:
            self._board.void(ticket, time.monotonic())
            self._tokens["recomputed_prompt_tokens"] += len(prompt_ids)
            return None
        except ReplicaGone as gone:
            self._last_failure = f"{ticket.server}: {gone}"
            self._tokens["recomputed_prompt_tokens"] += len(prompt_ids)
            if not self._board.failed(ticket, time.monotonic()):
                raise ReplicaGone(
                    f"{ticket.failures} servers failed under one request, last {self._last_failure}"
                ) from gone
            return None
        except EngineError:
            self._board.done(ticket, time.monotonic())  # the caller's own mistake, well answered
            raise
        self._board.done(ticket, time.monotonic())
        self._count(prompt_ids, generation)
        return generation

    async def _send(
        self, ticket: Ticket, replica: Replica, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Generation:
        try:
            async with asyncio.timeout(None) as limit:
                self._limits[ticket] = limit
                return await replica.generate(prompt_ids, params)
        except TimeoutError as late:
            raise ReplicaGone("it no longer answers health checks") from late
        finally:
            del self._limits[ticket]

    def _count(self, prompt_ids: Sequence[int], generation: Generation) -> None:
        self._tokens["prompt_tokens"] += len(prompt_ids)
        self._tokens["cached_tokens"] += generation.cached_tokens
        self._tokens["sampled_tokens"] += len(generation.ids)

    def _dispatch(self) -> None:
        """Send off whom the board sends off, and come back when time alone may change its mind."""
        now = time.monotonic()
        for ticket in self._board.place(now):
            self._wake(ticket)
        for ticket in self._board.stranded(now):
            self._wake(ticket, self._why_stranded())
        for name in [name for name in self._drained if name not in self._board.servers]:
            self._drained.pop(name).set()
        self._set_alarm(self._board.next_change(now), now)

    def _why_stranded(self) -> EngineError:
        if self._board.all_lost:
            return EngineError(self._loss)
        last = f" (last {self._last_failure})" if self._last_failure else ""
        waited = f"no server has answered for {self.settings.give_up_after:g} s{last}"
        return EngineError(f"{waited}; start one, or look into its log")

    def _wake(self, ticket: Ticket, error: EngineError | None = None) -> None:
        turn = self._turns.pop(ticket)
        if turn.done():  # cancelled, and about to leave
            return
        if error is None:
            turn.set_result(None)
        else:
            turn.set_exception(error)

    def _set_alarm(self, moment: float | None, now: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        if moment is not None:
            self._alarm = asyncio.get_running_loop().call_later(moment - now, self._dispatch)

    def _watch_over(self) -> None:
        """Health checks run for as long as the event loop does that asks for something."""
        loop = asyncio.get_running_loop()
        if self._watch is None or self._watch.done() or self._watch.get_loop() is not loop:
            self._watch = loop.create_task(self._check_health())

    async def _check_health(self) -> None:
        while True:
            await asyncio.sleep(self.settings.health_every)
            on_duty = [server.name for server in self._board.servers.values() if server.duty is Duty.ON]
            await asyncio.gather(*(self._check(self._replicas[name]) for name in on_duty))  # others may not be asked
            self._dispatch()

    async def _check(self, replica: Replica) -> None:
        try:
            async with asyncio.timeout(self.settings.health_timeout):
                ok = await replica.healthy()
        except TimeoutError:
            ok = False
        if self._board.heard(replica.name, ok, time.monotonic()):
            self._abandon(replica.name)

    def _abandon(self, name: str) -> None:
        """Whatever a server that hangs was asked, another is asked instead."""
        now = asyncio.get_running_loop().time()
        for ticket, limit in self._limits.items():
            if ticket.server == name and not limit.expired():  # one that is about to end cannot be hurried
                limit.reschedule(now)


def _after(waited: float, generation: Generation) -> Generation:
    """The generation as it looks to whoever waited for a place at its server."""
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
    "kept": "Later requests of sessions answered by the server of the one before",
    "moved_from_busy": "Later requests of sessions answered elsewhere because their server had too much to do",
    "moved_from_dead": "Later requests of sessions answered elsewhere because their server was gone",
    "failed_tries": "Tries that a server failed under; their tokens are thrown away",
    "refusals": "Tries that a server was too busy for",
    "void_tries": "Tries whose server was given other weights meanwhile and could not say where",
    "given_up": "Requests that were given up",
    "circuits_opened": "Times a server was given no more requests for failing",
    "forgotten_sessions": "Sessions whose server was forgotten because there were too many",
}
TOKENS = {
    "prompt_tokens": "Prompt tokens of answered requests",
    "cached_tokens": "Prompt tokens that servers had cached",
    "sampled_tokens": "Tokens of answers",
    "recomputed_prompt_tokens": "Prompt tokens of tries that failed or were void",
}
