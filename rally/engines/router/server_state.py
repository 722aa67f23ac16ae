"""One server as the router sees it: what it has in flight, whether it is trusted, and until when it wants nothing.

A circuit breaker with three states. `closed`: it is given requests. `open`: after several failures in a row it is given
none. `half_open`: after a pause and a good health check it is given one request, and with every further check that it
passes twice as many; the first to be answered closes the circuit, the first to fail opens it again.

Beside what is found out about a server stands what is told of it by whoever starts it and gives it weights: its duty.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """How requests are spread over servers; times are seconds."""

    max_in_flight: int = 256  # requests at one server; the others wait here, first come first served
    lag_factor: float = 1.25  # a session leaves its server when that has more than this many times the least load
    lag_margin: int = 8  # and so many requests on top
    open_after: int = 3  # failures in a row
    first_pause: float = 1.0  # before a server that failed is tried again; doubles each time
    longest_pause: float = 60.0
    busy_pause: float = 0.1  # after a refusal that names no time; doubles with each in a row
    patience: float = 2.0  # for which a session waits for its own server when that is busy
    max_tries: int = 4  # of one request, when servers fail under it
    give_up_after: float = 120.0  # of waiting while no server at all answers
    health_every: float = 2.0
    health_timeout: float = 5.0
    max_sessions: int = 100_000  # whose server is remembered
    seed: int = 0


class Circuit(StrEnum):
    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Duty(StrEnum):
    ON = "on"
    PAUSED = "paused"  # back in a moment: its sessions wait for it
    AWAY = "away"  # somebody brings it back: its sessions go elsewhere
    LOST = "lost"  # nobody does


@dataclass(eq=False)
class Ticket:
    """One request on its way to an answer. `server` is where it is in flight, None while it waits."""

    serial: int
    session: str | None
    since: float
    server: str | None = None
    tried: set[str] = field(default_factory=set)
    failures: int = 0
    probe: bool = False  # given to a half-open server


@dataclass(eq=False)
class ServerState:
    """`queue` holds the tickets that wait for this server and no other, oldest first."""

    name: str
    settings: RouterSettings
    in_flight: int = 0
    queue: list[Ticket] = field(default_factory=list)
    circuit: Circuit = Circuit.CLOSED
    duty: Duty = Duty.ON
    leaving: bool = False
    failures: int = 0  # in a row
    openings: int = 0  # in a row
    open_until: float = 0.0
    refusals: int = 0  # in a row
    quiet_until: float = 0.0
    probes: int = 0  # in flight while half open
    allowance: int = 1  # the most of them

    @property
    def load(self) -> int:
        return self.in_flight + len(self.queue)

    @property
    def usable(self) -> bool:
        return not self.leaving and self.circuit is not Circuit.OPEN and self.duty in (Duty.ON, Duty.PAUSED)

    def has_room(self, now: float) -> bool:
        if not self.usable or self.duty is Duty.PAUSED or now < self.quiet_until:
            return False
        if self.in_flight >= self.settings.max_in_flight:
            return False
        return self.circuit is Circuit.CLOSED or self.probes < self.allowance

    def take(self, ticket: Ticket) -> None:
        self.in_flight += 1
        ticket.server = self.name
        ticket.probe = self.circuit is Circuit.HALF_OPEN
        self.probes += ticket.probe

    def release(self, ticket: Ticket) -> None:
        assert ticket.server == self.name and self.in_flight > 0, "a ticket is given back where it was taken"
        self.in_flight -= 1
        self.probes -= ticket.probe
        ticket.server, ticket.probe = None, False

    def answered(self) -> None:
        """It did what it was asked: whatever was held against it is forgotten."""
        self.circuit = Circuit.CLOSED
        self.failures = self.openings = self.refusals = 0

    def back(self) -> None:
        """It has been shown to be well: nothing that was before counts any more."""
        self.duty, self.quiet_until = Duty.ON, 0.0
        self.answered()

    def failed(self, now: float) -> bool:
        """Whether this failure opened the circuit. One that is not on duty is expected to fail."""
        if self.duty is not Duty.ON:
            return False
        self.failures += 1
        if self.circuit is Circuit.OPEN:
            return False
        if self.circuit is Circuit.CLOSED and self.failures < self.settings.open_after:
            return False
        pause = min(self.settings.longest_pause, self.settings.first_pause * 2**self.openings)
        self.circuit, self.open_until = Circuit.OPEN, now + pause
        self.openings += 1
        return True

    def refused(self, retry_after: float, now: float) -> float:
        """It is busy, which is no failure; returns how long it is left alone."""
        pause = retry_after or min(self.settings.longest_pause, self.settings.busy_pause * 2**self.refusals)
        self.refusals += now >= self.quiet_until  # all that were in flight together are refused together
        self.quiet_until = max(self.quiet_until, now + pause)
        return self.quiet_until - now

    def heard(self, ok: bool, now: float) -> bool:
        """A health check came back; returns whether it opened the circuit."""
        if not ok:
            return self.failed(now)
        if self.duty is not Duty.ON:
            return False
        if self.circuit is Circuit.HALF_OPEN:
            self.allowance *= 2
        elif self.circuit is Circuit.OPEN and now >= self.open_until:
            self.circuit, self.allowance = Circuit.HALF_OPEN, 1
        return False
