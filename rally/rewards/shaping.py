"""Reward shaping: adds named components for an episode's tool calls, format and length to its score.

`reward_info` keeps the `score` of the reward function and gains `shaping/<component>`. A component that one assistant
turn earned is also added to the reward of that turn; `tool_format_reward` and the overlong penalty belong to the whole
episode. `shaping/on_turns` is the part of the reward that is also on turns; `outcome` subtracts it. In validation the
components are reported but not added, because validation measures the task.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import NamedTuple

from rally.types import Episode, StopReason, ToolStatus, Turn

INVALID = frozenset({ToolStatus.MALFORMED, ToolStatus.UNKNOWN_TOOL, ToolStatus.BAD_ARGUMENTS})
TURN_LIMITS = frozenset({StopReason.MAX_TURNS, StopReason.MAX_USER_TURNS})
MIN_WORDS = 5  # fewer words are an answer or a greeting and not reasoning
ON_TURNS = "shaping/on_turns"

_TAG = re.compile(r"<[^<>]{1,40}>")
# In scripts without spaces, each character is a word.
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_]+")


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """A penalty that grows from 0 to `penalty_factor` over the last `buffer` of `longest` response tokens."""

    longest: int
    buffer: int
    penalty_factor: float = 1.0
    log: bool = False

    def penalty(self, episode: Episode) -> float:
        """The penalty, 0 or negative. Observed tokens count too, because they use the same budget."""
        length = sum(len(segment.response_ids) for segment in episode.segments)
        exceeds = length - (self.longest - self.buffer)
        return min(0.0, -exceeds / self.buffer * self.penalty_factor)


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """The weights of the components, by their names in `reward_shaping`. Only these components are computed."""

    weights: Mapping[str, float] = field(default_factory=dict)
    overlong: Overlong | None = None

    def apply(self, episode: Episode) -> Episode:
        """The episode with its components added to the score. An episode without a score is returned as is."""
        if episode.reward is None or not (self.weights or self.overlong):
            return episode
        events = [event for event in _events(episode) if event.name in self.weights]
        counts = Counter(event.name for event in events)
        components = {f"shaping/{name}": weight * counts[name] for name, weight in self.weights.items()}
        by_turn: dict[int, float] = {}
        for event in events:
            if event.turn is not None:
                by_turn[event.turn] = by_turn.get(event.turn, 0.0) + self.weights[event.name]
        penalty = self.overlong.penalty(episode) if self.overlong else 0.0
        info = episode.reward_info | {"score": episode.reward_info.get("score", episode.reward)} | components
        if self.overlong and self.overlong.log:
            info |= {"overlong_reward": penalty, "overlong": float(penalty < 0)}
        if episode.validate:
            return replace(episode, reward_info=info)
        return replace(
            episode,
            reward=episode.reward + sum(components.values()) + penalty,
            reward_info=info | ({ON_TURNS: info.get(ON_TURNS, 0.0) + sum(by_turn.values())} if self.weights else {}),
            turns=tuple(_with_reward(turn, by_turn.get(i)) for i, turn in enumerate(episode.turns)),
        )


def outcome(episode: Episode) -> float:
    """The reward without the part that is also on turns, for an estimator that adds up the turns itself."""
    assert episode.reward is not None, "an episode without a score has no outcome"
    return episode.reward - float(episode.reward_info.get(ON_TURNS, 0.0))


class Event(NamedTuple):
    """One occurrence of a component. `turn` is the number of the turn that caused it; None for the whole episode."""

    name: str
    turn: int | None


class ShapedCall(NamedTuple):
    """A tool call: the turn that wrote it, its name and arguments, whether it was valid and succeeded."""

    turn: int
    key: tuple[str, str]
    valid: bool
    answered: bool


def _events(episode: Episode) -> Iterator[Event]:
    calls, seen = list(_calls(episode)), set[tuple[str, str]]()
    for call in calls:
        if not call.valid:
            yield Event("invalid_tool_call", call.turn)
        elif call.key in seen:
            yield Event("redundant_tool_call", call.turn)
        elif call.answered:
            yield Event("tool_call_success", call.turn)
        if call.answered:  # a failed call may be repeated
            seen.add(call.key)
    if calls and all(call.valid for call in calls):
        yield Event("tool_format_reward", None)
    assistant = [i for i, turn in enumerate(episode.turns) if turn.role == "assistant"]
    yield from (Event("valid_reasoning", i) for i in assistant if reasons(episode.turns[i]))
    if assistant and episode.stop_reason in TURN_LIMITS:
        yield Event("max_turns_exceeded", assistant[-1])


def _calls(episode: Episode) -> Iterator[ShapedCall]:
    """Every call that the policy wrote, also those of a last turn that were not run."""
    for i, turn in enumerate(episode.turns):
        after = episode.turns[i + 1] if i + 1 < len(episode.turns) else None
        results = after.tool_results if after else ()
        for k, call in enumerate(turn.tool_calls):
            status = results[k].status if k < len(results) else None
            valid = call.error is None and status not in INVALID
            arguments = json.dumps(call.arguments, sort_keys=True, default=str)
            yield ShapedCall(i, (call.name, arguments), valid, status is ToolStatus.OK)


def reasons(turn: Turn) -> bool:
    """Whether an assistant turn has at least MIN_WORDS words outside of its calls, and closes its thinking block."""
    text = turn.text
    for call in turn.tool_calls:
        text = text.replace(call.raw, " ") if call.raw else text
    if turn.finish == "length" or text.count("<think>") > text.count("</think>"):
        return False
    words = _WORD.finditer(_TAG.sub(" ", text))
    return len(list(islice(words, MIN_WORDS))) == MIN_WORDS


def _with_reward(turn: Turn, earned: float | None) -> Turn:
    return turn if earned is None else replace(turn, reward=(turn.reward or 0.0) + earned)
