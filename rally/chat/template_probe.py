"""Tests before training whether a chat template is append-only, and reports differences with a small diff.

A template is append-only if the concatenation of prompt, sampled replies and deltas equals its rendering of the whole
conversation. The probe also finds templates that omit the tool list, tool calls, earlier thinking, or a whole message.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

from rally.chat.deltas import TurnTexts
from rally.chat.templates import QUESTION, TemplateError
from rally.types import Message, RallyError

SanityMode = Literal["strict", "ignore_strippable", "disable"]
THOUGHT = "a first thought"
_TOOL_NAME = "lookup"
_CONTEXT, _SHOWN = 30, 120
_DOUBLED = re.compile(r'\{\{\s*"name"')
_PIECE = re.compile(r"<[^<>\s]+>|\w+|\W")


def _assistant(content: str, call: bool = False, number: int = 0) -> Message:
    function = {"name": _TOOL_NAME, "arguments": {"query": "x"}}
    calls: dict[str, Any] = {"tool_calls": [{"id": f"call_{number}", "type": "function", "function": function}]}
    return {"role": "assistant", "content": content, **(calls if call else {})}


_NEXT: Message = {"role": "user", "content": "next question"}
_TOOL: Message = {"role": "tool", "name": _TOOL_NAME, "tool_call_id": "call_0", "content": "42"}
_SECOND: Message = {**_TOOL, "tool_call_id": "call_1", "content": "43"}
_THINKING = f"<think>\n{THOUGHT}\n</think>\n\n"

CASES: dict[str, list[Message]] = {
    "a user turn after an answer": [QUESTION, _assistant("answer"), _NEXT],
    "a tool answer after a call": [QUESTION, _assistant("", call=True), _TOOL],
    "two tool answers after a call": [QUESTION, _assistant("", call=True), _TOOL, _TOOL],
    "a second call after a tool answer": [
        *(QUESTION, _assistant("", call=True), _TOOL),
        *(_assistant("", call=True, number=1), _SECOND),
    ],
    "a user turn after tool use": [QUESTION, _assistant("", call=True), _TOOL, _assistant("answer"), _NEXT],
    "a tool answer after text and a call": [QUESTION, _assistant("I look it up.", call=True), _TOOL],
    "a tool answer after thinking": [QUESTION, _assistant(_THINKING, call=True), _TOOL],
    "a user turn after thinking": [QUESTION, _assistant(_THINKING + "answer"), _NEXT],
}


_BROKEN = _assistant("a call that could not be parsed")  # it is answered by a tool message with the reason
_LONG: Message = {**_TOOL, "content": " ".join(f"line {number} of a long answer" for number in range(2000))}
TOOL_TURNS: tuple[list[Message], ...] = ([_TOOL], [_TOOL, _SECOND], [_LONG])
USER_TURNS: tuple[list[Message], ...] = ([_NEXT], [{**_NEXT, "content": _LONG["content"]}])
History = Literal["append", "rerender"]


class TemplateDifference(NamedTuple):
    """A conversation whose rendering differs from the sampled history."""

    case: str
    expected_text: str
    got_text: str


@dataclass(frozen=True, kw_only=True)
class TemplateReport:
    """The result of probing a chat template."""

    append_only: bool
    thinking_kept: bool
    tool_delta_exact: bool
    tools_shown: bool
    calls_shown: bool
    braces_doubled: bool
    end_of_turn: str
    differences: tuple[TemplateDifference, ...]
    tool_refusals: Mapping[History, str]
    user_refusals: Mapping[History, str]

    def refusal(self, history: History, *, tools: bool, users: bool) -> str:
        """Why no episode with tools, or with a simulated user, can continue after its first turn; empty if it can."""
        refused = (self.tool_refusals[history] if tools else "") or (self.user_refusals[history] if users else "")
        return f"With multi_turn.history={history} an episode cannot continue: {refused}" if refused else ""

    @property
    def hidden(self) -> str:
        """What the template silently omits, as a sentence; empty if nothing."""
        omitted = [] if self.tools_shown else ["the list of tools, so the policy does not know them"]
        omitted += [] if self.calls_shown else ["the assistant's tool calls, so they cannot be trained"]
        if not omitted:
            return ""
        return f"The chat template omits {' and '.join(omitted)}; use one that supports tools (custom_chat_template)."

    @property
    def problems(self) -> str:
        """What prevents the policy from calling tools, in sentences; empty if nothing does."""
        doubled = (
            'The chat template shows calls with doubled braces, {{"name": ...}}; a policy that copies them writes '
            "malformed calls, so use a template with single braces (custom_chat_template)."
        )
        return " ".join(filter(None, (self.hidden, doubled if self.braces_doubled else "")))

    @property
    def words(self) -> str:
        """The report as text, with a small diff for each difference."""
        answers = (
            ("is" if self.append_only else "is not", "append-only"),
            ("keeps" if self.thinking_kept else "drops", "the thinking of earlier turns"),
            ("renders" if self.tool_delta_exact else "does not render", "tool answers as they are appended"),
        )
        head = "The chat template " + ", ".join(" ".join(a) for a in answers) + f"; turns end with {self.end_of_turn}."
        heads = [head, self.problems] if self.problems else [head]
        return "\n".join(
            [*heads, *(f"{d.case}:\n{first_difference(d.expected_text, d.got_text)}" for d in self.differences)]
        )


def probe(turns: TurnTexts) -> TemplateReport:
    """Render each case as a whole and turn by turn, and compare."""
    differences, kept, exact = [], True, True
    for case, messages in CASES.items():
        if "thinking" in case and turns.thinking_closed:
            continue
        expected, got, last_delta = as_sampled(turns, messages)
        if got != expected:
            differences.append(TemplateDifference(case, expected, got))
        if "thinking" in case:
            kept = kept and THOUGHT in expected
        if messages[-1]["role"] == "tool":
            exact = exact and bool(last_delta) and expected.endswith(last_delta)
    return TemplateReport(
        append_only=not differences,
        thinking_kept=kept,
        tool_delta_exact=exact,
        tools_shown=not turns.template.tools or turns.template.shows_tools,
        calls_shown=_calls_shown(turns),
        braces_doubled=_DOUBLED.search(turns.prompt([QUESTION])) is not None,
        end_of_turn=turns.end.text,
        differences=tuple(differences),
        tool_refusals={history: _refusal(turns, history, TOOL_TURNS, after_calls=True) for history in _HISTORIES},
        user_refusals={history: _refusal(turns, history, USER_TURNS, after_calls=False) for history in _HISTORIES},
    )


def _calls_shown(turns: TurnTexts) -> bool:
    try:
        return _TOOL_NAME in turns.template.text([QUESTION, _assistant("", call=True)], False)
    except TemplateError:
        return False


_HISTORIES: tuple[History, ...] = ("append", "rerender")


def _refusal(turns: TurnTexts, history: History, cases: Sequence[list[Message]], *, after_calls: bool) -> str:
    """Why the template cannot continue after one of these turns, or loses a message of it."""
    before = [_assistant("", call=True), _BROKEN] if after_calls else [_assistant("answer")]
    try:
        for messages in cases:
            if history == "append":
                turns.slow_delta(messages)
            else:
                for reply in before:
                    turns.prompt([QUESTION, reply, *messages])
    except TemplateError as problem:
        return str(problem)
    return ""


class _Sampled(NamedTuple):
    expected: str
    text: str
    last_delta: str


def as_sampled(turns: TurnTexts, messages: Sequence[Message]) -> _Sampled:
    """The rendering of a conversation, and the conversation as it grows turn by turn."""
    problem: TemplateError | None = None
    for form in forms(turns, messages):
        try:
            return _as_sampled(turns, form)
        except TemplateError as error:
            problem = problem or error
    return _Sampled("", f"(refused: {problem})", "")


def forms(turns: TurnTexts, messages: Sequence[Message]) -> list[Sequence[Message]]:
    """The conversation, with ids that the template accepts. If the generation prompt opens a thinking block, also with
    thinking in every reply, as text and as a field, since the policy cannot leave it out."""
    messages = turns.template.with_ids(messages)
    if not turns.thinking_prefilled:
        return [messages]
    marks = turns.prefilled_marks
    assert marks is not None
    prefix = f"{marks.opening}\n{THOUGHT}\n{marks.closing}\n\n"
    prefixes = ("",) if marks.as_field else (prefix, "")
    return [messages, *([_thoughtful(m, one) for m in messages] for one in prefixes)]


def _thoughtful(message: Message, prefix: str) -> Message:
    """The reply with thinking, as text (`prefix`) or as a field."""
    if message["role"] != "assistant":
        return message
    content = message["content"].removeprefix(_THINKING)
    if prefix:
        return {**message, "content": prefix + content}
    return {**message, "content": content, **dict.fromkeys(("reasoning_content", "reasoning", "thinking"), THOUGHT)}


def _as_sampled(turns: TurnTexts, messages: Sequence[Message]) -> _Sampled:
    expected, text, delta, at = turns.prompt(messages), turns.prompt(messages[:1]), "", 1
    for is_reply, group in groupby(messages[1:], key=lambda m: m["role"] == "assistant"):
        members = list(group)
        if is_reply:
            text += _reply(turns, members[0], messages[:at])
        else:
            closing, delta = turns.delta(members)
            if not closing:  # the turn ended with the first token of the delta
                first = next((end.text for end in turns.ends.values() if text.endswith(end.text)), "")
                delta = delta.removeprefix(first)
            text += delta
        at += len(members)
    return _Sampled(expected, text, delta)


def _reply(turns: TurnTexts, message: Message, before: Sequence[Message]) -> str:
    """The reply in its place, where a template may number calls; alone, if the template renders it otherwise there."""
    try:
        return turns.reply(message, before)
    except TemplateError:
        return turns.reply(message)


def compare(expected: str, got: str, mode: SanityMode) -> str | None:
    """None if the texts are equal under the mode, otherwise a small diff."""
    if mode not in get_args(SanityMode):
        known = ", ".join(get_args(SanityMode))
        raise RallyError(f"unknown tokenization_sanity_check_mode {mode!r}; choose one of {known}")
    same = mode == "disable" or expected == got
    if mode == "ignore_strippable":
        same = "".join(expected.split()) == "".join(got.split())
    return None if same else first_difference(expected, got)


def first_difference(expected: str, got: str) -> str:
    """The part where two texts differ, with some context."""
    a, b = (_PIECE.findall(text) for text in (expected, got))
    start = _shared(a, b)
    end = _shared(a[start:][::-1], b[start:][::-1])
    before, after = "".join(a[:start])[-_CONTEXT:], "".join(a[len(a) - end :])[:_CONTEXT]
    lines = []
    for name, pieces in (("template", a), ("sampled ", b)):
        middle = "".join(pieces[start : len(pieces) - end])
        shown = middle if len(middle) <= _SHOWN else middle[:_SHOWN] + "..."
        lines.append(f"  {name} ...{before!r} [{shown!r}] {after!r}...")
    return "\n".join(lines)


def _shared(a: Sequence[str], b: Sequence[str]) -> int:
    """The length of the common prefix, in pieces."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
