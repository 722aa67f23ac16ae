"""`rally sft --check`: verifies that training rows equal what an episode would sample and observe.

Each conversation is replayed through the episode builder of the agent loops, with the row's replies as samples and its
tool and user messages as observations. Tokens and mask of that episode must equal the training row, and each reply must
parse to the tool calls and text of the row.
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
    """A reply, and the tool or user messages after it."""

    reply: Message
    answers: list[Message]


class SftDifference(RallyError):
    """A conversation differs from the episode it should equal."""


@dataclass
class CheckReport:
    """The counts of a check; `first` and `first_rendered` describe the first case of each kind."""

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
    """Check all conversations. One longer than `max_length` tokens is counted and not compared."""
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


def print_report(report: CheckReport, name: str, settings: SftSettings, console: RunConsole) -> None:
    """Print the counts as a table, then the first case of each kind."""
    over = "an error" if settings.truncation == "error" else f"truncated on the {settings.truncation}"
    rows = [
        ["equal to an episode", f"{report.ok} of {report.rows} conversations, {report.supervised} supervised tokens"],
        ["different", str(report.different)],
        ["over-long", f"{report.over_long} of more than data.max_length={settings.max_length} tokens, {over}"],
        ["rendered otherwise", f"{report.rendered_otherwise} of the equal ones, by the chat template"],
    ]
    console.table(f"{name}: training rows compared with episodes", rows)
    if report.first:
        console.note(f"the first difference: {report.first}")
    if report.first_rendered:
        console.note(
            "the chat template renders earlier turns differently from how they were sampled; "
            "multi_turn.history=append, "
            "the default, keeps them as in this training data, rerender does not; the first: "
            f"{report.first_rendered}"
        )


def compare(codec: ChatCodec, messages: Sequence[Message], row: Row) -> None:
    """Raise `SftDifference` at the first token where an episode of these messages differs from `row`."""
    exchange = replayed(codec, messages)
    segment = exchange.segment
    mask = (0,) * len(segment.prompt_ids) + segment.response_mask
    supervised_tokens = list(zip(row.ids.tolist(), map(int, row.mask), strict=True))
    episode = list(zip(segment.ids, mask, strict=True))
    place = next((i for i, (a, b) in enumerate(zip_longest(supervised_tokens, episode)) if a != b), None)
    if place is not None:
        raise SftDifference(
            f"token {place}, in {_turn_at(exchange, place)}, differs from the episode\n"
            f"  row:     {_shown(codec, supervised_tokens, place)}\n  episode: {_shown(codec, episode, place)}"
        )


def replayed(codec: ChatCodec, messages: Sequence[Message]) -> EpisodeBuilder:
    """The conversation as an agent loop records it, with the row's replies as samples."""
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
            messages_after = as_observed(turn.answers, parsed.tool_calls)
            exchange.add_observed(messages_after, (), closed=parsed.closed, rerender=False, started=0.0)
    return exchange


def split_turns(messages: Sequence[Message]) -> Iterator[CheckedTurn]:
    """Every reply with the messages after it. Messages before the first reply are the prompt."""
    replies = [i for i, m in enumerate(messages) if m["role"] == "assistant"]
    for at, following in zip_longest(replies, replies[1:], fillvalue=len(messages)):
        yield CheckedTurn(messages[at], list(messages[at + 1 : following]))


def as_observed(answers: Sequence[Message], calls: Sequence[ToolCall]) -> list[Message]:
    """The messages as the tool loop adds them: each tool response carries the name and id of its call."""
    waiting = iter(calls)
    observed = []
    for answer in answers:
        call = next(waiting, None) if answer["role"] == "tool" else None
        named = {"name": call.name, "tool_call_id": call.id} if call else {}
        observed.append({"role": answer["role"], "content": answer["content"], **named})
    return observed


def misread(turn: CheckedTurn, parsed: Parsed, *, last: bool) -> str | None:
    """How an agent loop would parse the reply differently from the row; None if it would not."""
    meant = [(call["function"]["name"], call["function"]["arguments"]) for call in turn.reply.get("tool_calls") or ()]
    read = [(call.name, call.arguments) for call in parsed.tool_calls]
    if meant and meant != read:
        return (
            f"has the calls {meant}, but its text parses to {read or 'none'}: {parsed.text!r}; check data.tool_format"
        )
    if _squeezed(str(turn.reply["content"])) not in _squeezed(parsed.text):
        return f"has the content {turn.reply['content']!r}, which the chat template does not render: {parsed.text!r}"
    if last:
        return None
    answered = sum(answer["role"] == "tool" for answer in turn.answers)
    if answered != len(read):
        return f"makes {len(read)} tool calls, but {answered} tool responses follow; an episode has one for each call"
    return None if turn.answers else "is followed by another reply; an episode never has two assistant turns in a row"


def _note_rendering(report: CheckReport, codec: ChatCodec, one: Conversation, row: Row) -> None:
    """Count conversations that the template itself renders differently, as some do with the thinking of earlier
    turns."""
    try:
        difference = codec.sanity(row.ids.tolist(), one.messages, "ignore_strippable")
    except TemplateError as refusal:
        difference = str(refusal)
    if difference is not None:
        report.rendered_otherwise += 1
        report.first_rendered = report.first_rendered or f"{one.where}:\n{difference}"


def _turn_at(exchange: EpisodeBuilder, place: int) -> str:
    at = place - len(exchange.segment.prompt_ids)
    if at < 0:
        return "the prompt"
    for number, turn in enumerate(exchange.turns, start=1):
        if turn.start <= at < turn.end:
            return f"turn {number} ({'assistant, sampled' if turn.role == 'assistant' else 'tool or user, observed'})"
    return "the text after the last turn"


def _shown(codec: ChatCodec, tokens: Sequence[tuple[int, int]], place: int) -> str:
    """The tokens around a place, decoded one by one. A star marks supervised tokens, brackets mark the place."""
    shown = []
    for i, (token, sampled) in enumerate(tokens[max(0, place - AROUND) : place + AROUND], max(0, place - AROUND)):
        word = f"{token}{'*' if sampled else ''} {codec.decode([token])!r}"
        shown.append(f"[{word}]" if i == place else word)
    return ", ".join(shown) if len(tokens) > place else ", ".join([*shown, "[the end]"])


def _squeezed(text: str) -> str:
    return "".join(text.split())
