"""The router's settings, and its state of one server: requests in flight, circuit breaker, back-off and duty.

The circuit breaker has three states. `closed`: the server gets requests. `open`: after several consecutive failures it
gets none. `half_open`: after a pause and a passed health check it gets one request, and twice as many with every
further check that it passes; the first success closes the circuit, the first failure opens it again.

The duty is set from outside, by the component that starts the server and updates its weights.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum


@dataclass(frozen=True, kw_only=True)
class RouterSettings:
    """How requests are distributed over servers; times are in seconds."""

    max_in_flight: int = 256  # per server; other requests wait in the router, first come first served
    lag_factor: float = 1.25  # a session leaves its server if its load exceeds this multiple of the least load
    lag_margin: int = 8  # plus so many requests
    open_after: int = 3  # consecutive failures
    first_pause: float = 1.0  # before a server that failed is tried again; doubles each time
    longest_pause: float = 60.0
    busy_pause: float = 0.1  # after a busy response without Retry-After; doubles each time
    patience: float = 2.0  # how long a session waits for its own busy server
    max_tries: int = 4  # of one request
    give_up_after: float = 120.0  # without any usable server
    health_every: float = 2.0
    health_timeout: float = 5.0
    max_sessions: int = 100_000  # that are remembered
    seed: int = 0


class Circuit(StrEnum):
    """The state of the circuit breaker."""

    CLOSED = "closed"
    OPEN = "open"
    HALF_OPEN = "half_open"


class Duty(StrEnum):
    """The state of a server, set by the component that manages it."""

    ON = "on"
    PAUSED = "paused"  # for a moment: its sessions wait for it
    AWAY = "away"  # being restarted: its sessions go elsewhere
    LOST = "lost"  # will not come back


@dataclass(eq=False)
class Ticket:
    """One request. `server` is where it is in flight, None while it waits."""

    serial: int
    session: str | None
    since: float
    server: str | None = None
    tried: set[str] = field(default_factory=set)
    failures: int = 0
    queued: bool = False
    probe: bool = False  # sent to a half-open server


@dataclass(eq=False)
class ServerState:
    """State of one server. `queue` are the tickets that wait for this server only, oldest first."""

    name: str
    settings: RouterSettings
    in_flight: int = 0
    queue: list[Ticket] = field(default_factory=list)
    circuit: Circuit = Circuit.CLOSED
    duty: Duty = Duty.ON
    leaving: bool = False
    failures: int = 0  # consecutive
    openings: int = 0  # consecutive
    open_until: float = 0.0
    refusals: int = 0  # consecutive
    quiet_until: float = 0.0
    probes: int = 0  # in flight while half open
    allowance: int = 1  # the maximum of probes

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
        assert ticket.server == self.name and self.in_flight > 0, "the ticket is not in flight here"
        self.in_flight -= 1
        self.probes -= ticket.probe
        ticket.server, ticket.probe = None, False

    def answered(self) -> None:
        """A request succeeded: close the circuit and clear failures."""
        self.circuit = Circuit.CLOSED
        self.failures = self.openings = self.refusals = 0

    def back(self) -> None:
        """The server passed its checks: clear everything."""
        self.duty, self.quiet_until = Duty.ON, 0.0
        self.answered()

    def failed(self, now: float) -> bool:
        """Returns whether this failure opened the circuit. Failures of a server that is not on duty do not count."""
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
        """The server is busy, which is not a failure; returns the seconds until it gets requests again."""
        pause = retry_after or min(self.settings.longest_pause, self.settings.busy_pause * 2**self.refusals)
        self.refusals += now >= self.quiet_until  # requests in flight together are refused together and count once
        self.quiet_until = max(self.quiet_until, now + pause)
        return self.quiet_until - now

    def heard(self, ok: bool, now: float) -> bool:
        """The result of a health check; returns whether it opened the circuit."""
        if not ok:
            return self.failed(now)
        if self.duty is not Duty.ON:
            return False
        if self.circuit is Circuit.HALF_OPEN:
            self.allowance *= 2
        elif self.circuit is Circuit.OPEN and now >= self.open_until:
            self.circuit, self.allowance = Circuit.HALF_OPEN, 1
        return False
