"""Computes the text between two sampled turns, exactly as the chat template renders it.

The text after a turn is found by rendering a placeholder turn followed by the new messages and taking what comes after
its end-of-turn token. Which token that is follows from the template and from the stop tokens of the model. If the
template copies message text unchanged, that rendering is cached as a frame, and the contents of later messages of the
same shape are inserted into it.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property, partial
from itertools import takewhile
from typing import NamedTuple

from rally.chat.templates import (
    QUESTION,
    SENTINEL,
    MessageLost,
    Template,
    TemplateError,
    common_prefix,
    content_of,
    lost_message,
)
from rally.chat.turn_ends import KINDS, EndOfTurn, Kind, TurnEnds
from rally.types import Message

# Text that changes if a template strips, quotes or escapes message contents. Such a template gets no frame.
WITNESS = " \n\t\"<b>'&amp;\\n {{%d}} é\u2028 %% \n "
MAX_FRAMES = 1024
_FRAMED = {"role", "content", "name", "tool_call_id"}
Shape = tuple[tuple[str, str, str], ...]


class ThinkingMarks(NamedTuple):
    """The marks around the thinking of a turn. `as_field`: templates take it as a field of the message, not as text."""

    opening: str
    closing: str
    as_field: bool = True


THINKING = (
    ThinkingMarks("<think>", "</think>", as_field=False),
    ThinkingMarks("[THINK]", "[/THINK]", as_field=False),
    ThinkingMarks("Here are my reasoning steps:", "[BEGIN FINAL RESPONSE]", as_field=False),
    ThinkingMarks("<|channel|>analysis<|message|>", "<|end|>"),
    ThinkingMarks("<|channel>thought", "<channel|>"),
    ThinkingMarks("<|START_THINKING|>", "<|END_THINKING|>"),
    ThinkingMarks("<|open|>think<|sep|>", "<|close|>think<|sep|>"),
    ThinkingMarks("<seed:think>", "</seed:think>"),
    ThinkingMarks("<mm:think>", "</mm:think>"),
    ThinkingMarks("<think:opensource>", "</think:opensource>"),
    ThinkingMarks("<|inner_prefix|>", "<|inner_suffix|>"),
    ThinkingMarks("<|think|>", "<|end|>"),
)


class DeltaText(NamedTuple):
    """The text after a turn, and the token that closes the turn before it. If that is empty, the first token of the
    text is the stop token of the turn."""

    closing: str
    text: str


class TurnTexts:
    """The parts of a conversation as text: the prompt, a reply, and the delta after a reply. `stops` are the stop
    tokens of the model's generation config and tokenizer."""

    def __init__(self, template: Template, stops: Sequence[int] = ()) -> None:
        self.template = template
        self._ends = TurnEnds(template, stops)
        self._frames: dict[Shape, tuple[str, ...] | None] = {}
        self._closings: dict[Shape, str] = {}

    @property
    def ends(self) -> Mapping[Kind, EndOfTurn]:
        """The end of a turn of text, and of a turn with calls."""
        return self._ends.by_kind

    @property
    def end(self) -> EndOfTurn:
        return self.ends["content"]

    @cached_property
    def opening(self) -> str:
        """The generation prompt, which the template puts before an assistant turn."""
        before, after = self.template.text([QUESTION], False), self._asked
        # A template may end every conversation with the end-of-text token.
        shared = common_prefix(before.rstrip().removesuffix(str(self.template.tokenizer.eos_token)), after)
        if before[len(shared) :].strip() not in ("", str(self.template.tokenizer.eos_token)):
            raise TemplateError(
                "the chat template's generation prompt changes the text before it; use another template"
            )
        return after[len(shared) :]

    @cached_property
    def _asked(self) -> str:
        return self.template.text([QUESTION], True)

    def prompt(self, messages: Sequence[Message]) -> str:
        return self.template.text(messages, True)

    def reply(self, message: Message, before: Sequence[Message] = (QUESTION,)) -> str:
        """The turn as the policy would have sampled it after `before`, with the end-of-turn token."""
        start = self._asked if list(before) == [QUESTION] else self.template.text(before, True)
        try:
            return self._reply_after(start, message, before)
        except TemplateError:
            marks, content = self.prefilled_marks, message.get("content")
            if marks is None or not isinstance(content, str) or marks.closing not in content:
                raise
        # The template drops the thinking of every finished turn, as R1's do.
        thinking, _, answer = content.partition(marks.closing)
        role = start.rstrip().removesuffix(marks.opening)
        rest = self._reply_after(role, {**message, "content": answer.lstrip()}, before)
        return f"{thinking.strip().removeprefix(marks.opening).strip()}\n{marks.closing}\n\n{rest}"

    def _reply_after(self, start: str, message: Message, before: Sequence[Message]) -> str:
        """What the template prints for the turn after `start`. Raises TemplateError."""
        whole = self.template.text([*before, message], False)
        body: str | None = whole[len(start) :]
        if not whole.startswith(start):
            body = self._after_role(start, whole)
            body = self._after_closed_thinking(start, whole) if body is None and self.thinking_closed else body
        kinds: tuple[Kind, ...] = ("call", "content")
        if not self.template.normal(message).get("tool_calls"):
            kinds = ("content", "call")
        end = self.ends[kinds[0]]
        if body is not None and not end.printed:
            return body.removesuffix(end.extra) + end.text
        for kind in kinds:
            end = self.ends[kind]
            text, found, _ = (body or "").removesuffix(end.extra).rpartition(end.written or end.text)
            if found:
                return text + end.text
        advice = (
            "give the replies their thinking (reasoning_content), or turn thinking off in apply_chat_template_kwargs"
            if self.thinking_prefilled
            else "use a template that keeps it"
        )
        raise TemplateError(
            f"the chat template's generation prompt is {self.opening!r}, but it renders a finished reply without "
            f"it, so replies cannot be trained on; {advice}"
        )

    def _after_closed_thinking(self, start: str, whole: str) -> str | None:
        """The reply if the generation prompt has an empty thinking block that a finished turn lacks; else None."""
        shared = common_prefix(start, whole)
        tag = shared.rfind("<")
        shared = shared[:tag] if tag > shared.rfind(">") else shared
        rest, body = start[len(shared) :], whole[len(shared) :]
        marks = next((marks for marks in THINKING if marks.closing in rest), None)
        if marks is None or self._ends.specials(rest.replace(marks.opening, "").replace(marks.closing, "")):
            return None
        empty = re.match(rf"\s*(?:{re.escape(marks.opening)})?\s*{re.escape(marks.closing)}\s*", body)
        return body[empty.end() :] if empty else body

    def _after_role(self, start: str, whole: str) -> str | None:
        """The reply if the template changes what stands before the last special token of the generation prompt, or the
        space after it; else None."""
        specials = self._ends.specials(start)
        role = start[start.rfind(self._ends.token(specials[-1])) :].rstrip() if specials else ""
        matches = list(re.finditer(r"\s*".join(map(re.escape, re.split(r"\s+", role))), whole)) if role else []
        return whole[matches[-1].end() :].lstrip() if matches else None

    @cached_property
    def thinking_closed(self) -> bool:
        """Whether the generation prompt has a closed thinking block, so that the policy does not think."""
        return any(self._asked.rstrip().endswith(marks.closing) for marks in THINKING if marks.closing != "<|end|>")

    @cached_property
    def thinking_prefilled(self) -> bool:
        """Whether the generation prompt opens a thinking block."""
        return self.prefilled_marks is not None

    @cached_property
    def prefilled_marks(self) -> ThinkingMarks | None:
        """The marks of the thinking block that the generation prompt opens; None if it opens none."""
        return next((marks for marks in THINKING if self.opening.rstrip().endswith(marks.opening)), None)

    @cached_property
    def frames(self) -> Mapping[Kind, tuple[str, str]]:
        """What the template puts around the content of a turn of text and of a turn with calls, as a channel name."""
        return {kind: self._frame_of(kind) for kind in KINDS}

    def _frame_of(self, kind: Kind) -> tuple[str, str]:
        message: Message = {"role": "assistant", "content": SENTINEL}
        if kind == "call":
            call_id = self.template.format.call_id("lookup", 0)
            function = {"name": "lookup", "arguments": {"value": "x"}}
            message["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        thought = dict.fromkeys(("reasoning_content", "reasoning", "thinking"), "a thought")
        try:
            text = self.reply({**message, **(thought if self.thinking_prefilled else {})})
        except TemplateError:
            return "", ""
        text = text.removesuffix(self.ends[kind].text)
        before, found, after = self.template.format.parse(text).content.partition(SENTINEL)
        for marks in THINKING:
            if marks.closing in before:
                before = before.partition(marks.closing)[2] if marks.as_field else ""
        return (before.strip(), after.strip()) if found else ("", "")

    def check_reply(self, message: Message) -> None:
        """Raise MessageLost if the template leaves out the text of this reply, as some do beside a call, or one of its
        calls. A row with such a reply would be trained on without it."""
        reply = self.reply(message)
        names = Counter(str((call.get("function") or call).get("name")) for call in message.get("tool_calls") or ())
        for name, count in names.items():
            if reply.count(name) < count:
                raise MessageLost(
                    f"the chat template does not print every call of {name} in an assistant message with "
                    f"{sum(names.values())} calls and the text {str(message.get('content') or '')[:60]!r}; split the "
                    "message, or use a template that prints it (custom_chat_template)"
                )
        content = self.template.observed("assistant", content_of(message.get("content")))
        spoken: Message = {"role": "the reply", "content": content}
        if lost_message([spoken], reply) is not None:
            beside = "beside its tool calls " if message.get("tool_calls") else ""
            raise MessageLost(
                f"the chat template does not print the whole text of an assistant message {beside}"
                f"({str(message['content'])[:60]!r}); remove the text, or use a template that prints it "
                "(custom_chat_template)"
            )

    def delta(self, messages: Sequence[Message]) -> DeltaText:
        """The text after a turn when `messages` follow, with the generation prompt."""
        normal = self.template.normals(messages, after_calls=True)
        shape = _shape(normal)
        if shape is None:
            return self._rendered(normal)
        if shape not in self._frames:
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            framed = self._frame(normal)
            self._frames[shape], self._closings[shape] = framed.pieces, framed.closing
        frame = self._frames[shape]
        if frame is None:
            return self._rendered(normal)
        spliced = [part for m, before in zip(normal, frame, strict=False) for part in (before, m["content"])]
        return DeltaText(self._closings[shape], "".join(spliced) + frame[-1])

    def slow_delta(self, messages: Sequence[Message]) -> DeltaText:
        """The same by a full rendering. `delta` is tested against it."""
        return self._rendered(self.template.normals(messages, after_calls=True))

    def _frame(self, normal: Sequence[Message]) -> Frame:
        """The text around the contents of the messages; None if the template does not copy contents unchanged."""
        marks = [WITNESS % i for i in range(len(normal))]
        try:
            closing, rest = self._rendered([{**m, "content": mark} for m, mark in zip(normal, marks, strict=True)])
        except MessageLost:  # of the marks; whether the messages themselves are printed is seen when they are rendered
            return Frame(None, "")
        pieces = []
        for mark in marks:
            if rest.count(mark) != 1:
                return Frame(None, "")
            before, _, rest = rest.partition(mark)
            pieces.append(before)
        return Frame((*pieces, rest), closing)

    def _rendered(self, normal: Sequence[Message]) -> DeltaText:
        """The delta by a full rendering. It has the text of every message: an answer that the policy does not see
        would be trained on as if it did."""
        problems = []
        for stand_in in self._stand_ins(normal):
            kind: Kind = "call" if stand_in.get("tool_calls") else "content"
            try:
                text = self.template.complete(
                    normal, partial(self._after, stand_in), ("after", len(stand_in.get("tool_calls", ())))
                )
                return DeltaText(self.ends[kind].later, text)
            except TemplateError as problem:
                problems.append(problem)
        raise problems[0]

    def _after(self, stand_in: Message, normal: Sequence[Message]) -> str:
        text = self.template.raw_text([QUESTION, self.template.normal(stand_in), *normal], True)
        end = self.ends["call" if stand_in.get("tool_calls") else "content"]
        # The first sentinel is the placeholder's, whatever a tool may have printed.
        _, found, tail = text.partition(SENTINEL)
        if found and end.silent:
            syntax = (
                self._ends.rest_of_call(text, calls=len(stand_in["tool_calls"])) if stand_in.get("tool_calls") else ""
            )
            if syntax is not None:
                return tail.removeprefix(syntax)
        if found and not end.later and not stand_in.get("tool_calls"):
            return tail  # the next message begins with the stop token
        _, closed, delta = tail.partition(end.later or end.text)
        if found and closed:
            return delta if end.later else closed + delta
        roles = ", ".join(str(m["role"]) for m in normal)
        raise TemplateError(
            f"the chat template does not end an assistant turn with {end.text} when {roles} follows, "
            "so nothing can be appended to it; set multi_turn.history=rerender"
        )

    def _stand_ins(self, normal: Sequence[Message]) -> list[Message]:
        """The placeholder turns to try. Before tool messages: one call, then a call for each of them, then, for
        templates without calls, plain text."""
        text: Message = {"role": "assistant", "content": SENTINEL}
        answers = list(takewhile(lambda message: message["role"] == "tool", normal))
        calls = []
        for number, answer in enumerate(answers):
            name = answer.get("name", "tool")
            call_id = answer.get("tool_call_id") or self.template.format.call_id(name, number)
            function = {"name": name, "arguments": {"value": SENTINEL}}
            calls.append({"id": call_id, "type": "function", "function": function})
        numbers = dict.fromkeys((min(1, len(calls)), len(calls)))
        turns: list[Message] = [{"role": "assistant", "content": "", "tool_calls": calls[:n]} for n in numbers if n]
        return [*turns, text]


class Frame(NamedTuple):
    """The text around the contents of messages of one shape, and the token that closes the turn before them."""

    pieces: tuple[str, ...] | None
    closing: str


def _shape(normal: Sequence[Message]) -> Shape | None:
    """The key of a frame; None if a message must be rendered individually."""
    for m in normal:
        # A template may treat empty content specially.
        if not isinstance(m["content"], str) or not m["content"].strip() or m.keys() - _FRAMED:
            return None
    return tuple((m["role"], m.get("name", ""), m.get("tool_call_id", "")) for m in normal)
