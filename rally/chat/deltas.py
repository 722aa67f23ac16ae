"""Computes the text between two sampled turns, exactly as the chat template renders it.

The text after a turn is found by rendering a placeholder turn followed by the new messages and taking what comes after
its end-of-turn token. If the template copies message text unchanged, that rendering is cached as a frame, and the
contents of later messages of the same shape are inserted into it.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property, partial
from itertools import takewhile
from typing import NamedTuple

from rally.chat.templates import QUESTION, SENTINEL, MessageLost, Template, TemplateError, lost_message
from rally.types import Message

# Text that changes if a template strips, quotes or escapes message contents. Such a template gets no frame.
WITNESS = " \n\t\"<b>'&amp;\\n {{%d}} é\u2028 %% \n "
MAX_FRAMES = 1024
_FRAMED = {"role", "content", "name", "tool_call_id"}
Shape = tuple[tuple[str, str, str], ...]


class EndOfTurn(NamedTuple):
    """The special token that ends an assistant turn."""

    id: int
    text: str


class TurnTexts:
    """The parts of a conversation as text: the prompt, a reply, and the delta after a reply."""

    def __init__(self, template: Template) -> None:
        self.template = template
        self._frames: dict[Shape, tuple[str, ...] | None] = {}

    @cached_property
    def end(self) -> EndOfTurn:
        text = self.template.raw_text([QUESTION, {"role": "assistant", "content": SENTINEL}], False)
        _, found, tail = text.rpartition(SENTINEL)
        if not found:
            raise TemplateError("the chat template does not render assistant messages; use another template")
        tokenizer = self.template.tokenizer
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        for token_id in self.template.tokens(tail):
            if token_id in special or token_id in tokenizer.all_special_ids:
                return EndOfTurn(token_id, str(tokenizer.convert_ids_to_tokens(token_id)))
        raise TemplateError("the chat template does not end assistant turns with a special token; use one that does")

    @cached_property
    def opening(self) -> str:
        """The generation prompt, which the template puts before an assistant turn."""
        before, after = self.template.text([QUESTION], False), self._asked
        if not after.startswith(before):
            raise TemplateError(
                "the chat template's generation prompt changes the text before it; use another template"
            )
        return after[len(before) :]

    @cached_property
    def _asked(self) -> str:
        return self.template.text([QUESTION], True)

    def prompt(self, messages: Sequence[Message]) -> str:
        return self.template.text(messages, True)

    def reply(self, message: Message) -> str:
        """The turn as the policy would have sampled it, with the end-of-turn token."""
        start = self._asked
        whole = self.template.text([QUESTION, message], False)
        body, end, _ = whole[len(start) :].rpartition(self.end.text)
        if not whole.startswith(start) or not end:
            raise TemplateError(
                f"the chat template's generation prompt is {self.opening!r}, but it renders a finished reply without "
                "it, so replies cannot be trained on; use a template that keeps it"
            )
        return body + end

    def check_reply(self, message: Message) -> None:
        """Raise MessageLost if the template leaves out the text of this reply, as some do for the text beside a call.
        A row with such a reply would be trained on without it."""
        spoken = {**self.template.normal(message), "role": "the reply"}
        if lost_message([spoken], self.reply(message)) is not None:
            beside = "beside its tool calls " if message.get("tool_calls") else ""
            raise MessageLost(
                f"the chat template does not print the whole text of an assistant message {beside}"
                f"({str(message['content'])[:60]!r}); remove the text, or use a template that prints it "
                "(custom_chat_template)"
            )

    def delta(self, messages: Sequence[Message]) -> str:
        """The text after an end-of-turn token when `messages` follow, with the generation prompt."""
        normal = [self.template.normal(m) for m in messages]
        shape = _shape(normal)
        if shape is None:
            return self._rendered(normal)
        if shape not in self._frames:
            if len(self._frames) >= MAX_FRAMES:
                self._frames.clear()
            self._frames[shape] = self._frame(normal)
        frame = self._frames[shape]
        if frame is None:
            return self._rendered(normal)
        spliced = [part for m, before in zip(normal, frame, strict=False) for part in (before, m["content"])]
        return "".join(spliced) + frame[-1]

    def slow_delta(self, messages: Sequence[Message]) -> str:
        """The same by a full rendering. `delta` is tested against it."""
        return self._rendered([self.template.normal(m) for m in messages])

    def _frame(self, normal: Sequence[Message]) -> tuple[str, ...] | None:
        """The text around the contents of the messages; None if the template does not copy contents unchanged."""
        marks = [WITNESS % i for i in range(len(normal))]
        try:
            rest = self._rendered([{**m, "content": mark} for m, mark in zip(normal, marks, strict=True)])
        except MessageLost:  # of the marks; whether the messages themselves are printed is seen when they are rendered
            return None
        pieces = []
        for mark in marks:
            if rest.count(mark) != 1:
                return None
            before, _, rest = rest.partition(mark)
            pieces.append(before)
        return (*pieces, rest)

    def _rendered(self, normal: Sequence[Message]) -> str:
        """The delta by a full rendering. It has the text of every message: an answer that the policy does not see
        would be trained on as if it did."""
        problems = []
        for stand_in in _stand_ins(normal):
            try:
                return self.template.complete(
                    normal, partial(self._after, stand_in), ("after", len(stand_in.get("tool_calls", ())))
                )
            except TemplateError as problem:
                problems.append(problem)
        raise problems[0]

    def _after(self, stand_in: Message, normal: Sequence[Message]) -> str:
        text = self.template.raw_text([QUESTION, stand_in, *normal], True)
        # The first sentinel is the placeholder's, whatever a tool may have printed.
        _, found, tail = text.partition(SENTINEL)
        _, end, delta = tail.partition(self.end.text)
        if found and end:
            return delta
        roles = ", ".join(str(m["role"]) for m in normal)
        raise TemplateError(
            f"the chat template does not end an assistant turn with {self.end.text} when {roles} follows, "
            "so nothing can be appended to it; set multi_turn.history=rerender"
        )


def _stand_ins(normal: Sequence[Message]) -> list[Message]:
    """The placeholder turns to try. Before tool messages: one call, then a call for each of them, then, for templates
    without calls, plain text."""
    text: Message = {"role": "assistant", "content": SENTINEL}
    answers = list(takewhile(lambda message: message["role"] == "tool", normal))
    calls = [
        {
            "id": answer.get("tool_call_id", f"call_{number}"),
            "type": "function",
            "function": {"name": answer.get("name", "tool"), "arguments": {"value": SENTINEL}},
        }
        for number, answer in enumerate(answers)
    ]
    numbers = dict.fromkeys((min(1, len(calls)), len(calls)))
    return [*({"role": "assistant", "content": "", "tool_calls": calls[:n]} for n in numbers if n), text]


def _shape(normal: Sequence[Message]) -> Shape | None:
    """The key of a frame; None if a message must be rendered individually."""
    for m in normal:
        # A template may treat empty content specially.
        if not isinstance(m["content"], str) or not m["content"].strip() or m.keys() - _FRAMED:
            return None
    return tuple((m["role"], m.get("name", ""), m.get("tool_call_id", "")) for m in normal)
