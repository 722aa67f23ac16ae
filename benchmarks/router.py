"""Simulates the router: eight servers, thousands of episodes with heavy-tailed lengths, and the failure of one server.

    python -m benchmarks.router [--episodes 10000] [--servers 8] [--at-once 1024] [--seed 0]

The time is simulated: `RoutingPolicy` is driven by the events of a model in which a server's step takes longer the more
requests share it, and a prompt that is not in a server's cache must be computed. Imbalance is how far the work of one
server is from the mean of those that were up all the time. Crowding is the largest number of requests in flight at one
server over the mean, averaged over time. The other rows are common alternatives to such a router.
"""

from __future__ import annotations

import argparse
import heapq
import math
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass, field

from rally.engines.router.routing_policy import RoutingPolicy
from rally.engines.router.server_state import RouterSettings, ServerState, Ticket

STEP, STEP_PER_REQUEST = 0.008, 0.00008  # seconds of one step, and what each request in it adds
PREFILL = 1 / 60  # of a step's share, for each prompt token that was not cached
HEALTH_EVERY = 2.0


@dataclass(eq=False)
class Episode:
    name: str
    turns: list[int]  # tokens sampled in each
    pauses: list[float]  # of the tool after each
    history: int  # tokens
    at: int = 0
    cached_at: str | None = None
    finished_turns: int = 0


@dataclass(eq=False)
class Machine:
    """A server whose requests share its steps equally: `clock` counts the tokens that each of them has had so far."""

    name: str
    alive: bool = True
    clock: float = 0.0
    moved: float = 0.0
    work: float = 0.0
    running: list[tuple[float, int, Ticket]] = field(default_factory=list)

    def advance(self, now: float) -> None:
        if self.running:
            passed = (now - self.moved) / (STEP + STEP_PER_REQUEST * len(self.running))
            self.clock += passed
        self.moved = now

    def next_finish(self) -> float:
        if not (self.alive and self.running):
            return math.inf
        return self.moved + (self.running[0][0] - self.clock) * (STEP + STEP_PER_REQUEST * len(self.running))


@dataclass(frozen=True, kw_only=True)
class Outcome:
    seconds: float
    crowding: float  # most in flight at one server over the mean of all, averaged over time until episodes run out
    loads: dict[str, float]
    survivors: frozenset[str]
    later_turns: int
    prefix_hits: int
    lost_at_death: int
    failed_tries: int
    finished_turns: int
    counts: dict[str, int]

    @property
    def imbalance(self) -> float:
        """How far the most (or least) loaded server is from the mean of those that were up all the time."""
        lived = [self.loads[name] for name in self.survivors]
        mean = sum(lived) / len(lived)
        return max(abs(load - mean) for load in lived) / mean

    @property
    def hit_rate(self) -> float:
        return self.prefix_hits / self.later_turns


def heavy_tailed(rng: random.Random, least: int, most: int, shape: float) -> int:
    return min(most, int(least * rng.paretovariate(shape)))


def make_episodes(count: int, seed: int) -> list[Episode]:
    """Episodes of mostly two or more turns, up to thirty; a turn has 40 to 4,096 tokens."""
    rng, made = random.Random(seed), []
    for number in range(count):
        turns = [heavy_tailed(rng, 40, 4096, 1.3) for _ in range(heavy_tailed(rng, 2, 30, 1.2))]
        pauses = [rng.lognormvariate(-1.0, 1.0) for _ in turns]
        made.append(Episode(f"e{number}", turns, pauses, rng.randint(200, 800)))
    return made


class Simulation:
    """Processes events in the order of their times and reports them to the router in that order."""

    def __init__(self, board: RoutingPolicy, servers: int, episodes: list[Episode], at_once: int) -> None:
        self.board, self.now, self.serial = board, 0.0, 0
        self.machines = {f"s{i}": Machine(f"s{i}") for i in range(servers)}
        for name in self.machines:
            board.add(name, 0.0)
        self.backlog = list(reversed(episodes))
        self.episodes = episodes
        self.owners: dict[Ticket, Episode] = {}
        self.events: list[tuple[float, int, Callable[[], None]]] = []
        self.later_turns = self.prefix_hits = self.lost = self.unfinished = 0
        self.died: set[str] = set()
        self.crowded = self.crowded_seconds = 0.0
        for _ in range(min(at_once, len(episodes))):
            self.begin_episode()

    def at(self, moment: float, what: Callable[[], None]) -> None:
        self.serial += 1
        heapq.heappush(self.events, (moment, self.serial, what))

    def begin_episode(self) -> None:
        if self.backlog:
            self.unfinished += 1
            self.ask(self.backlog.pop())

    def ask(self, episode: Episode) -> None:
        self.owners[self.board.ask(episode.name, self.now)] = episode

    def dispatch(self) -> None:
        """Does what the asynchronous router does after each event."""
        for ticket in self.board.place(self.now):
            assert ticket.server is not None
            machine, episode = self.machines[ticket.server], self.owners[ticket]
            if not machine.alive:
                self.at(self.now, lambda t=ticket: self.fail(t))  # type: ignore[misc]
                continue
            machine.advance(self.now)
            hit = episode.cached_at == machine.name
            fresh = 30 if hit else episode.history
            cost = episode.turns[episode.at] + fresh * PREFILL
            self.serial += 1
            heapq.heappush(machine.running, (machine.clock + cost, self.serial, ticket))
            machine.work += cost
            if episode.at:
                self.later_turns += 1
                self.prefix_hits += hit

    def fail(self, ticket: Ticket) -> None:
        assert self.board.failed(ticket, self.now), "every request finds a server in the end"

    def finish(self, machine: Machine) -> None:
        machine.advance(self.now)
        ticket = heapq.heappop(machine.running)[2]
        self.board.done(ticket, self.now)
        episode = self.owners.pop(ticket)
        episode.finished_turns += 1
        episode.history += episode.turns[episode.at] + 30
        episode.cached_at, pause = machine.name, episode.pauses[episode.at]
        episode.at += 1
        if episode.at < len(episode.turns):
            self.at(self.now + pause, lambda: self.ask(episode))
        else:
            self.board.forget(episode.name)
            self.unfinished -= 1
            self.begin_episode()

    def kill(self, name: str) -> None:
        machine = self.machines[name]
        machine.advance(self.now)
        machine.alive, lost, machine.running = False, machine.running, []
        self.died.add(name)
        self.lost += len(lost)
        for _, _, ticket in lost:
            episode = self.owners[ticket]
            if episode.at:  # this try does not count as a turn
                self.later_turns -= 1
                self.prefix_hits -= episode.cached_at == name
            self.fail(ticket)

    def revive(self, name: str) -> None:
        self.machines[name].alive = True
        for episode in self.episodes:
            if episode.cached_at == name:
                episode.cached_at = None

    def check_health(self) -> None:
        for machine in self.machines.values():
            self.board.heard(machine.name, machine.alive, self.now)
        self.at(self.now + HEALTH_EVERY, self.check_health)

    def pass_time(self, moment: float) -> None:
        in_flight = [len(machine.running) for machine in self.machines.values() if machine.alive]
        if self.backlog and sum(in_flight):
            self.crowded += (moment - self.now) * max(in_flight) * len(in_flight) / sum(in_flight)
            self.crowded_seconds += moment - self.now
        self.now = moment

    def run(self) -> Outcome:
        self.check_health()
        self.dispatch()
        while self.unfinished:
            finish, machine = min((m.next_finish(), m.name) for m in self.machines.values())
            if self.events and self.events[0][0] <= finish:
                moment, _, happen = heapq.heappop(self.events)
                self.pass_time(moment)
                happen()
            else:
                self.pass_time(finish)
                self.finish(self.machines[machine])
            self.dispatch()
        return Outcome(
            seconds=self.now,
            crowding=self.crowded / self.crowded_seconds,
            loads={m.name: m.work for m in self.machines.values()},
            survivors=frozenset(self.machines.keys() - self.died),
            later_turns=self.later_turns,
            prefix_hits=self.prefix_hits,
            lost_at_death=self.lost,
            failed_tries=self.board.counts["failed_tries"],
            finished_turns=sum(e.finished_turns for e in self.episodes),
            counts=dict(self.board.counts),
        )


class Hashed(RoutingPolicy):
    """A common alternative: the session's name decides, regardless of load."""

    def _least_loaded(self, ticket: Ticket, now: float) -> ServerState | None:
        usable = [s for s in self.servers.values() if s.usable]
        return usable[zlib.crc32(str(ticket.session).encode()) % len(usable)]


def settings(**changes: float) -> RouterSettings:
    return RouterSettings(max_in_flight=512, **changes)  # type: ignore[arg-type]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("episodes", 10_000), ("servers", 8), ("at-once", 1024), ("seed", 0)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    boards = {
        "router": RoutingPolicy(settings(seed=given.seed)),
        "sessions never leave": RoutingPolicy(settings(seed=given.seed, lag_factor=math.inf)),
        "each turn to the emptiest": RoutingPolicy(settings(seed=given.seed, lag_factor=0.0, lag_margin=-1)),
        "hash of the session": Hashed(settings(seed=given.seed, lag_factor=math.inf)),
    }
    print(f"{given.episodes:,} episodes, {given.at_once:,} at once, {given.servers} servers, seed {given.seed}")
    for kill in (False, True):
        for name, board in boards.items():
            board = type(board)(board.settings)
            simulation = Simulation(board, given.servers, make_episodes(given.episodes, given.seed), given.at_once)
            if kill:
                simulation.at(60.0, lambda s=simulation: s.kill("s3"))  # type: ignore[misc]
                simulation.at(120.0, lambda s=simulation: s.revive("s3"))  # type: ignore[misc]
            began = time.perf_counter()
            outcome = simulation.run()
            rate = outcome.counts["requests"] / (time.perf_counter() - began)
            print(
                f"{name:26}{'a death' if kill else '':8} imbalance {outcome.imbalance:6.1%}  crowding "
                f"{outcome.crowding:.3f}  prefix hits {outcome.hit_rate:6.1%}  {outcome.seconds:7.1f} s simulated  "
                f"lost {outcome.lost_at_death}, failed tries {outcome.failed_tries}  {rate:,.0f} requests/s decided"
            )


if __name__ == "__main__":
    main()
