"""The routing policy without an event loop: each of its guarantees, and random histories that try to break them."""

import math
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rally.engines import EngineError
from rally.engines.router.routing_policy import RoutingPolicy
from rally.engines.router.server_state import Circuit, Duty, RouterSettings, Ticket


def board(*names: str, **settings: float) -> RoutingPolicy:
    made = RoutingPolicy(RouterSettings(**settings))  # type: ignore[arg-type]
    for name in names:
        made.add(name, 0.0)
    return made


def send(at: RoutingPolicy, session: str | None = None, now: float = 0.0) -> Ticket:
    """Requests a server and expects to be assigned one at once."""
    ticket = at.ask(session, now)
    assert at.place(now) == [ticket]
    return ticket


def answer(at: RoutingPolicy, session: str, now: float = 0.0) -> str:
    ticket = send(at, session, now)
    server = ticket.server
    assert server is not None
    at.done(ticket, now)
    return server


def test_first_turns_go_to_the_emptiest_and_equals_share() -> None:
    at = board("a", "b", "c", "d")
    placed = [send(at, f"s{i}").server for i in range(400)]
    assert {name: placed.count(name) for name in "abcd"} == dict.fromkeys("abcd", 100)
    assert len({tuple(placed[i : i + 4]) for i in range(0, 400, 4)}) > 10, "no fixed order among equals"
    again = board("a", "b", "c", "d")
    assert [send(again, f"s{i}").server for i in range(400)] == placed, "seeded"


def test_later_turns_stay_until_their_server_lags() -> None:
    at = board("a", "b", lag_factor=2.0, lag_margin=3)
    home = answer(at, "episode")
    other = "b" if home == "a" else "a"
    crowd = [at.ask(None, 0.0) for _ in range(8)]
    at.place(0.0)
    for ticket in crowd:
        if ticket.server == other:
            at.done(ticket, 0.0)
    assert at.servers[home].in_flight == 4 and answer(at, "episode") != home, "4 > 2 x 0 + 3"
    assert at.counts["moved_from_busy"] == 1 and answer(at, "episode") == other, "its new home"


def test_nobody_waits_while_there_is_room_and_the_older_goes_first() -> None:
    at = board("a", "b", max_in_flight=2, lag_margin=100)
    running = [send(at) for _ in range(4)]
    waiting = [at.ask(None, 0.0) for _ in range(3)]
    assert at.place(0.0) == [] and at.waiting == 3
    at.done(running[2], 0.0)
    at.done(running[0], 0.0)
    assert at.place(0.0) == waiting[:2] and at.waiting == 1


def test_a_session_waits_for_its_own_full_server_but_not_for_ever() -> None:
    at = board("a", "b", max_in_flight=4, lag_factor=1.0, lag_margin=2)
    home = answer(at, "episode")
    crowd = [send(at) for _ in range(8)]
    mine = at.ask("episode", 0.0)
    (elsewhere, *rest) = [ticket for ticket in crowd if ticket.server != home]
    at.done(elsewhere, 0.0)
    assert at.place(0.0) == [], "one free place elsewhere is not worth its cache"
    at.done(rest[0], 0.0)
    at.done(rest[1], 0.0)
    assert at.place(0.0) == [mine] and mine.server != home, "5 waits and runs there, 1 here"


def test_failures_open_the_circuit_and_one_request_probes_it() -> None:
    at = board("a", "b", open_after=2, first_pause=1.0)
    first, second = send(at), send(at)
    assert at.failed(first, 0.0) and at.place(0.0) == [first] and first.server == second.server, "the other one"
    at.done(first, 0.0)
    ticket = send(at)
    dead = ticket.server
    assert dead is not None and at.failed(ticket, 0.0)
    at.place(0.0)
    assert at.servers[dead].circuit is Circuit.OPEN
    assert {send(at).server for _ in range(5)} == {second.server}, "nothing more for it"
    at.heard(dead, True, 0.5)
    assert at.servers[dead].circuit is Circuit.OPEN, "not before the pause"
    at.heard(dead, True, 1.0)
    probe = send(at, now=1.0)
    assert probe.server == dead and send(at, now=1.0).server != dead, "one request, no more"
    at.failed(probe, 1.0)
    assert at.place(1.0) == [probe] and probe.server != dead
    at.heard(dead, True, 2.5)
    assert at.servers[dead].circuit is Circuit.OPEN, "the pause doubles"
    at.heard(dead, True, 3.0)
    probe = send(at, now=3.0)
    at.heard(dead, True, 5.0)
    assert [probe.server, send(at, now=5.0).server] == [dead] * 2 and send(at, now=5.0).server != dead, "twice as many"
    at.done(probe, 6.0)
    assert at.servers[dead].circuit is Circuit.CLOSED and {send(at, now=6.0).server for _ in range(3)} == {dead}


def test_a_request_that_every_server_fails_under_is_given_up() -> None:
    at = board("a", "b", "c", max_tries=3, open_after=10)
    ticket = send(at)
    seen = [ticket.server]
    while at.failed(ticket, 0.0):
        at.place(0.0)
        seen.append(ticket.server)
    assert sorted(map(str, seen)) == ["a", "b", "c"], "each once"
    assert at.counts["failed_tries"] == 3 and at.counts["given_up"] == 1 and at.waiting == 0


def test_a_busy_server_is_left_alone_for_as_long_as_it_says() -> None:
    at = board("a", "b", patience=2.0)
    home = answer(at, "episode")
    mine = send(at, "episode")
    at.refused(mine, 1.5, 0.0)
    assert at.place(1.0) == [] and at.next_change(1.0) == 1.5, "it keeps its cache, and its turn"
    assert send(at, now=1.0).server != home
    assert at.place(1.5) == [mine] and mine.server == home
    at.refused(mine, 10.0, 2.0)
    assert at.place(2.0) == [mine] and mine.server != home, "too long to wait"
    assert at.counts["failed_tries"] == 0


def test_without_a_time_refusals_back_off() -> None:
    at = board("a", busy_pause=0.1)
    ticket, now, pauses = send(at), 0.0, []
    for _ in range(4):
        at.refused(ticket, 0.0, now)
        change = at.next_change(now)
        assert change is not None
        pauses.append(round(change - now, 3))
        now = change
        assert at.place(now) == [ticket]
    assert pauses == [0.1, 0.2, 0.4, 0.8]


def test_a_server_that_leaves_finishes_what_it_has() -> None:
    at = board("a", "b")
    home = answer(at, "episode")
    last = send(at, "episode")
    at.remove(home, 0.0)
    assert home in at.servers and all(send(at).server != home for _ in range(5))
    at.done(last, 0.0)
    assert home not in at.servers and answer(at, "episode") != home
    at.add("c", 0.0)
    assert send(at).server == "c"
    with pytest.raises(EngineError, match="already"):
        at.add("c", 0.0)


def test_requests_wait_for_a_server_to_come_back_until_it_is_too_long() -> None:
    at = board("a", open_after=1, give_up_after=60.0, first_pause=1.0)
    early = send(at)
    assert at.failed(early, 10.0)
    late = at.ask(None, 30.0)
    assert at.next_change(30.0) == 70.0 and at.stranded(69.0) == []
    assert at.stranded(70.0) == [early] and at.next_change(70.0) == 90.0
    at.heard("a", True, 80.0)
    assert at.place(80.0) == [late] and at.stranded(1000.0) == []


def test_a_paused_server_keeps_its_sessions_and_is_blamed_for_nothing() -> None:
    at = board("a", "b", open_after=1)
    home = answer(at, "episode")
    in_flight = send(at, "episode")
    at.assign(home, Duty.PAUSED, 0.0)
    waits = at.ask("episode", 0.0)
    assert at.place(0.0) == [], "it waits for its own server"
    assert at.failed(in_flight, 0.0) and not at.heard(home, False, 0.0)
    assert at.counts["circuits_opened"] == 0
    [moved] = at.place(0.0)
    assert moved is in_flight and moved.server != home, "one that failed there need not wait"
    at.assign(home, Duty.ON, 5.0)
    assert at.place(5.0) == [waits] and waits.server == home


def test_a_server_that_is_brought_back_is_waited_for_however_long_it_takes() -> None:
    at = board("a", give_up_after=10.0)
    answer(at, "episode")
    at.assign("a", Duty.AWAY, 0.0)
    waits = at.ask("episode", 0.0)
    assert at.place(999.0) == [] and at.stranded(999.0) == []
    at.assign("a", Duty.PAUSED, 999.0)  # a pause does not heal a server
    assert at.servers["a"].duty is Duty.AWAY
    at.assign("a", Duty.ON, 999.0)
    assert at.place(999.0) == [waits]


def test_where_every_server_is_lost_nobody_waits() -> None:
    at = board("a", "b", give_up_after=10.0)
    first = at.ask(None, 0.0)
    at.assign("a", Duty.LOST, 0.0)
    assert at.place(0.0) == [first] and first.server == "b"
    at.assign("b", Duty.AWAY, 1.0)
    waits = at.ask(None, 1.0)
    assert at.stranded(500.0) == []
    at.assign("b", Duty.LOST, 500.0)
    assert at.stranded(500.0) == [waits]


def test_a_void_try_is_no_failure() -> None:
    at = board("a", open_after=1, max_tries=1)
    ticket = send(at, "episode")
    at.void(ticket, 0.0)
    assert at.place(0.0) == [ticket] and at.counts["void_tries"] == 1 and at.counts["failed_tries"] == 0


def test_those_who_were_in_flight_together_are_refused_once() -> None:
    at = board("a", busy_pause=0.1, longest_pause=60.0)
    crowd = [at.ask(None, 0.0) for _ in range(50)]
    at.place(0.0)
    for ticket in crowd:
        at.refused(ticket, 0.0, 0.0)
    assert at.servers["a"].quiet_until <= 0.2


@dataclass
class Model:
    """The expected state, kept beside the routing policy."""

    board: RoutingPolicy
    now: float = 0.0
    flying: list[Ticket] = field(default_factory=list)
    open: int = 0

    def act(self, what: int, which: int) -> None:
        self.now += 0.1
        names = list(self.board.servers)
        if what <= 3:
            self.board.ask(f"s{which % 7}", self.now)
            self.open += 1
        elif what == 9 and names:
            self.board.heard(names[which % len(names)], which % 3 > 0, self.now)
        elif what == 10 and len(names) > 1:
            self.board.remove(names[which % len(names)], self.now)
        elif what == 12 and names:
            self.board.assign(names[which % len(names)], [*Duty][which % 4], self.now)
        elif what == 11:
            self.board.add(f"new{self.now:.1f}", self.now)
        elif self.flying:
            self.end(self.flying.pop(which % len(self.flying)), what, which)
        placed = self.board.place(self.now)
        assert [t.serial for t in placed] == sorted(t.serial for t in placed)
        self.flying += placed

    def end(self, ticket: Ticket, what: int, which: int) -> None:
        self.open -= 1
        if what == 7:
            self.open += self.board.failed(ticket, self.now)
        elif what == 8:
            self.board.refused(ticket, (which % 4) / 2, self.now)
            self.open += 1
        elif what == 6:
            self.board.leave(ticket)
        else:
            self.board.done(ticket, self.now)


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 50)), max_size=80))
def test_nothing_is_lost_or_doubled_and_no_server_gets_too_much(actions: list[tuple[int, int]]) -> None:
    model = Model(board("a", "b", "c", max_in_flight=3, open_after=2, max_tries=3, give_up_after=math.inf))
    for what, which in actions:
        model.act(what, which)
        servers = model.board.servers
        assert len({id(t) for t in model.flying}) == len(model.flying)
        assert model.board.waiting + len(model.flying) == model.open
        for name, server in servers.items():
            assert server.in_flight == sum(t.server == name for t in model.flying) <= 3
        if model.board._queue:
            fresh = [t for t in model.board._queue if not t.tried]
            assert not fresh or not any(s.has_room(model.now) for s in servers.values()), "room, and somebody waits"
