"""Decides where each request goes. Synchronous and without a clock of its own, so that a simulation can drive it.

The first request of a session goes to the server with the fewest requests in flight, at random among equals. Later ones
go to the same server as long as it is usable and does not lag behind. No server has more requests in flight than
allowed. Of two requests that could take a free slot, the older one does. A request is repeated only after it failed.

`ask` queues a ticket, `place` returns the tickets to be sent now, and for each of those exactly one of `done`,
`failed`, `refused`, `void` and `leave` follows. Times are of any monotonic clock.
"""

from __future__ import annotations

import random
from bisect import bisect_left, insort
from collections import Counter, OrderedDict
from collections.abc import Iterator
from operator import attrgetter

from rally.engines.base import EngineError
from rally.engines.router.server_state import Circuit, Duty, RouterSettings, ServerState, Ticket

_serial = attrgetter("serial")


class RoutingPolicy:
    """Servers, sessions and waiting requests. `counts` are the numbers of decisions by kind."""

    def __init__(self, settings: RouterSettings | None = None) -> None:
        self.settings = settings or RouterSettings()
        self.servers: dict[str, ServerState] = {}
        self.counts: Counter[str] = Counter()
        self._homes: OrderedDict[str, str] = OrderedDict()  # session to server, least recently used first
        self._queue: list[Ticket] = []  # tickets that wait for any server, oldest first
        self._random = random.Random(self.settings.seed)
        self._asked = self._waiting = 0
        self._outage_since: float | None = None

    @property
    def waiting(self) -> int:
        return self._waiting

    @property
    def all_lost(self) -> bool:
        return bool(self.servers) and all(server.duty is Duty.LOST for server in self.servers.values())

    def add(self, name: str, now: float, duty: Duty = Duty.ON) -> None:
        if name in self.servers:
            raise EngineError(f"there is already a server {name!r}; give each its own name")
        self.servers[name] = ServerState(name, self.settings, duty=duty)
        self._update_outage(now)

    def remove(self, name: str, now: float) -> None:
        """Give it no more requests; it is removed when its requests in flight have ended."""
        server = self.servers[name]
        server.leaving = True
        self._release_queue(server)
        self._forget_if_empty(server)
        self._update_outage(now)

    def ask(self, session: str | None, now: float) -> Ticket:
        """Queue a new request; the next `place` may return it."""
        self._asked += 1
        ticket = Ticket(self._asked, session, now)
        self.counts["requests"] += 1
        self._enqueue(ticket, now)
        return ticket

    def place(self, now: float) -> list[Ticket]:
        """The tickets to be sent now, each to its `server`."""
        placed = []
        while self.waiting and any(server.has_room(now) for server in self.servers.values()):
            options = [option for option in self._options(now) if option is not None]
            if not options:
                break
            ticket, server = min(options, key=lambda option: option[0].serial)
            self._withdraw(ticket)
            server.take(ticket)
            placed.append(ticket)
        return placed

    def done(self, ticket: Ticket, now: float) -> None:
        """The server answered, be it by rejecting an invalid request."""
        server = self._leave_server(ticket)
        server.answered()
        self._set_home(ticket, server)
        self._forget_if_empty(server)
        self._update_outage(now)

    def failed(self, ticket: Ticket, now: float) -> bool:
        """The server failed during the request. Returns whether it is queued again; if not, its tries are used up."""
        server = self._leave_server(ticket)
        self.counts["failed_tries"] += 1
        ticket.failures += 1
        ticket.tried.add(server.name)
        if server.failed(now):
            self._opened(server, now)
        self._forget_if_empty(server)
        if ticket.failures >= self.settings.max_tries:
            self.counts["given_up"] += 1
            return False
        self._insert(self._queue, ticket)
        return True

    def refused(self, ticket: Ticket, retry_after: float, now: float) -> None:
        """The server is busy; the request keeps its place in the queue."""
        server = self._leave_server(ticket)
        self.counts["refusals"] += 1
        if server.refused(retry_after, now) > self.settings.patience:
            self._release_queue(server)
            self._insert(self._queue, ticket)
        else:
            self._enqueue(ticket, now)
        self._forget_if_empty(server)

    def void(self, ticket: Ticket, now: float) -> None:
        """The result is unusable but not a failure (SampleVoid); the request keeps its place in the queue."""
        self._forget_if_empty(self._leave_server(ticket))
        self.counts["void_tries"] += 1
        self._enqueue(ticket, now)

    def leave(self, ticket: Ticket) -> None:
        """The caller is gone; drop the ticket, waiting or in flight."""
        if ticket.server is None:
            self._withdraw(ticket)
        else:
            self._forget_if_empty(self._leave_server(ticket))

    def heard(self, name: str, ok: bool, now: float) -> bool:
        """The result of a health check. Returns whether the server's requests in flight must be abandoned: its circuit
        is open, possibly since an earlier failed request."""
        server = self.servers.get(name)
        if server is None:
            return False
        if server.heard(ok, now):
            self._opened(server, now)
        self._update_outage(now)
        return not ok and server.duty is Duty.ON and server.circuit is Circuit.OPEN

    def assign(self, name: str, duty: Duty, now: float) -> None:
        """Set a server's duty, on behalf of the component that manages it. ON follows a successful check and clears
        earlier failures."""
        server = self.servers[name]
        if duty is Duty.ON:
            server.back()
        elif duty is not Duty.PAUSED or server.duty is Duty.ON:  # a pause does not improve AWAY or LOST
            server.duty = duty
        if not server.usable:
            self._release_queue(server)
        self._update_outage(now)

    def forget(self, session: str) -> None:
        """The session has ended; drop its server."""
        self._homes.pop(session, None)

    def stranded(self, now: float) -> list[Ticket]:
        """Withdraw and return the requests that have waited too long while no server was usable."""
        if self._outage_since is None:
            return []
        late = [t for t in self._queue if now >= self._deadline(t)]
        for ticket in late:
            self._withdraw(ticket)
            self.counts["given_up"] += 1
        return late

    def next_change(self, now: float) -> float | None:
        """When `place` or `stranded` may return something new through the passage of time alone."""
        if not self.waiting:
            return None
        times = [s.quiet_until for s in self.servers.values() if s.usable and s.quiet_until > now]
        if self._outage_since is not None and self._queue:
            times.append(min(map(self._deadline, self._queue)))
        return min(times, default=None)

    def _options(self, now: float) -> Iterator[tuple[Ticket, ServerState] | None]:
        """Possible assignments: the oldest ticket of each queue that can be sent, with a server for it."""
        yield self._from_shared_queue(now)
        for server in self.servers.values():
            if not server.queue:
                continue
            ticket = server.queue[0]
            if server.has_room(now):
                yield ticket, server
            elif self._lags(server, now) and (other := self._least_loaded(ticket, now)):
                yield ticket, other

    def _from_shared_queue(self, now: float) -> tuple[Ticket, ServerState] | None:
        for ticket in self._queue:
            if server := self._least_loaded(ticket, now):
                return ticket, server
        return None

    def _least_loaded(self, ticket: Ticket, now: float) -> ServerState | None:
        """The server with the fewest requests in flight. One that failed on this request only if there is no other."""
        usable = [s for s in self.servers.values() if s.usable]
        untried = [s for s in usable if s.name not in ticket.tried] or usable
        free = [s for s in untried if s.has_room(now)]
        least = min((s.in_flight for s in free), default=0)
        return self._random.choice([s for s in free if s.in_flight == least]) if free else None

    def _lags(self, server: ServerState, now: float) -> bool:
        """Whether its load exceeds that of another available server so much that sessions should give up their
        cache."""
        least = min((s.load for s in self.servers.values() if s.has_room(now)), default=server.load)
        return server.load > self.settings.lag_factor * least + self.settings.lag_margin

    def _enqueue(self, ticket: Ticket, now: float) -> None:
        home = self.servers.get(self._homes.get(ticket.session or "", ""))
        stays = home is not None and home.usable and not self._lags(home, now)
        self._insert(home.queue if home is not None and stays else self._queue, ticket)

    def _insert(self, queue: list[Ticket], ticket: Ticket) -> None:
        insort(queue, ticket, key=_serial)
        ticket.queued = True
        self._waiting += 1

    def _withdraw(self, ticket: Ticket) -> None:
        if not ticket.queued:
            return
        for queue in (self._queue, *(server.queue for server in self.servers.values())):
            at = bisect_left(queue, ticket.serial, key=_serial)
            if at < len(queue) and queue[at] is ticket:
                del queue[at]
                ticket.queued = False
                self._waiting -= 1
                return

    def _set_home(self, ticket: Ticket, server: ServerState) -> None:
        """Assign the session to the server that answered last, and count whether it moved."""
        if ticket.session is None:
            return
        before = self._homes.pop(ticket.session, None)
        self._homes[ticket.session] = server.name
        if len(self._homes) > self.settings.max_sessions:
            self._homes.popitem(last=False)
            self.counts["forgotten_sessions"] += 1
        if before is None:
            self.counts["first_turns"] += 1
        elif before == server.name:
            self.counts["kept"] += 1
        else:
            old = self.servers.get(before)
            lives = old is not None and old.usable and before not in ticket.tried
            self.counts["moved_from_busy" if lives else "moved_from_dead"] += 1

    def _leave_server(self, ticket: Ticket) -> ServerState:
        assert ticket.server is not None, "a ticket that was never sent"
        server = self.servers[ticket.server]
        server.release(ticket)
        return server

    def _opened(self, server: ServerState, now: float) -> None:
        self.counts["circuits_opened"] += 1
        self._release_queue(server)
        self._update_outage(now)

    def _release_queue(self, server: ServerState) -> None:
        """Tickets that waited for this server now wait for any."""
        self._queue = sorted([*self._queue, *server.queue], key=_serial)
        server.queue = []

    def _forget_if_empty(self, server: ServerState) -> None:
        if server.leaving and server.in_flight == 0:
            del self.servers[server.name]

    def _update_outage(self, now: float) -> None:
        """Track since when no server is usable or being restarted."""
        if any(server.usable or server.duty is Duty.AWAY for server in self.servers.values()):
            self._outage_since = None
        elif self._outage_since is None:
            self._outage_since = now

    def _deadline(self, ticket: Ticket) -> float:
        if self._outage_since is None:
            return float("inf")
        if self.all_lost:
            return self._outage_since  # no server will come back
        return max(ticket.since, self._outage_since) + self.settings.give_up_after
