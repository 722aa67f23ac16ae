"""The environment of tool use: `rally.recipes.tool_use.environment.ToolUse` with one of the kinds of KINDS.

A single-turn task is over after the first reply: 1 for exactly the right calls, else 0. In a dialogue, a reply without
calls ends a user turn. The turn is right if the world is in the state that the right calls lead to, and if what was
asked for was read. Every right user turn is worth an equal part of 1, and the first wrong one ends the dialogue.
Arguments are compared as they were written: a number in quotation marks is wrong.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, get_args

from rally.envs.base import Answer, EnvError, Environment, EnvTurn, tool_reply
from rally.recipes.tool_use.dialogues import Dialogue, UserTurn, dialogue
from rally.recipes.tool_use.single_turn import SingleKind, right_calls, single_task
from rally.types import Message

DIALOGUES = {"dialogue": False, "dialogue_gaps": True}
KINDS = (*get_args(SingleKind), *DIALOGUES)
MOST_STEPS = 6  # turns of calls for one user turn


class ToolUse(Environment):
    """One task. With `held_out`, a single-turn task is about functions that no training task has."""

    arguments_as_written = True

    def __init__(self, kind: str, held_out: bool = False) -> None:
        if kind not in KINDS:
            raise EnvError(f"there is no kind {kind!r} of tool use; the kinds are {', '.join(KINDS)}")
        if held_out and kind in DIALOGUES:
            raise EnvError(f"held_out chooses functions of single-turn tasks, which {kind} has not; leave it out")
        self.kind, self.held_out = kind, held_out
        self.game: _Game | None = None

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[list[Message], list[dict[str, Any]]]:
        if self.kind not in DIALOGUES:
            self.task = single_task(self.kind, seed, self.held_out)  # type: ignore[arg-type]
            return [{"role": "user", "content": self.task.request}], self.task.tools
        self.game = _Game(dialogue(seed, DIALOGUES[self.kind]))
        return [{"role": "user", "content": self.game.turn.text}], self.game.tools

    def step(self, turn: EnvTurn) -> Answer:
        if self.game is None:
            right = right_calls(turn.calls, self.task.calls)
            return "", float(right), True, {"solved": right, "calls": len(turn.calls)}
        if turn.calls:
            return self._called(self.game, turn)
        return self._user_turn(self.game)

    def _called(self, game: _Game, turn: EnvTurn) -> Answer:
        game.steps += 1
        if game.steps > MOST_STEPS:
            return [], 0.0, True, game.told(solved=False)
        return [tool_reply(call, game.call(call.name, call.arguments)) for call in turn.calls], None, False, {}

    def _user_turn(self, game: _Game) -> Answer:
        if not game.turn_is_right():
            return [], 0.0, True, game.told(solved=False)
        part = 1.0 / len(game.dialogue.turns)
        game.number += 1
        if game.number == len(game.dialogue.turns):
            return [], part, True, game.told(solved=True)
        messages: list[Message] = [{"role": "user", "content": game.begin()}]
        self.added_tools = game.added
        return messages, part, False, {}


class _Game:
    """A dialogue as it is played, beside the world of the right calls."""

    def __init__(self, played: Dialogue) -> None:
        self.dialogue = played
        self.world, self.wanted = played.world(played.state), played.world(played.state)
        self.number, self.steps = 0, 0
        self.made: list[tuple[str, dict[str, Any]]] = []
        self.tools = [t for t in played.world.tools if t["function"]["name"] not in played.withheld]
        self.added: Sequence[dict[str, Any]] = ()
        self._advance()

    @property
    def turn(self) -> UserTurn:
        return self.dialogue.turns[self.number]

    def begin(self) -> str:
        """Start the next user turn. Returns its text, with the description of a function that it adds."""
        self.steps, self.made = 0, []
        self._advance()
        self.added = [t for t in self.world.tools if t["function"]["name"] == self.turn.adds]
        described = "".join(f"{json.dumps(tool['function'])}\n" for tool in self.added)
        return f"{described}{self.turn.text}"

    def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        self.made.append((name, dict(arguments)))
        return self.world.call(name, arguments)

    def turn_is_right(self) -> bool:
        """Whether the state is right and everything asked for was read; no call where nothing can be done."""
        if not self.turn.calls:
            return not self.made
        reads = [call for call in self.turn.calls if call[0] in self.world.reads]
        # A value that a later call needs may be read in another way; that call shows that it was known.
        needed = reads if len(reads) == len(self.turn.calls) else []
        return self.world.state == self.wanted.state and all(call in self.made for call in needed)

    def told(self, solved: bool) -> dict[str, Any]:
        return {"solved": solved, "user_turns_right": self.number, "user_turns": len(self.dialogue.turns)}

    def _advance(self) -> None:
        for name, arguments in self.turn.calls:
            self.wanted.call(name, arguments)
