"""Defines `Environment`, the base class of environments: rows, `reset`, `step` and `close`.

An environment writes the prompt of an episode, answers every turn of the policy, and gives the reward. The agent loop
`env_agent` plays it. Methods may be plain or `async`; plain ones run in a thread of their own, under a deadline.
"""

from __future__ import annotations

from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from rally.types import Message, RallyError, ToolCall

Observation = str | Sequence[Message]
"""Messages for the policy. A text is one user message; an empty text is none."""


Opening = tuple[Observation, Sequence[Mapping[str, Any]]]
"""What `reset` returns: the messages of the prompt, and the tools in OpenAI form."""
Answer = tuple[Observation, float | None, bool, Mapping[str, Any]]
"""What `step` returns: messages, the reward of the turn, whether the episode is over, and information to record."""


class EnvError(RallyError):
    """An environment cannot be found or made, failed, returned an invalid value, or missed its deadline."""


@dataclass(frozen=True, kw_only=True)
class EnvTurn:
    """One complete turn of the policy: all of its text, and its tool calls. The calls are well-formed, name a tool of
    the environment and fit its schema; the loop answers the others itself."""

    text: str
    calls: tuple[ToolCall, ...] = ()

    @property
    def reply(self) -> str:
        """The text after the thinking (`<think>...</think>`). Empty if the thinking was not closed."""
        if "</think>" in self.text:
            return self.text.rpartition("</think>")[2].strip()
        return "" if "<think>" in self.text else self.text.strip()


@dataclass(frozen=True, kw_only=True)
class SeatTurn:
    """The seat of a match that plays next, and what it has not seen yet."""

    seat: int
    observation: Observation


@dataclass(frozen=True, kw_only=True)
class MatchEnd:
    """The end of a match: by seat the reward, the information to record, and a last text."""

    rewards: Mapping[int, float]
    info: Mapping[int, Mapping[str, Any]] = field(default_factory=dict)
    texts: Mapping[int, str] = field(default_factory=dict)


class Environment:
    """An environment. An object plays one episode: `reset`, then `step` until it is done, then `close`.

    The arguments of `__init__` are those of `env.args`. The same row and seed must always give the same episode for the
    same turns, so random numbers come from the seed. An exception is a failure of the environment, and its episode is
    never trained on: what the policy wrote wrongly is answered with a message, or with `done`.
    """

    added_tools: Sequence[Mapping[str, Any]] = ()
    """Tools that a `step` has added, in OpenAI form. Their calls are accepted from then on. A message must describe
    them: the prompt is not written again."""
    arguments_as_written: bool = False
    """Whether calls reach `step` with their arguments as the policy wrote them, whether or not they fit the schema."""

    def tasks(self) -> Sequence[Mapping[str, Any]] | None:
        """The tasks of the environment as JSON values, always in the same order. None: every seed is a task of its
        own. Called once per run, on an object that plays no episode."""
        return None

    def reset(self, row: Mapping[str, Any], seed: int) -> Opening | Awaitable[Opening]:
        """Start the episode of a row. Returns the messages of the prompt, and the tools in OpenAI form. `row` holds
        `env`, `id` and `seed`, and the entries of the row's task if there are `tasks`."""
        raise NotImplementedError(f"{type(self).__name__} must define reset")

    def step(self, turn: EnvTurn) -> Answer | Awaitable[Answer]:
        """Answer a turn. Returns the messages that follow it, the reward of the turn (None: no reward yet), whether the
        episode is over, and information to record. Every call of the turn needs a message of the role tool
        (`tool_reply`). The reward of the episode is the sum of the rewards of its turns."""
        raise NotImplementedError(f"{type(self).__name__} must define step")

    def seats(self) -> int:
        """The number of trained seats. With several, a training row is a match: one object plays it for all seats with
        `start` and `play`, and each seat becomes an episode with its own reward. Validation still uses `reset` and
        `step`, with one seat. Called once per run, on an object that plays no episode."""
        return 1

    def start(self, row: Mapping[str, Any], seed: int) -> SeatTurn | Awaitable[SeatTurn]:
        """Start a match. Returns who plays first. The first observation of a seat is its prompt."""
        raise NotImplementedError(f"{type(self).__name__} has several seats, so it must define start")

    def play(self, turn: EnvTurn) -> SeatTurn | MatchEnd | Awaitable[SeatTurn | MatchEnd]:
        """Play the turn of the seat that was last returned."""
        raise NotImplementedError(f"{type(self).__name__} has several seats, so it must define play")

    def close(self) -> Awaitable[None] | None:
        """Release what the episode opened. Always called once, also if `reset` failed."""


def tool_reply(call: ToolCall, content: str) -> Message:
    """The answer to a tool call."""
    return {"role": "tool", "name": call.name, "tool_call_id": call.id, "content": content}
