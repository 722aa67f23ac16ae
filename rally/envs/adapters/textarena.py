"""The adapter `textarena/<id>`: games in text, alone or against an opponent. One seat is trained.

The policy sees only what is new in each turn. Rewards come at the end of a game. If the opponent loses by an invalid
move, the reward is 0: such a win teaches nothing. The games use the process-global random state; each sees its own.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import textarena
from textarena.envs.registration import ENV_REGISTRY

from rally.envs.adapters.global_random import GlobalRandom
from rally.envs.base import EnvError, Environment, EnvTurn
from rally.importing import ImportFailed, import_module, look_in

Opponent = Callable[[str, random.Random], str]
MOST_MOVES = 1000  # of opponents between two turns of the policy
_BRACKETS = re.compile(r"\[[^\[\]\n]{1,40}\]")


def names() -> list[str]:
    return sorted(name for name in ENV_REGISTRY if not name.endswith(("-raw", "-train")))


def make(
    name: str,
    opponent: str = "random",
    seat: int | Literal["random"] = 0,
    num_players: int | None = None,
    **kwargs: Any,
) -> Environment:
    """The environment of a game. `opponent` plays the other seats: `random` chooses among the moves that the game
    lists, or a function `module.function(observation, rng) -> str` does. `kwargs` are those of textarena.make."""
    if f"{name}-raw" not in ENV_REGISTRY:
        raise EnvError(f"there is no game textarena/{name}; `rally env list textarena` lists them")
    plays = random_move if opponent == "random" else _function(opponent)
    return TextArenaGame(name, kwargs, plays, seat, num_players)


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
    """One game, in which the policy has one seat."""

    def __init__(
        self,
        name: str,
        kwargs: Mapping[str, Any],
        opponent: Opponent,
        seat: int | Literal["random"],
        num_players: int | None,
    ) -> None:
        self.name, self.kwargs, self.opponent = name, dict(kwargs), opponent
        self.chosen_seat, self.players = seat, num_players
        self.history: dict[int, str] = {}

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
        problem = f"{type(refused).__name__}: {refused}"
        raise EnvError(f"textarena/{self.name} cannot be started ({problem}); set env.args.num_players")

    def step(self, turn: EnvTurn) -> tuple[str, float | None, bool, dict[str, Any]]:
        move = turn.reply if "[" in turn.reply else f"[{turn.reply}]"
        with self.globals.active():
            self.done, _ = self.game.step(move)
            observation = "" if self.done else self._until_own_turn()
            if not self.done:
                return observation, None, False, {}
            rewards, infos = self.game.close()
        others = [seat for seat in rewards if seat != self.seat]
        forfeit = any(_invalid(infos, seat) for seat in others) and not _invalid(infos, self.seat)
        info = {"rewards": {str(k): v for k, v in rewards.items()}, "invalid_move": _invalid(infos, self.seat)}
        reason = str((infos or {}).get(self.seat, {}).get("reason", ""))
        return reason, 0.0 if forfeit else float(rewards[self.seat]), True, {**info, "forfeit": forfeit}

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
