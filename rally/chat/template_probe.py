"""What a chat template does to old turns is known before training, and said in words with the place where it differs.

A template is append-only when the prompt, the replies as sampled and the deltas, put one after the other, are its own
rendering of the whole conversation.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal, NamedTuple, get_args

from rally.chat.deltas import TurnTexts
from rally.chat.templates import QUESTION, TemplateError
from rally.types import Message, RallyError

SanityMode = Literal["strict", "ignore_strippable", "disable"]
THOUGHT = "a first thought"
_CALLED = "lookup"
_CONTEXT, _SHOWN = 30, 120
_DOUBLED = re.compile(r'\{\{\s*"name"')
_PIECE = re.compile(r"<[^<>\s]+>|\w+|\W")


def _assistant(content: str, call: bool = False) -> Message:
    function = {"name": _CALLED, "arguments": {"query": "x"}}
    calls: dict[str, Any] = {"tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
    return {"role": "assistant", "content": content, **(calls if call else {})}


_NEXT: Message = {"role": "user", "content": "next question"}
_TOOL: Message = {"role": "tool", "name": _CALLED, "tool_call_id": "call_0", "content": "42"}
_THINKING = f"<think>\n{THOUGHT}\n</think>\n\n"

CASES: dict[str, list[Message]] = {
    "a user turn after an answer": [QUESTION, _assistant("answer"), _NEXT],
    "a tool answer after a call": [QUESTION, _assistant("", call=True), _TOOL],
    "two tool answers after a call": [QUESTION, _assistant("", call=True), _TOOL, _TOOL],
    "a user turn after tool use": [QUESTION, _assistant("", call=True), _TOOL, _assistant("answer"), _NEXT],
    "a tool answer after thinking": [QUESTION, _assistant(_THINKING, call=True), _TOOL],
    "a user turn after thinking": [QUESTION, _assistant(_THINKING + "answer"), _NEXT],
}


class TemplateDifference(NamedTuple):
    """One conversation that the template renders otherwise than it was sampled."""

    case: str
    expected_text: str
    got_text: str


@dataclass(frozen=True, kw_only=True)
class TemplateReport:
    """What probing a chat template found."""

    append_only: bool
    thinking_kept: bool
    tool_delta_exact: bool
    tools_shown: bool
    calls_shown: bool
    braces_doubled: bool
    end_of_turn: str
    differences: tuple[TemplateDifference, ...]

    @property
    def hidden(self) -> str:
        """What the template leaves out without a word, as a sentence; empty if nothing."""
        left_out = [] if self.tools_shown else ["the list of tools, so the policy is never told of them"]
        left_out += [] if self.calls_shown else ["the assistant's tool calls, so they cannot be taught"]
        if not left_out:
            return ""
        return (
            f"The chat template leaves out {' and '.join(left_out)}; give one that knows tools (custom_chat_template)."
        )

    @property
    def troubles(self) -> str:
        """All that keeps a policy from calling tools, in sentences; empty if nothing does."""
        doubled = (
            'The chat template shows calls with doubled braces, {{"name": ...}}; a policy that copies them writes '
            "calls that cannot be read, so give a template with single ones (custom_chat_template)."
        )
        return " ".join(filter(None, (self.hidden, doubled if self.braces_doubled else "")))

    @property
    def words(self) -> str:
        """The whole report as text, one small diff per difference."""
        answers = (
            ("is" if self.append_only else "is not", "append-only"),
            ("keeps" if self.thinking_kept else "drops", "the thinking of earlier turns"),
            ("renders" if self.tool_delta_exact else "does not render", "tool answers as they are appended"),
        )
        head = "The chat template " + ", ".join(" ".join(a) for a in answers) + f"; turns end with {self.end_of_turn}."
        heads = [head, self.troubles] if self.troubles else [head]
        return "\n".join([*heads, *(f"{d.case}:\n{diff_words(d.expected_text, d.got_text)}" for d in self.differences)])


def probe(turns: TurnTexts) -> TemplateReport:
    differences, kept, exact = [], True, True
    for case, messages in CASES.items():
        try:
            expected = turns.prompt(messages)
            got, last_delta = _as_sampled(turns, messages)
        except TemplateError as error:
            expected, got, last_delta = "", f"(refused: {error})", ""
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
        tools_shown=not turns.template.tools or turns.template.knows_tools,
        calls_shown=_CALLED in turns.template.text([QUESTION, _assistant("", call=True)], False),
        braces_doubled=_DOUBLED.search(turns.prompt([QUESTION])) is not None,
        end_of_turn=turns.end.text,
        differences=tuple(differences),
    )


class _Sampled(NamedTuple):
    text: str
    last_delta: str


def _as_sampled(turns: TurnTexts, messages: Sequence[Message]) -> _Sampled:
    """The conversation as it would have grown turn by turn."""
    text, delta = turns.prompt(messages[:1]), ""
    for is_reply, group in groupby(messages[1:], key=lambda m: m["role"] == "assistant"):
        members = list(group)
        delta = "" if is_reply else turns.delta(members)
        text += "".join(turns.reply(m) for m in members) if is_reply else delta
    return _Sampled(text, delta)


def compare(expected: str, got: str, mode: SanityMode) -> str | None:
    """None when the texts agree under the mode, else a small diff."""
    if mode not in get_args(SanityMode):
        known = ", ".join(get_args(SanityMode))
        raise RallyError(f"unknown tokenization_sanity_check_mode {mode!r}; choose one of {known}")
    same = mode == "disable" or expected == got
    if mode == "ignore_strippable":
        same = "".join(expected.split()) == "".join(got.split())
    return None if same else diff_words(expected, got)


def diff_words(expected: str, got: str) -> str:
    """The stretch where two texts differ, with a little of what stands around it."""
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
    """How many pieces two texts begin with in common."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
