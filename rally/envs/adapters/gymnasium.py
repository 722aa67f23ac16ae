"""The adapter `gymnasium/<id>`: environments with a discrete action space, played in text.

FrozenLake, Blackjack, Taxi and CliffWalking are described in text here. For others, `env.args.text` names a function
`text(env, observation, info) -> str`. The policy writes an action in square brackets. A reply without an action is
answered with the list of actions and changes nothing in the game.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import gymnasium
from gymnasium.envs.toy_text.frozen_lake import generate_random_map

from rally.envs.base import EnvError, Environment, EnvTurn
from rally.importing import ImportFailed, import_path, look_in

Text = Callable[[Any, Any, Mapping[str, Any]], str]
_BRACKETS = re.compile(r"\[\s*([^\[\]]+?)\s*\]")


def _frozen_lake(env: Any, observation: Any, info: Mapping[str, Any]) -> str:
    rows = [[cell.decode() for cell in row] for row in env.unwrapped.desc]
    rows[int(observation) // len(rows[0])][int(observation) % len(rows[0])] = "P"
    return "\n".join("".join(row) for row in rows)


def _blackjack(env: Any, observation: Any, info: Mapping[str, Any]) -> str:
    own, dealer, ace = observation
    usable = "with a usable ace" if ace else "without a usable ace"
    return f"Your sum is {own}, {usable}. The dealer shows {dealer}."


def _taxi(env: Any, observation: Any, info: Mapping[str, Any]) -> str:
    row, column, passenger, goal = env.unwrapped.decode(int(observation))
    places = ("red (row 0, column 0)", "green (0, 4)", "yellow (4, 0)", "blue (4, 3)", "in the taxi")
    where = f"The taxi is in row {row}, column {column}. The passenger is at {places[passenger]}"
    return f"{where} and wants to go to {places[goal]}."


def _cliff(env: Any, observation: Any, info: Mapping[str, Any]) -> str:
    row, column = divmod(int(observation), 12)
    return f"You are in row {row}, column {column}."


class GameText(NamedTuple):
    """The rules of a game, the names of its actions, and its observations as text."""

    rules: str
    actions: tuple[str, ...]
    text: Text


BUILT_IN = {
    "FrozenLake": GameText(
        "Walk from P to the goal G. F is ice to walk on, H is a hole, S is the start.",
        ("left", "down", "right", "up"),
        _frozen_lake,
    ),
    "Blackjack": GameText("Get closer to 21 than the dealer, without exceeding it.", ("stick", "hit"), _blackjack),
    "Taxi": GameText(
        "Drive to the passenger, pick up, drive to the destination and drop off, on a grid of 5 x 5.",
        ("south", "north", "east", "west", "pickup", "dropoff"),
        _taxi,
    ),
    "CliffWalking": GameText(
        "Walk from row 3, column 0 to row 3, column 11. The cells between them are a cliff: you start again.",
        ("up", "right", "down", "left"),
        _cliff,
    ),
}


def names() -> list[str]:
    return sorted(spec.id for spec in gymnasium.registry.values() if spec.id.partition("-")[0] in BUILT_IN)


def make(
    name: str,
    text: str | None = None,
    actions: Sequence[str] | None = None,
    rules: str | None = None,
    map_size: int | None = None,
    invalid_reward: float = 0.0,
    **kwargs: Any,
) -> Environment:
    """The environment of an id. `kwargs` are those of gymnasium.make; `map_size` is the size of a random map of
    FrozenLake, drawn from the seed. `actions` are names in the order of the action numbers."""
    known = BUILT_IN.get(name.partition("-")[0])
    if text is None and known is None:
        raise EnvError(
            f"there is no text for gymnasium/{name}; name a function text(env, observation, info) -> str in "
            "env.args.text, as module.function"
        )
    if map_size is not None and (not name.startswith("FrozenLake") or "desc" in kwargs):
        raise EnvError("env.args.map_size is for FrozenLake without desc; leave it out")
    described = known or GameText("", (), _blackjack)
    game = GameText(
        described.rules if rules is None else rules,
        tuple(str(action) for action in actions or described.actions),
        described.text if text is None else _function(text),
    )
    return GymnasiumText(name, kwargs, game, map_size, invalid_reward)


def _function(path: str) -> Text:
    module, _, name = path.rpartition(".")
    look_in(Path.cwd())
    try:
        found = getattr(import_path(module, "environment"), name, None)
    except ImportFailed as failed:
        raise EnvError(f"env.args.text={path} cannot be imported ({failed}); correct it") from None
    if not callable(found):
        raise EnvError(f"env.args.text={path} is no function; write module.function")
    function: Text = found
    return function


class GymnasiumText(Environment):
    """A game whose observations and actions are text."""

    def __init__(
        self, name: str, kwargs: Mapping[str, Any], game: GameText, map_size: int | None, invalid_reward: float
    ) -> None:
        self.name, self.kwargs, self.map_size, self.invalid_reward = name, dict(kwargs), map_size, invalid_reward
        self.rules, self.actions, self.text = game
        self.env: Any = gymnasium.make(name, **self.kwargs)  # here, so that wrong arguments end the run at its start
        space = self.env.action_space
        if not isinstance(space, gymnasium.spaces.Discrete):
            raise EnvError(f"gymnasium/{name} has the action space {space}; only Discrete ones are supported")
        self.actions = self.actions or tuple(str(i) for i in range(int(space.n)))
        if len(self.actions) != space.n:
            raise EnvError(f"gymnasium/{name} has {space.n} actions, not {len(self.actions)}; correct env.args.actions")

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, Sequence[Mapping[str, Any]]]:
        if self.map_size is not None:
            self.close()
            drawn = generate_random_map(size=self.map_size, seed=seed)
            self.env = gymnasium.make(self.name, **self.kwargs, desc=drawn)
        observation, info = self.env.reset(seed=seed)
        prompt = "\n".join(part for part in (self.rules, self._choices(), self._shown(observation, info)) if part)
        return prompt, ()

    def step(self, turn: EnvTurn) -> tuple[str, float, bool, dict[str, Any]]:
        action = self._action(turn.reply)
        if action is None:
            return self._choices(), self.invalid_reward, False, {"valid": False}
        start = int(self.env.action_space.start)
        observation, reward, ended, cut, info = self.env.step(start + action)
        told = {"valid": True, "action": self.actions[action], "truncated": bool(cut)}
        return self._shown(observation, info), float(reward), bool(ended or cut), told

    def close(self) -> None:
        self.env.close()

    def _shown(self, observation: Any, info: Mapping[str, Any]) -> str:
        return self.text(self.env, observation, info)

    def _choices(self) -> str:
        return f"Reply with one of {', '.join(f'[{action}]' for action in self.actions)}."

    def _action(self, reply: str) -> int | None:
        """The last action in brackets, or the whole reply."""
        written = _BRACKETS.findall(reply) or [reply.strip().rstrip(".")]
        return {name.lower(): i for i, name in enumerate(self.actions)}.get(written[-1].lower())
