"""Every token that an episode sampled stands in exactly one segment, with mask 1, behind what it was sampled after.

An agent may go on from any turn, as often as it likes. What is said after a turn that ends its segment makes the
segment longer; what is said after an earlier turn, or while somebody else is answering, begins a segment whose prompt
is the history up to that turn. So a tree of conversations is a list of segments, one for each leaf, in the order they
ended.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal, NamedTuple

from rally.chat import ChatCodec, TemplateError
from rally.gateway.messages import Conversation
from rally.types import Generation, Segment, ToolCall, Turn


@dataclass(eq=False)
class Branch:
    """A segment that may still grow, and its turns."""

    segment: Segment
    turns: list[Turn] = field(default_factory=list)
    asked: bool = False  # somebody waits for its next turn


@dataclass(frozen=True, eq=False)
class Said:
    """A turn that was sampled, and where: `end` tokens into the response of its branch."""

    branch: Branch
    end: int
    closed: bool
    call_ids: tuple[str, ...]
    at: float  # when it was given out, by time.perf_counter

    @property
    def ids(self) -> tuple[int, ...]:
        """The history up to the turn, which is included."""
        segment = self.branch.segment
        return segment.prompt_ids + segment.response_ids[: self.end]

    @property
    def free(self) -> bool:
        """Whether nothing has been said after it, and nobody is about to."""
        return self.end == len(self.branch.segment.response_ids) and not self.branch.asked


class Draft(NamedTuple):
    """Where a turn will stand: in `branch`, after `observed`, which answers what was said `after`."""

    conversation: Conversation
    branch: Branch
    observed: tuple[int, ...] = ()
    after: Said | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """What the engine is given."""
        return self.branch.segment.ids + self.observed


class Told(NamedTuple):
    """The segments and the turns of an episode; turns stand in the order of their tokens."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]


class Transcript:
    """The conversations of one episode. `began`, by time.perf_counter, is what its turns count from."""

    def __init__(self, codec: ChatCodec, history: Literal["append", "rerender"], began: float) -> None:
        self._codec, self._rerender, self._began = codec, history == "rerender", began
        self._branches: list[Branch] = []
        self._held: list[Draft] = []  # turns that are being sampled
        self._said: dict[bytes, list[Said]] = {}
        self.counts: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """Response tokens of all segments so far."""
        return sum(len(branch.segment.response_ids) for branch in self._branches)

    @property
    def assistant_turns(self) -> int:
        """Those that are being sampled count: agents may ask for several at once."""
        return self._turns("assistant") + len(self._held)

    @property
    def user_turns(self) -> int:
        """Messages of tools and users that were answered, or are about to be."""
        return self._turns("tool", "user") + sum(draft.after is not None for draft in self._held)

    def _turns(self, *roles: str) -> int:
        return sum(turn.role in roles for branch in self._branches for turn in branch.turns)

    def codec_for(self, conversation: Conversation) -> ChatCodec:
        return self._codec.with_tools(conversation.tools)

    def draft(self, conversation: Conversation) -> Draft:
        """Where the answer to a conversation will stand: after what it goes on from, or in a segment of its own."""
        after, codec = self._last_said(conversation), self.codec_for(conversation)
        if after is not None and (observed := self._observed(conversation, after)) is not None:
            branch = after.branch if after.free else Branch(Segment(prompt_ids=after.ids))
            return Draft(conversation, branch, observed, after)
        encode = codec.rerender if self._rerender else codec.prompt
        return Draft(conversation, Branch(Segment(prompt_ids=encode(conversation.messages).ids)))

    @contextmanager
    def held(self, draft: Draft) -> Iterator[None]:
        """While the turn is sampled nobody else may write where it will stand."""
        assert not draft.branch.asked, "one turn at a time"
        draft.branch.asked = True
        self._held.append(draft)
        try:
            yield
        finally:
            draft.branch.asked = False
            self._held.remove(draft)

    def add(self, draft: Draft, generation: Generation, message: Mapping[str, Any], started: float) -> None:
        """The turn was sampled, and `message` is what the agent is told of it."""
        branch, conversation = draft.branch, draft.conversation.followed_by(message)
        if branch not in self._branches:
            self._branches.append(branch)
            self._count_beginning(draft)
        if draft.after is not None:
            branch.turns.append(self._observed_turn(draft, draft.after, started))
        start = len(branch.segment.response_ids) + len(draft.observed)
        branch.segment = branch.segment.append_observed(draft.observed).append_sampled(generation)
        parsed = self.codec_for(conversation).parse(generation.ids)
        calls = parsed.tool_calls if conversation.tools else ()
        branch.turns.append(self._sampled_turn(generation, parsed.text, calls, start, started))
        self._count_calls(calls)
        end = len(branch.segment.response_ids)
        said = Said(branch, end, parsed.closed, conversation.call_ids, time.perf_counter())
        self._said.setdefault(conversation.keys[-1], []).append(said)

    def told(self) -> Told:
        """What there is. A segment that was written to last is last, so that the last words of an episode are."""
        branches = sorted(self._branches, key=lambda branch: branch.turns[-1].started + branch.turns[-1].seconds)
        turns = (replace(turn, segment=number) for number, branch in enumerate(branches) for turn in branch.turns)
        return Told(tuple(branch.segment for branch in branches), tuple(turns))

    def _last_said(self, conversation: Conversation) -> Said | None:
        """The turn of ours that a conversation goes on from, with messages that are not the assistant's."""
        answered = conversation.answered
        found = self._said.get(conversation.keys[answered], [])
        if not found or answered == len(conversation.messages):
            return None
        # The same words may have been sampled twice; then call ids tell the one from the other, or it makes no odds.
        exact = [said for said in found if said.call_ids == conversation.call_ids] or found
        return next((said for said in exact if said.free), exact[-1])

    def _observed(self, conversation: Conversation, after: Said) -> tuple[int, ...] | None:
        """The ids of the messages behind the turn; None where the template has no place for them there."""
        codec = self.codec_for(conversation)
        if self._rerender:
            whole, known = codec.rerender(conversation.messages).ids, after.ids
            return whole[len(known) :] if whole[: len(known)] == known else None
        try:
            return codec.encode_delta(conversation.messages[conversation.answered :], closed=after.closed)
        except TemplateError:
            return None

    def _observed_turn(self, draft: Draft, after: Said, started: float) -> Turn:
        messages = draft.conversation.messages[draft.conversation.answered :]
        answers = sum(message["role"] == "tool" for message in messages)
        self.counts["tool_answers"] += answers
        start = len(draft.branch.segment.response_ids)
        return Turn(
            role="tool" if answers else "user",
            text="\n".join(str(message["content"]) for message in messages),
            start=start,
            end=start + len(draft.observed),
            started=after.at - self._began,
            seconds=started - after.at,
        )

    def _sampled_turn(
        self, generation: Generation, text: str, calls: tuple[ToolCall, ...], start: int, started: float
    ) -> Turn:
        return Turn(
            role="assistant",
            text=text,
            start=start,
            end=start + len(generation.ids),
            tool_calls=calls,
            finish=generation.finish,
            cached_tokens=generation.cached_tokens,
            started=started - self._began,
            seconds=time.perf_counter() - started,
            queued=generation.queued_seconds,
            first_token=generation.first_token_seconds,
        )

    def _count_beginning(self, draft: Draft) -> None:
        """A segment begins: as a branch of another, with a history that is not ours, or with a first question."""
        branched = draft.after is not None
        self.counts["branches"] += branched
        self.counts["rewritten"] += not branched and draft.conversation.answered > 0

    def _count_calls(self, calls: tuple[ToolCall, ...]) -> None:
        broken = sum(call.error is not None for call in calls)
        self.counts["tool_calls"] += len(calls) - broken
        self.counts["malformed_calls"] += broken
