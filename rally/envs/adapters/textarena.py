"""The adapter `textarena/<id>`: games in text, alone, against an opponent, or against the policy itself.

The policy sees only what is new in each turn. Rewards come at the end of a game. If another seat loses by an invalid
move, the reward is 0 (`forfeit: exclude`): such a win teaches nothing. The games use the process-global random state;
each sees its own. With `opponent: self` all seats are trained, and validation is played against `val_opponent`.
"""

from __future__ import annotations

import random
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import textarena
from textarena.envs.registration import ENV_REGISTRY

from rally.envs.adapters.global_random import GlobalRandom
from rally.envs.base import EnvError, Environment, EnvTurn, MatchEnd, SeatTurn
from rally.importing import ImportFailed, import_module, look_in

Opponent = Callable[[str, random.Random], str]
Forfeit = Literal["exclude", "count"]
SELF = "self"
MOST_MOVES = 1000  # of opponents between two turns of the policy
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")


def names() -> list[str]:
    return sorted(name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train")))


def make(
    name: str,
    opponent: str = "random",
    seat: int | Literal["random"] = 0,
    num_players: int | None = None,
    val_opponent: str = "random",
    forfeit: Forfeit = "exclude",
    legal_reward: float = 0.0,
    **kwargs: Any,
) -> Environment:
    """The environment of a game. `opponent` plays the other seats: `random` chooses among the moves that the game
    lists, a function `module.function(observation, rng) -> str` does, or the policy itself (`self`). `forfeit` says
    whether a win by another seat's invalid move counts. `legal_reward` is added for every legal move: a policy that
    loses nearly all games by invalid moves has nothing else to learn from. `kwargs` are those of textarena.make."""
    if f"{name}-raw" not in ENV_REGISTRY:
        raise EnvError(f"there is no game textarena/{name}; `rally env list textarena` lists them")
    if forfeit not in get_args(Forfeit):
        raise EnvError(f"forfeit must be one of {', '.join(get_args(Forfeit))}, not {forfeit!r}; correct env.args")
    chosen = val_opponent if opponent == SELF else opponent
    plays = random_move if chosen == "random" else _function(chosen)
    return TextArenaGame(name, kwargs, plays, seat, num_players, opponent == SELF, forfeit, legal_reward)


def random_move(observation: str, rng: random.Random) -> str:
    """One of the moves in brackets, from the last line that names the available ones, or else from the whole text."""
    listed = [line for line in observation.splitlines() if "vailable" in line and _BRACKETS.search(line)]
    moves = _BRACKETS.findall(listed[-1] if listed else observation)
    return rng.choice(moves) if moves else "[pass]"


def _function(path: str) -> Opponent:
    module, _, name = path.rpartition(".")
    look_in(Path.cwd())
    try:
        found = getattr(import_module(module), name, None) if module else None
    except ImportFailed as failed:
        raise EnvError(f"env.args.opponent={path} cannot be imported ({failed}); correct it") from None
    if not callable(found):
        raise EnvError(f"env.args.opponent={path} is no function; write random, or module.function")
    function: Opponent = found
    return function


class TextArenaGame(Environment):
    """One game, in which the policy has one seat, or all."""

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        opponent: Opponent,
        seat: int | Literal["random"],
        num_players: int | None,
        self_play: bool,
        forfeit: Forfeit,
        legal_reward: float,
    ) -> None:
        self.name, self.kwargs, self.opponent = name, dict(kwargs), opponent
        self.chosen_seat, self.players = seat, num_players
        self.self_play, self.forfeit, self.legal_reward = self_play, forfeit, legal_reward
        self.history: dict[int, str] = {}
        self.legal: Counter[int] = Counter()  # by seat, moves that were not refused

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, Sequence[Mapping[str, Any]]]:
        self.rng = random.Random(seed)
        self.globals = GlobalRandom(seed)
        with self.globals.active():
            self._start(seed)
            seat = self.rng.randrange(self.players or 1) if self.chosen_seat == "random" else self.chosen_seat
            if not 0 <= seat < (self.players or 1):
                raise EnvError(f"textarena/{self.name} has {self.players} players, so there is no seat {seat}")
            self.seat, self.done = seat, False
            prompt = self._until_own_turn()
        if self.done:
            raise EnvError(f"textarena/{self.name} with seed {seed} ended before the policy had a turn")
        return prompt, ()

    def seats(self) -> int:
        if not self.self_play:
            return 1
        with GlobalRandom(0).active():
            self._start(0)
        return self.players or 1

    def start(self, row: Mapping[str, Any], seed: int) -> SeatTurn:
        self.globals = GlobalRandom(seed)
        with self.globals.active():
            self._start(seed)
            return self._next()

    def play(self, turn: EnvTurn) -> SeatTurn | MatchEnd:
        with self.globals.active():
            self._step(self.seat, _move(turn))
            if not self.done:
                return self._next()
            rewards, infos = self.game.close()
        seats = range(self.players or 1)
        ends = {seat: self._end(rewards, infos, seat) for seat in seats}
        return MatchEnd(
            rewards={seat: reward for seat, (_, reward, _) in ends.items()},
            info={seat: info for seat, (_, _, info) in ends.items()},
            texts={seat: reason for seat, (reason, _, _) in ends.items()},
        )

    def _next(self) -> SeatTurn:
        player, observed = self.game.get_observation()
        self.seat = player
        return SeatTurn(seat=player, observation=_told(observed, player))

    def _end(self, rewards: Mapping[int, float], infos: Any, seat: int) -> tuple[str, float, dict[str, Any]]:
        """The reason, reward and info of the end of a game for a seat."""
        others = [other for other in rewards if other != seat]
        forfeit = any(_invalid(infos, other) for other in others) and not _invalid(infos, seat)
        own, lost = (infos or {}).get(seat, {}), _invalid(infos, seat)
        legal = max(0, self.legal[seat] - lost)  # the move that loses was counted
        info = {"rewards": {str(k): v for k, v in rewards.items()}, "invalid_move": lost, "legal_moves": legal}
        reward = 0.0 if forfeit and self.forfeit == "exclude" else float(rewards[seat])
        return str(own.get("reason", "")), reward + self.legal_reward * legal, {**info, "forfeit": forfeit}

    def _start(self, seed: int) -> None:
        """Start a game with the number of players, or with the smallest number that it takes."""
        for players in (self.players,) if self.players else (1, 2, 3, 4, 5, 6):
            try:
                self.game = textarena.make(f"{self.name}-raw", **self.kwargs)
                self.game.reset(num_players=players, seed=seed)
            except (AssertionError, ValueError, TypeError, KeyError) as error:
                refused = error
            else:
                self.players = players
                return
        advice = "correct env.args" if "unexpected keyword argument" in str(refused) else "set env.args.num_players"
        raise EnvError(f"textarena/{self.name} cannot be started ({type(refused).__name__}: {refused}); {advice}")

    def step(self, turn: EnvTurn) -> tuple[str, float | None, bool, dict[str, Any]]:
        with self.globals.active():
            self._step(self.seat, _move(turn))
            observation = "" if self.done else self._until_own_turn()
            if not self.done:
                return observation, None, False, {}
            rewards, infos = self.game.close()
        reason, reward, info = self._end(rewards, infos, self.seat)
        return reason, reward, True, info

    def _step(self, seat: int, move: str) -> None:
        self.done, _ = self.game.step(move)
        state = getattr(self.game, "state", None)
        refused = not self.done and getattr(state, "error_count", 0) > 0  # a legal move sets it to 0
        self.legal[seat] += not refused

    def _until_own_turn(self) -> str:
        """Let the opponents play. Returns what the policy has not seen yet."""
        for _ in range(MOST_MOVES):
            player, observed = self.game.get_observation()
            text = _told(observed, player)
            if player == self.seat:
                return text
            self.history[player] = f"{self.history.get(player, '')}\n{text}"
            self.done, _ = self.game.step(self.opponent(self.history[player], self.rng))
            if self.done:
                return ""
        raise EnvError(f"textarena/{self.name} went on for {MOST_MOVES} moves without the policy's seat {self.seat}")


def _move(turn: EnvTurn) -> str:
    return turn.reply if "[" in turn.reply else f"[{turn.reply}]"


def _invalid(infos: Any, seat: int) -> bool:
    return bool((infos or {}).get(seat, {}).get("invalid_move"))


def _told(observed: Any, player: int) -> str:
    """The new messages of the game for a player, without the player's own moves."""
    lines = []
    for sender, message, kind in observed:
        if sender == player and getattr(kind, "name", "") == "PLAYER_ACTION":
            continue
        lines.append(str(message) if sender == -1 else f"[Player {sender}] {message}")
    return "\n".join(lines).strip()
