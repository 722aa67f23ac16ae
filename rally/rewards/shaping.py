"""A shaped reward is the score plus named components, each told by name and, where one turn earned it, on that turn.

`reward_info` keeps the reward function's own `score` and gains `shaping/<component>`. Components belong to the
assistant turn that wrote the call or the words; those of a whole episode (`tool_format_reward`, the overlong penalty)
to no turn. `shaping/on_turns` is the part of the reward that is recorded on turns as well; `outcome` leaves it out.
Validation reports the components but adds none of them: what is validated is the task.
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
MIN_WORDS = 5  # fewer are an answer or a greeting, not reasoning
ON_TURNS = "shaping/on_turns"

_TAG = re.compile(r"<[^<>]{1,40}>")
_WORD = re.compile(r"[\u3040-\u30ff\u3400-\u9fff\uac00-\ud7af]|[^\W\d_]+")  # scripts without spaces: each character


@dataclass(frozen=True, kw_only=True)
class Overlong:
    """A penalty that grows from 0 to `penalty_factor` over the last `buffer` of `longest` response tokens."""

    longest: int
    buffer: int
    penalty_factor: float = 1.0
    log: bool = False

    def penalty(self, episode: Episode) -> float:
        """0 or less. Observed tokens count: they fill the same budget."""
        length = sum(len(segment.response_ids) for segment in episode.segments)
        exceeds = length - (self.longest - self.buffer)
        return min(0.0, -exceeds / self.buffer * self.penalty_factor)


@dataclass(frozen=True, kw_only=True)
class Shaping:
    """`weights` by component, as `reward_shaping` names them; a component that is not there is not looked for."""

    weights: Mapping[str, float] = field(default_factory=dict)
    overlong: Overlong | None = None

    def apply(self, episode: Episode) -> Episode:
        """The episode with what its conduct earned added to its score; one without a score stays as it is."""
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
            reward_info=info | ({ON_TURNS: sum(by_turn.values())} if self.weights else {}),
            turns=tuple(_earning(turn, by_turn.get(i)) for i, turn in enumerate(episode.turns)),
        )


def outcome(episode: Episode) -> float:
    """The reward without what is recorded on turns as well: for an estimator that adds up the turns itself."""
    assert episode.reward is not None, "an episode without a score has no outcome"
    return episode.reward - float(episode.reward_info.get(ON_TURNS, 0.0))


class Event(NamedTuple):
    """Something that a component rewards or punishes once; `turn` is the number of the turn that did it."""

    name: str
    turn: int | None


class ShapedCall(NamedTuple):
    turn: int
    what: tuple[str, str]
    valid: bool
    answered: bool


def _events(episode: Episode) -> Iterator[Event]:
    calls, seen = list(_calls(episode)), set[tuple[str, str]]()
    for call in calls:
        if not call.valid:
            yield Event("invalid_tool_call", call.turn)
        elif call.what in seen:
            yield Event("redundant_tool_call", call.turn)
        elif call.answered:
            yield Event("tool_call_success", call.turn)
        if call.answered:  # what failed may be tried again
            seen.add(call.what)
    if calls and all(call.valid for call in calls):
        yield Event("tool_format_reward", None)
    spoken = [i for i, turn in enumerate(episode.turns) if turn.role == "assistant"]
    yield from (Event("valid_reasoning", i) for i in spoken if reasons(episode.turns[i]))
    if spoken and episode.stop_reason in TURN_LIMITS:
        yield Event("max_turns_exceeded", spoken[-1])


def _calls(episode: Episode) -> Iterator[ShapedCall]:
    """Every call the policy wrote, also those of a last turn that no tool got to see."""
    for i, turn in enumerate(episode.turns):
        after = episode.turns[i + 1] if i + 1 < len(episode.turns) else None
        results = after.tool_results if after else ()
        for k, call in enumerate(turn.tool_calls):
            status = results[k].status if k < len(results) else None
            valid = call.error is None and status not in INVALID
            arguments = json.dumps(call.arguments, sort_keys=True, default=str)
            yield ShapedCall(i, (call.name, arguments), valid, status is ToolStatus.OK)


def reasons(turn: Turn) -> bool:
    """Whether an assistant turn, its calls taken out, says at least five words; a thought it opens must be closed."""
    text = turn.text
    for call in turn.tool_calls:
        text = text.replace(call.raw, " ") if call.raw else text
    if turn.finish == "length" or text.count("<think>") > text.count("</think>"):
        return False
    words = _WORD.finditer(_TAG.sub(" ", text))
    return len(list(islice(words, MIN_WORDS))) == MIN_WORDS


def _earning(turn: Turn, earned: float | None) -> Turn:
    return turn if earned is None else replace(turn, reward=(turn.reward or 0.0) + earned)
