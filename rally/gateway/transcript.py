"""Records the conversations of an agent as segments. Every sampled token is in exactly one segment, with mask 1.

An agent may continue from any turn, any number of times. A continuation of the last turn of a segment extends the
segment. A continuation of an earlier turn, or of a turn that is being continued already, starts a segment whose prompt
is the history up to that turn. A tree of conversations thus becomes a list of segments, one per leaf, in the order in
which they ended.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, Literal, NamedTuple

from rally.chat import ChatCodec, TemplateError
from rally.services.openai_requests import UNSHOWN, unshown_field
from rally.types import Generation, Message, RallyError, Segment, ToolAnswer, ToolCall, Turn


class MessageError(RallyError):
    """A message in a request is invalid."""


@dataclass(frozen=True)
class ChatHistory:
    """The messages of a request in canonical form, its tools, and the template variables that it sets."""

    messages: tuple[Message, ...]
    tools: tuple[Mapping[str, Any], ...] = ()
    variables: Mapping[str, Any] = field(default_factory=dict)
    call_ids: tuple[str, ...] = field(default=(), compare=False)  # the client's ids of all calls in the messages

    @classmethod
    def of(
        cls,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        variables: Mapping[str, Any] | None = None,
    ) -> ChatHistory:
        ids = [str(call.get("id")) for message in messages for call in _calls(message)]
        return cls(canonical(messages), tuple(tools), variables or {}, tuple(ids))

    @cached_property
    def keys(self) -> tuple[bytes, ...]:
        """One hash for the tools and variables, and one for each message, which covers these and all messages up to
        it."""
        keys = [_digest(b"", [self.tools, self.variables])]
        for message in self.messages:
            keys.append(_digest(keys[-1], _compared(message)))
        return tuple(keys)

    @property
    def answered(self) -> int:
        """The number of messages up to and including the assistant's last."""
        return max((i for i, m in enumerate(self.messages, 1) if m["role"] == "assistant"), default=0)

    @property
    def opening(self) -> tuple[Message, ...]:
        """The messages before the first of the assistant. Conversations with the same opening are one conversation."""
        first = next((i for i, m in enumerate(self.messages) if m["role"] == "assistant"), len(self.messages))
        return self.messages[:first]

    def followed_by(self, message: Mapping[str, Any]) -> ChatHistory:
        added = ChatHistory.of([message])
        return replace(self, messages=self.messages + added.messages, call_ids=self.call_ids + added.call_ids)


def canonical(messages: Sequence[Mapping[str, Any]]) -> tuple[Message, ...]:
    """The messages in the form that templates expect. Calls are numbered within their turn, as in the tool loop. Tool
    messages get the name of their tool, which clients leave out and some templates print."""
    result: list[Message] = []
    calls: dict[str, tuple[str, str]] = {}
    for at, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str):
            raise MessageError(f"messages.{at} has no role; give it one, such as user")
        if dropped := unshown_field(message):
            raise MessageError(f"messages.{at}.{dropped} is not supported; {UNSHOWN[dropped]}")
        rest = {k: v for k, v in message.items() if k not in ("role", "content", "tool_calls") and _is_filled(v)}
        plain: Message = {"role": "system" if role == "developer" else role, "content": _content(message, at), **rest}
        if role == "assistant":
            written = [_call(call, number, at) for number, call in enumerate(_calls(message))]
            ids = [str(call.get("id")) for call in _calls(message)]
            calls = {i: (call["id"], call["function"]["name"]) for i, call in zip(ids, written, strict=True)}
            plain |= {"tool_calls": written} if written else {}
        elif role == "tool" and (known := calls.get(str(message.get("tool_call_id")))):
            plain |= {"tool_call_id": known[0], "name": known[1]}
        result.append(plain)
    return tuple(result)


def _is_filled(value: Any) -> bool:
    """Whether a field says anything. Some clients add objects of which every entry is null."""
    if isinstance(value, Mapping):
        return any(map(_is_filled, value.values()))
    return any(map(_is_filled, value)) if isinstance(value, list | tuple) else bool(value)


def _calls(message: Mapping[str, Any]) -> Sequence[Mapping[str, Any]]:
    calls = message.get("tool_calls") or ()
    if not isinstance(calls, list | tuple) or not all(isinstance(call, Mapping) for call in calls):
        raise MessageError("tool_calls must be a list of calls, each with an id, a type and a function")
    return calls


def _content(message: Mapping[str, Any], at: int) -> str:
    """The text of a message. Other parts are an error."""
    content = message.get("content")
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list) or not all(isinstance(part, Mapping) for part in content):
        raise MessageError(f"messages.{at}.content must be a text or a list of parts")
    for part in content:
        if part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise MessageError(f"messages.{at}.content has a part of type {part.get('type')}; send only text")
    return "".join(part["text"] for part in content)


def _call(call: Mapping[str, Any], number: int, at: int) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise MessageError(f"messages.{at}.tool_calls.{number} names no function; only function calls are supported")
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        with suppress(ValueError, RecursionError):  # arguments that are not JSON stay text
            arguments = json.loads(arguments)
    return {"id": f"call_{number}", "type": "function", "function": {"name": function["name"], "arguments": arguments}}


def _compared(message: Message) -> Message:
    """The parts of a message that are compared. The assistant's name and surrounding whitespace are ignored, because
    some clients add a name and strip the text."""
    if message["role"] != "assistant":
        return message
    content = message["content"]
    unnamed = {key: value for key, value in message.items() if key != "name"}
    return {**unnamed, "content": content.strip() if isinstance(content, str) else content}


def _digest(before: bytes, value: Any) -> bytes:
    text = json.dumps(_numbers(value), sort_keys=True)
    return hashlib.blake2b(before + text.encode(), digest_size=16).digest()


def _numbers(value: Any) -> Any:
    """Integral floats as integers: some clients write 1 as 1.0."""
    if isinstance(value, float):
        return int(value) if value.is_integer() else value
    if isinstance(value, Mapping):
        return {key: _numbers(item) for key, item in value.items()}
    return [_numbers(item) for item in value] if isinstance(value, list | tuple) else value


@dataclass(eq=False)
class Branch:
    """A segment that may be extended, and its turns."""

    segment: Segment
    turns: list[Turn] = field(default_factory=list)
    sampling: bool = False  # a request for its next turn is running


@dataclass(frozen=True, eq=False)
class SampledTurn:
    """A sampled turn. It ends `end` tokens into the response of its branch."""

    branch: Branch
    end: int
    closed: bool
    call_ids: tuple[str, ...]
    at: float  # when it was returned to the agent, by time.perf_counter
    written_ids: Mapping[str, str] = field(default_factory=dict)  # the ids that the policy wrote, by canonical id

    @property
    def ids(self) -> tuple[int, ...]:
        """The history up to and including the turn."""
        segment = self.branch.segment
        return segment.prompt_ids + segment.response_ids[: self.end]

    @property
    def free(self) -> bool:
        """Whether the turn is the last of its branch and is not being continued."""
        return self.end == len(self.branch.segment.response_ids) and not self.branch.sampling


def _answer(message: Message, after: SampledTurn) -> ToolAnswer:
    """A tool message, with the call of the turn that it answers. Well-formed calls are numbered in canonical form."""
    turn = next(turn for turn in after.branch.turns if turn.role == "assistant" and turn.end == after.end)
    calls = {f"call_{n}": call for n, call in enumerate(call for call in turn.tool_calls if call.error is None)}
    return ToolAnswer(text=str(message["content"]), call=calls.get(message.get("tool_call_id", "")))


class Draft(NamedTuple):
    """Where a new turn goes: in `branch`, after the tokens `observed`, which follow the turn `after`."""

    conversation: ChatHistory
    branch: Branch
    observed: tuple[int, ...] = ()
    after: SampledTurn | None = None

    @property
    def ids(self) -> tuple[int, ...]:
        """The prompt for the engine."""
        return self.branch.segment.ids + self.observed


class EpisodeParts(NamedTuple):
    """The segments and turns of an episode. Turns are in the order of their tokens."""

    segments: tuple[Segment, ...]
    turns: tuple[Turn, ...]


class Transcript:
    """The conversations of one episode. `Turn.started` is relative to `began`, by time.perf_counter."""

    def __init__(self, codec: ChatCodec, history: Literal["append", "rerender"], began: float) -> None:
        self._codec, self._rerender, self._began = codec, history == "rerender", began
        self._branches: list[Branch] = []
        self._drafts: list[Draft] = []  # turns that are being sampled
        self._sampled: dict[bytes, list[SampledTurn]] = {}
        self._openings: list[tuple[Message, ...]] = []  # of all conversations, in the order of their first requests
        self._last_replies: dict[int, str] = {}  # the last reply of each, by its place in `_openings`
        self.counts: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """Response tokens of all segments so far."""
        return sum(len(branch.segment.response_ids) for branch in self._branches)

    @property
    def assistant_turns(self) -> int:
        """Includes the turns being sampled, since an agent may send requests concurrently."""
        return self._turns("assistant") + len(self._drafts)

    @property
    def user_turns(self) -> int:
        """Tool and user turns that were answered or are being answered."""
        return self._turns("tool", "user") + sum(draft.after is not None for draft in self._drafts)

    def _turns(self, *roles: str) -> int:
        return sum(turn.role in roles for branch in self._branches for turn in branch.turns)

    def codec_for(self, conversation: ChatHistory) -> ChatCodec:
        return self._codec.with_variables(conversation.variables).with_tools(conversation.tools)

    def draft(self, conversation: ChatHistory) -> Draft:
        """Where the answer to a conversation goes: after the turn that it continues, or in a new segment."""
        if conversation.opening not in self._openings:
            self._openings.append(conversation.opening)
        after, codec = self._continued_turn(conversation), self.codec_for(conversation)
        if after is not None and (observed := self._observed(conversation, after)) is not None:
            branch = after.branch if after.free else Branch(Segment(prompt_ids=after.ids))
            return Draft(conversation, branch, observed, after)
        encode = codec.rerender if self._rerender else codec.prompt
        return Draft(conversation, Branch(Segment(prompt_ids=encode(conversation.messages).ids)))

    @contextmanager
    def reserved(self, draft: Draft) -> Iterator[None]:
        """Reserve the branch of a draft while its turn is sampled."""
        assert not draft.branch.sampling, "one turn at a time"
        draft.branch.sampling = True
        self._drafts.append(draft)
        try:
            yield
        finally:
            draft.branch.sampling = False
            self._drafts.remove(draft)

    def add(self, draft: Draft, generation: Generation, message: Mapping[str, Any], started: float) -> None:
        """Add the sampled turn. `message` is the message that the agent gets."""
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
        self._last_replies[self._openings.index(conversation.opening)] = parsed.text
        end = len(branch.segment.response_ids)
        written = {f"call_{n}": call.id for n, call in enumerate(call for call in calls if call.error is None)}
        turn = SampledTurn(branch, end, parsed.closed, conversation.call_ids, time.perf_counter(), written)
        self._sampled.setdefault(conversation.keys[-1], []).append(turn)

    def branches(self) -> list[Branch]:
        """The segments that may be extended. The one with the latest turn is last."""
        return sorted(self._branches, key=lambda branch: branch.turns[-1].started + branch.turns[-1].seconds)

    def parts(self) -> EpisodeParts:
        """The segments and turns so far, in the order of `branches`."""
        branches = self.branches()
        turns = (replace(turn, segment=number) for number, branch in enumerate(branches) for turn in branch.turns)
        return EpisodeParts(tuple(branch.segment for branch in branches), tuple(turns))

    def main_reply(self, prompt: Sequence[Message]) -> str | None:
        """The last reply of the agent's main conversation: the first whose opening has the last message of the row's
        prompt, else the first of all. None if nothing was sampled."""
        content = prompt[-1].get("content") or ""
        parts = [content] if isinstance(content, str) else [part.get("text") or "" for part in content]
        question = "".join(parts).strip()
        asked = [n for n in self._last_replies if any(question in str(m["content"]) for m in self._openings[n])]
        main = min(asked or self._last_replies, default=None)
        return None if main is None else self._last_replies[main]

    def _continued_turn(self, conversation: ChatHistory) -> SampledTurn | None:
        """The sampled turn that a conversation continues with tool or user messages."""
        answered = conversation.answered
        candidates = self._sampled.get(conversation.keys[answered], [])
        if not candidates or answered == len(conversation.messages):
            return None
        # The same text may have been sampled twice. The call ids tell the turns apart; without calls any one will do.
        exact = [turn for turn in candidates if turn.call_ids == conversation.call_ids] or candidates
        return next((turn for turn in exact if turn.free), exact[-1])

    def _observed(self, conversation: ChatHistory, after: SampledTurn) -> tuple[int, ...] | None:
        """The ids of the messages after the turn; None if the template cannot append them there."""
        codec = self.codec_for(conversation)
        if self._rerender:
            whole, known = codec.rerender(conversation.messages).ids, after.ids
            return whole[len(known) :] if whole[: len(known)] == known else None
        try:
            # An answer has the id that the policy wrote, which some templates print.
            following = [
                {**message, "tool_call_id": after.written_ids.get(message["tool_call_id"], message["tool_call_id"])}
                if message.get("tool_call_id")
                else message
                for message in conversation.messages[conversation.answered :]
            ]
            return codec.encode_delta(following, closed=after.closed, last_id=after.ids[-1])
        except TemplateError:
            return None

    def _observed_turn(self, draft: Draft, after: SampledTurn, started: float) -> Turn:
        messages = draft.conversation.messages[draft.conversation.answered :]
        answers = tuple(_answer(message, after) for message in messages if message["role"] == "tool")
        self.counts["tool_answers"] += len(answers)
        start = len(draft.branch.segment.response_ids)
        return Turn(
            role="tool" if answers else "user",
            text="\n".join(str(message["content"]) for message in messages),
            start=start,
            end=start + len(draft.observed),
            started=after.at - self._began,
            seconds=started - after.at,
            tool_answers=answers,
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
        """Count a new segment as a branch of another, or as a history that the agent rewrote."""
        branched = draft.after is not None
        self.counts["branches"] += branched
        self.counts["rewritten"] += not branched and draft.conversation.answered > 0

    def _count_calls(self, calls: tuple[ToolCall, ...]) -> None:
        broken = sum(call.error is not None for call in calls)
        self.counts["tool_calls"] += len(calls) - broken
        self.counts["malformed_calls"] += broken
