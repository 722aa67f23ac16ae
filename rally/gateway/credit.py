"""Credit that an agent assigns to its own calls: rewards of calls and branches, and calls that are not trained on.

A call is named by the id of its completion, response or message. Its reward is the reward of its turn; the reward of a
branch is that of the last turn of the call's segment. The tokens of an excluded call stay in the history with mask 0.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from rally.gateway.transcript import Branch, EpisodeParts
from rally.services.admission import Refused
from rally.services.openai_responses import call_key
from rally.types import Segment, Turn, WeightSpan, brief, finite_number

Scope = Literal["call", "branch"]


@dataclass(frozen=True, kw_only=True)
class Credit:
    """What an agent said about a call. `train` False excludes the call."""

    call: str
    reward: float = 0.0
    train: bool = True
    scope: Scope = "call"

    @classmethod
    def of(cls, fields: Any) -> Credit:
        """From the body of a request. Raises Refused with what is wrong."""
        if not isinstance(fields, Mapping):
            raise Refused(400, "the body must be a JSON object with call, and reward, train or scope")
        if unknown := sorted(fields.keys() - {"call", "reward", "train", "scope"}):
            raise Refused(400, f"unknown field {unknown[0]}; known are call, reward, train and scope", param=unknown[0])
        reward, train, scope = fields.get("reward", 0.0), fields.get("train", True), fields.get("scope", "call")
        number = None if isinstance(reward, bool) else finite_number(reward)
        if number is None:
            raise Refused(400, f"reward must be a finite number, not {brief(reward)}", param="reward")
        if not isinstance(train, bool) or scope not in ("call", "branch"):
            raise Refused(400, "train must be true or false, and scope call or branch", param="scope")
        return cls(call=str(fields.get("call")), reward=number, train=train, scope=scope)


class CallCredits:
    """The credit of one episode. Later credit for a call adds its reward; an excluded call stays excluded."""

    def __init__(self) -> None:
        self._calls: dict[str, tuple[Branch, int]] = {}
        self._given: list[Credit] = []

    def note(self, call: str, branch: Branch) -> None:
        """The last turn of a branch is that of a call."""
        self._calls[call_key(call)] = branch, len(branch.turns) - 1

    def add(self, credit: Credit) -> None:
        if call_key(credit.call) not in self._calls:
            problem = f"there is no call {credit.call!r} in this episode; give the id of one of its completions"
            raise Refused(404, problem, param="call")
        self._given.append(replace(credit, call=call_key(credit.call)))

    @property
    def total(self) -> float | None:
        """The sum of all rewards; None if the agent gave none."""
        rewards = [credit.reward for credit in self._given if credit.reward]
        return sum(rewards) if rewards else None

    @property
    def excluded(self) -> int:
        return len({credit.call for credit in self._given if not credit.train})

    def applied(self, branches: Sequence[Branch]) -> EpisodeParts:
        """The segments and turns of the branches, in their order, with the credit."""
        rewards: dict[tuple[int, int], float] = {}
        excluded: set[tuple[int, int]] = set()
        for credit in self._given:
            branch, turn = self._calls[credit.call]
            place = branches.index(branch)
            at = turn if credit.scope == "call" else len(branch.turns) - 1
            if credit.reward:
                rewards[place, at] = rewards.get((place, at), 0.0) + credit.reward
            if not credit.train:
                chosen = range(len(branch.turns)) if credit.scope == "branch" else [turn]
                excluded.update((place, i) for i in chosen if branch.turns[i].role == "assistant")
        segments, turns = [], list[Turn]()
        for place, branch in enumerate(branches):
            left_out = [turn for i, turn in enumerate(branch.turns) if (place, i) in excluded]
            segments.append(_unsampled(branch.segment, left_out))
            turns += [
                replace(turn, segment=place, reward=rewards.get((place, i), turn.reward))
                for i, turn in enumerate(branch.turns)
            ]
        return EpisodeParts(tuple(segments), tuple(turns))


def _unsampled(segment: Segment, turns: Sequence[Turn]) -> Segment:
    """The segment with the tokens of the turns as observed ones."""
    if not turns:
        return segment
    places = {at for turn in turns for at in range(turn.start, turn.end)}
    pairs = list(enumerate(zip(segment.response_mask, segment.response_logprobs, strict=True)))
    return replace(
        segment,
        response_mask=tuple(0 if at in places else mask for at, (mask, _) in pairs),
        response_logprobs=tuple(0.0 if at in places else logprob for at, (_, logprob) in pairs),
        spans=tuple(span for span in segment.spans if not _inside(span, places)),
        constrained=tuple(span for span in segment.constrained if span.start not in places),
    )


def _inside(span: WeightSpan, places: set[int]) -> bool:
    return all(at in places for at in range(span.start, span.end))
