"""Proves, conversation by conversation, that what `rally sft` teaches is what an episode would sample and observe.

A conversation is played again through the record that agent loops write: the policy samples its replies, its tools and
users give the answers that stand in the row. Tokens and mask of that episode must be those of the training row, and
each reply must be read back as the calls and words that the row has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import NamedTuple

from rally.chat import ChatCodec, Parsed, TemplateError
from rally.data import Conversation
from rally.loops.base import LoopSettings
from rally.loops.episode_builder import EpisodeBuilder
from rally.sft.training import SftSettings, conversation_row
from rally.track import RunConsole
from rally.train.packing import Row
from rally.types import Generation, Message, RallyError, Task, ToolCall

NO_LIMIT = 2**40
AROUND = 6  # tokens shown on either side of a difference


class CheckedTurn(NamedTuple):
    """A reply, and what tools or users said after it."""

    reply: Message
    answers: list[Message]


class SftDifference(RallyError):
    """Where a conversation and the episode it should be part ways."""


@dataclass
class CheckReport:
    """What checking a set of conversations found; `first` and `first_rendered` tell the first case of each."""

    ok: int = 0
    different: int = 0
    over_long: int = 0
    rendered_otherwise: int = 0
    supervised: int = 0
    first: str | None = None
    first_rendered: str | None = None

    @property
    def rows(self) -> int:
        return self.ok + self.different + self.over_long


def check_conversations(
    conversations: Iterable[Conversation],
    codec_of: Callable[[Conversation], ChatCodec],
    max_length: int,
    on_done: Callable[[], None] = lambda: None,
) -> CheckReport:
    """Check them all; one that is longer than `max_length` tokens is counted, and not compared."""
    report, settings = CheckReport(), SftSettings(batch_size=1, max_length=NO_LIMIT)
    for one in conversations:
        try:
            codec = codec_of(one)
            row = conversation_row(codec, one.messages, settings)
            if len(row.ids) > max_length:
                report.over_long += 1
            else:
                compare(codec, one.messages, row)
                report.ok += 1
                report.supervised += len(row.sampled)
                _note_rendering(report, codec, one, row)
        except RallyError as difference:
            report.different += 1
            report.first = report.first or f"{one.where}: {difference}"
        on_done()
    return report


def tell(report: CheckReport, name: str, settings: SftSettings, console: RunConsole) -> None:
    """The counts as a table, then the first case of each kind."""
    over = "an error" if settings.truncation == "error" else f"cut on the {settings.truncation}"
    rows = [
        ["equal to an episode", f"{report.ok} of {report.rows} conversations, {report.supervised} supervised tokens"],
        ["different", str(report.different)],
        ["over-long", f"{report.over_long} of more than data.max_length={settings.max_length} tokens, {over}"],
        ["rendered otherwise", f"{report.rendered_otherwise} of the equal ones, by the chat template itself"],
    ]
    console.table(f"{name}: what is taught against what would be sampled", rows)
    if report.first:
        console.note(f"the first difference: {report.first}")
    if report.first_rendered:
        console.note(
            "the chat template renders old turns otherwise than they were sampled; multi_turn.history=append, the "
            f"default, keeps them as they are taught here, rerender does not; the first: {report.first_rendered}"
        )


def compare(codec: ChatCodec, messages: Sequence[Message], row: Row) -> None:
    """Raise Difference at the first token that an episode of these messages would have otherwise than `row`."""
    exchange = played(codec, messages)
    segment, supervised = exchange.segment, set(row.sampled)
    mask = (0,) * len(segment.prompt_ids) + segment.response_mask
    taught = [(token, int(i in supervised)) for i, token in enumerate(row.ids)]
    episode = list(zip(segment.ids, mask, strict=True))
    place = next((i for i, (a, b) in enumerate(zip_longest(taught, episode)) if a != b), None)
    if place is not None:
        raise SftDifference(
            f"token {place}, in {_turn_at(exchange, place)}, is not what an episode would have there\n"
            f"  taught:  {_shown(codec, taught, place)}\n  episode: {_shown(codec, episode, place)}"
        )


def played(codec: ChatCodec, messages: Sequence[Message]) -> EpisodeBuilder:
    """The conversation as an agent loop records it, the row's replies being what the policy samples."""
    turns = list(split_turns(messages))
    prompt = tuple(messages[: len(messages) - sum(1 + len(turn.answers) for turn in turns)])
    task = Task(id="", data_source="", prompt=prompt)
    exchange = EpisodeBuilder.start(codec, task, LoopSettings(response_length=NO_LIMIT), NO_LIMIT)
    for number, turn in enumerate(turns, start=1):
        ids = codec.encode_assistant(turn.reply)
        parsed = exchange.add_sampled(Generation(ids=ids, logprobs=(0.0,) * len(ids), finish="stop"), started=0.0)
        problem = misread(turn, parsed, last=number == len(turns))
        if problem:
            raise SftDifference(f"reply {number} {problem}")
        if turn.answers:
            told = as_told(turn.answers, parsed.tool_calls)
            exchange.add_observed(told, (), closed=parsed.closed, rerender=False, started=0.0)
    return exchange


def split_turns(messages: Sequence[Message]) -> Iterator[CheckedTurn]:
    """Every reply with what follows it; what comes before the first is the prompt."""
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for at, following in zip_longest(replies, replies[1:], fillvalue=len(messages)):
        yield CheckedTurn(messages[at], list(messages[at + 1 : following]))


def as_told(answers: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """The answers as the tool loop words them: each tool answer carries the name and id of its call."""
    waiting = iter(calls)
    told = []
    for answer in answers:
        call = next(waiting, None) if answer["role"] == "tool" else None
        named = {"name": call.name, "tool_call_id": call.id} if call else {}
        told.append({"role": answer["role"], "content": answer["content"], **named})
    return told


def misread(turn: CheckedTurn, parsed: Parsed, *, last: bool) -> str | None:
    """How an agent loop would read the reply otherwise than the row means it, if it would."""
    meant = [(call["function"]["name"], call["function"]["arguments"]) for call in turn.reply.get("tool_calls") or ()]
    read = [(call.name, call.arguments) for call in parsed.tool_calls]
    if meant and meant != read:
        return (
            f"has the calls {meant}, and its text is read as {read or 'none'}: {parsed.text!r}; check data.tool_format"
        )
    if _squeezed(str(turn.reply["content"])) not in _squeezed(parsed.text):
        return f"says {turn.reply['content']!r}, which the chat template does not print: {parsed.text!r}"
    if last:
        return None
    answered = sum(answer["role"] == "tool" for answer in turn.answers)
    if answered != len(read):
        return f"makes {len(read)} tool calls, and {answered} tool answers follow; an episode has one for each call"
    return (
        None if turn.answers else "is followed by another reply; an episode never lets the policy speak twice in a row"
    )


def _note_rendering(report: CheckReport, codec: ChatCodec, one: Conversation, row: Row) -> None:
    """Count conversations that the template itself renders otherwise, as some do with the thinking of old turns."""
    try:
        found = codec.sanity(row.ids, one.messages, "ignore_strippable")
    except TemplateError as refusal:
        found = str(refusal)
    if found is not None:
        report.rendered_otherwise += 1
        report.first_rendered = report.first_rendered or f"{one.where}:\n{found}"


def _turn_at(exchange: EpisodeBuilder, place: int) -> str:
    at = place - len(exchange.segment.prompt_ids)
    if at < 0:
        return "the prompt"
    for number, turn in enumerate(exchange.turns, start=1):
        if turn.start <= at < turn.end:
            return f"turn {number} ({'assistant, sampled' if turn.role == 'assistant' else 'tool or user, observed'})"
    return "what follows the last turn"


def _shown(codec: ChatCodec, tokens: Sequence[tuple[int, int]], place: int) -> str:
    """Tokens around a place, decoded one by one; supervised ones are marked with a star, the place with brackets."""
    shown = []
    for i, (token, sampled) in enumerate(tokens[max(0, place - AROUND) : place + AROUND], max(0, place - AROUND)):
        word = f"{token}{'*' if sampled else ''} {codec.decode([token])!r}"
        shown.append(f"[{word}]" if i == place else word)
    return ", ".join(shown) if len(tokens) > place else ", ".join([*shown, "[the end]"])


def _squeezed(text: str) -> str:
    return "".join(text.split())
