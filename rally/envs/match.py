"""Plays matches: one game object, and a session for each of its seats, which wait for each other.

Every seat is an ordinary episode with its own reward. While a seat waits for the others, no deadline of a method runs;
the limits of its turn and episode do. A seat whose episode fails ends the match with an error for all seats. A seat
that a limit stops abandons the match: the others end with reward 0. A match fails if it is the turn of a seat whose
episode does not begin, as after its last retry. So no seat waits for one that never comes, or never comes back.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

from rally.envs.base import EnvError, EnvTurn, MatchEnd, SeatTurn
from rally.envs.session import EnvReset, EnvSession, EnvStep, SeatPresence
from rally.types import Message

ABSENT_SECONDS = 120.0  # for the episode of a seat to begin, once it is its turn


class SeatMatch:
    """One game of several seats. All methods run in one event loop."""

    def __init__(self, game: EnvSession, seats: int) -> None:
        self.game, self.seats = game, seats
        self.left: set[int] = set()
        self.present: set[int] = set()  # seats whose episodes have begun
        self._begun: asyncio.Task[None] | None = None
        self._closed = False
        self._state: SeatTurn | MatchEnd | EnvError | None = None
        self._waiting: dict[int, tuple[asyncio.Future[None], SeatPresence]] = {}

    async def begin(self) -> None:
        """Start the game, if no other seat has."""
        if self._begun is None:
            self._begun = asyncio.ensure_future(self._start())
        await asyncio.shield(self._begun)

    async def play(self, seat: int, turn: EnvTurn) -> None:
        if isinstance(self._state, MatchEnd | EnvError):  # another seat left during this turn; `turn_of` reports it
            return
        assert isinstance(self._state, SeatTurn) and self._state.seat == seat, "a seat plays only its own turn"
        try:
            self._advance(await self.game.play(turn))
        except EnvError as error:
            self._advance(error)

    async def turn_of(self, seat: int, presence: SeatPresence) -> SeatTurn | MatchEnd:
        """Wait until the seat plays, or until the match is over. Raises EnvError if it failed."""
        while True:
            if isinstance(self._state, EnvError):
                raise EnvError(str(self._state))
            if isinstance(self._state, MatchEnd) or (self._state is not None and self._state.seat == seat):
                return self._state
            woken: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting[seat] = woken, presence
            presence.waits()
            try:
                async with asyncio.timeout(ABSENT_SECONDS if self._absent() is not None else None) as limit:
                    await woken
            except TimeoutError:
                if not limit.expired():
                    raise
            finally:
                if self._waiting.pop(seat, None) is not None:  # cancelled, not woken
                    presence.returns()
            if limit.expired() and (absent := self._absent()) is not None:
                missing = f"seat {absent} did not begin its episode within {ABSENT_SECONDS:g} s"
                self._advance(EnvError(f"{missing}, so its match in {self.game.name} cannot go on"))

    def _absent(self) -> int | None:
        """The seat whose turn it is, if its episode has not begun."""
        state = self._state
        return state.seat if isinstance(state, SeatTurn) and state.seat not in self.present else None

    async def leave(self, seat: int, failed: bool) -> list[str]:
        """The episode of a seat is over. Returns what failed when the last one of those that began closed the game."""
        self.left.add(seat)
        if failed and not isinstance(self._state, MatchEnd | EnvError):
            self._advance(EnvError(f"the episode of seat {seat} failed, so its match in {self.game.name} cannot go on"))
        elif not isinstance(self._state, MatchEnd | EnvError):
            told = {"abandoned": True, "abandoned_by": seat}
            rewards = dict.fromkeys(range(self.seats), 0.0)
            self._advance(MatchEnd(rewards=rewards, info=dict.fromkeys(range(self.seats), told)))
        if self._closed or self.left != self.present:
            return []
        self._closed = True
        return await self.game.close()

    async def _start(self) -> None:
        try:
            self._advance(await self.game.start())
        except EnvError as error:
            self._advance(error)

    def _advance(self, state: SeatTurn | MatchEnd | EnvError) -> None:
        """Enter a state and wake the seats that it concerns. They count as present before this seat begins to wait."""
        if isinstance(self._state, MatchEnd | EnvError):  # a seat left during a turn of another
            return
        if isinstance(state, SeatTurn) and not 0 <= state.seat < self.seats:
            state = EnvError(f"{self.game.name} gave a turn to the seat {state.seat} of {self.seats}")
        elif isinstance(state, MatchEnd) and (missing := set(range(self.seats)) - state.rewards.keys()):
            state = EnvError(f"{self.game.name} ended a match without a reward for the seat {min(missing)}")
        self._state = state
        for seat in [state.seat] if isinstance(state, SeatTurn) else list(self._waiting):
            if seat in self._waiting:
                woken, presence = self._waiting.pop(seat)
                presence.returns()
                if not woken.done():  # it was cancelled at this moment
                    woken.set_result(None)


@dataclass
class _Attempts:
    """The matches of one row and sample. Seats that retry after a failure meet again."""

    opened: Counter[int] = field(default_factory=Counter)
    finished: set[int] = field(default_factory=set)  # seats whose episodes ended without a failure
    matches: dict[int, SeatMatch] = field(default_factory=dict)


class MatchTable:
    """The matches that are being played, by name."""

    def __init__(self) -> None:
        self._attempts: dict[str, _Attempts] = {}

    def seat(
        self, name: str, seat: int, seats: int, game: Callable[[], EnvSession], presence: SeatPresence
    ) -> SeatSession:
        attempts = self._attempts.setdefault(name, _Attempts())
        number = attempts.opened[seat]
        attempts.opened[seat] += 1
        if number and (gone := attempts.finished - {seat}):
            raise EnvError(f"seat {min(gone)} of this match has finished, so seat {seat} cannot play it again")
        match = attempts.matches.setdefault(number, SeatMatch(game(), seats))
        match.present.add(seat)

        def leave(failed: bool) -> None:
            if not failed:
                attempts.finished.add(seat)
            if len(match.left) == seats:
                attempts.matches.pop(number, None)
            if len(attempts.finished) == seats:
                self._attempts.pop(name, None)

        return SeatSession(match, seat, presence, leave)


class SeatSession:
    """One seat of a match, as the session of an episode."""

    parameters: ClassVar[Mapping[str, Mapping[str, Any]]] = {}
    ended: EnvStep | None = None

    def __init__(self, match: SeatMatch, seat: int, presence: SeatPresence, leave: Callable[[bool], None]) -> None:
        self.name, self.seat = match.game.name, seat
        self._match, self._presence, self._leave = match, presence, leave

    async def reset(self) -> EnvReset:
        await self._match.begin()
        turn = await self._match.turn_of(self.seat, self._presence)
        if isinstance(turn, SeatTurn):
            return EnvReset(_messages(turn), [])
        self.ended = self._ended(turn)
        text = (
            "".join(message["content"] for message in self.ended.messages) or "The match ended before your first turn."
        )
        return EnvReset([{"role": "user", "content": text}], [])

    async def step(self, turn: EnvTurn) -> EnvStep:
        await self._match.play(self.seat, turn)
        following = await self._match.turn_of(self.seat, self._presence)
        if isinstance(following, MatchEnd):
            return self._ended(following)
        return EnvStep(_messages(following), None, False, {})

    async def close(self, failed: bool = False) -> list[str]:
        failures = await self._match.leave(self.seat, failed)
        self._leave(failed)
        return failures

    def _ended(self, end: MatchEnd) -> EnvStep:
        text = end.texts.get(self.seat, "")
        messages: list[Message] = [{"role": "user", "content": text}] if text else []
        return EnvStep(messages, end.rewards[self.seat], True, {**end.info.get(self.seat, {}), "seat": self.seat})


def _messages(turn: SeatTurn) -> list[Message]:
    return [dict(message) for message in turn.observation if isinstance(message, Mapping)]
