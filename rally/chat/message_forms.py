"""Finds out, by rendering a few messages, in which form a chat template takes calls and the answers of tools.

Templates differ in what they refuse or leave out: arguments that are objects, calls beside text, calls whose content is
an empty text, a second call, tool messages after a turn without calls. Each is found once and the messages are brought
into a form of which nothing is lost. What no form repairs is left to the check of the whole rendering (`MessageLost`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

from rally.types import Message

Rendering = Callable[[Sequence[Message]], str | None]
_QUESTION: Message = {"role": "user", "content": "question"}
_TEXT, _SECOND, _ANSWER = "rallytext", "rallysecond", "rallyanswer"
_REPLY: Message = {"role": "assistant", "content": _TEXT}
_THINKING_NAMES = ("reasoning_content", "thinking", "reasoning")


class MessageForms:
    """The forms that a template takes. `render` returns None for messages that the template refuses; `call_id` makes
    the id of a call by the name of its tool and its number."""

    def __init__(self, render: Rendering, call_id: Callable[[str, int], str]) -> None:
        self._render, self._call_id = render, call_id

    def _calls(self, content: str | None, arguments: Any = None, names: Sequence[str] = ("lookup",)) -> Message:
        if arguments is None:
            arguments = '{"query": "x"}' if self.json_text else {"query": "x"}
        calls = [
            {"id": self._call_id(name, at), "type": "function", "function": {"name": name, "arguments": arguments}}
            for at, name in enumerate(names)
        ]
        return {"role": "assistant", "content": content, "tool_calls": calls}

    @cached_property
    def json_text(self) -> bool:
        """Whether the template fails on arguments that are an object, and takes them as JSON text."""
        options = ({"query": "x"}, '{"query": "x"}')
        shown = [
            any("lookup" in (self._render([_QUESTION, self._calls(content, one)]) or "") for content in ("", None))
            for one in options
        ]
        return shown == [False, True]

    @cached_property
    def without_text(self) -> str | None:
        """The content of a turn that has calls and no text: empty, or None if the template otherwise leaves out the
        calls or writes a second, empty turn."""
        empty, none = (self._render([_QUESTION, self._calls(content)]) for content in ("", None))
        if none is None or "lookup" not in none or "None" in none:
            return ""
        return None if empty is None or "lookup" not in empty or len(none) < len(empty.rstrip()) else ""

    @cached_property
    def calls_in_text(self) -> bool:
        """Whether the template leaves out calls beside text, so that they must be written into the text."""
        beside = self._render([_QUESTION, self._calls(_TEXT)])
        if beside is None or "lookup" in beside or _TEXT not in beside:
            return False
        return "lookup" in (self._render([_QUESTION, self._calls(self.without_text)]) or "")

    @cached_property
    def thinking_in_text(self) -> bool:
        """Whether the template refuses a turn that has calls, text and thinking, but takes the thinking as text."""
        turn = self._calls(_TEXT)
        thought = dict.fromkeys(_THINKING_NAMES, "thought")
        return self._render([_QUESTION, {**turn, **thought}]) is None and self._render([_QUESTION, turn]) is not None

    @cached_property
    def thinking_as_field(self) -> bool:
        """Whether the template writes thinking marks of its own, so that text with thinking would have them twice."""
        contents = (f"<think>\nthought\n</think>\n\n{_TEXT}", _TEXT)
        turns = [self._render([_QUESTION, {**_REPLY, "content": content}]) or "" for content in contents]
        asked = self._render([_QUESTION]) or ""
        return [turn.count("</think>") - asked.count("</think>") for turn in turns] == [2, 1]

    def reply(self, message: Message) -> Message:
        """An assistant message whose text begins with thinking, in the form that the template takes."""
        content = message["content"]
        if not (isinstance(content, str) and content.lstrip().startswith("<think>") and self.thinking_as_field):
            return message
        thinking, closed, rest = content.lstrip().removeprefix("<think>").partition("</think>")
        fields = dict.fromkeys(_THINKING_NAMES, thinking.strip())
        return {**message, "content": rest.lstrip(), **fields} if closed else message

    @cached_property
    def one_call(self) -> bool:
        """Whether the template prints only the first of several calls of a turn."""
        text = self._render([_QUESTION, self._calls(self.without_text, names=("lookup", _SECOND))])
        return text is not None and "lookup" in text and _SECOND not in text

    @cached_property
    def loses_answers(self) -> bool:
        """Whether the template prints no tool messages, or refuses them."""
        return self._loses(self._calls(self.without_text)) and self._loses(_REPLY)

    @cached_property
    def loses_stray_answers(self) -> bool:
        """Whether the template prints tool messages after calls, and leaves out or refuses others: those that answer a
        call that could not be read."""
        return self._loses(_REPLY) and not self._loses(self._calls(self.without_text))

    def _loses(self, turn: Message) -> bool:
        answer: Message = {"role": "tool", "name": "lookup", "content": _ANSWER}
        answer["tool_call_id"] = self._call_id("lookup", 0)
        as_tool, as_user = (
            self._render([_QUESTION, turn, one]) or "" for one in (answer, {"role": "user", "content": _ANSWER})
        )
        return _ANSWER not in as_tool and _ANSWER in as_user

    def turn(self, message: Message, written: Callable[[Sequence[Mapping[str, Any]]], str]) -> Message:
        """An assistant message with calls, in the form that the template takes. `written` writes calls as text."""
        content, calls = message["content"], message["tool_calls"]
        thinking = next((message[name] for name in _THINKING_NAMES if message.get(name)), None)
        if isinstance(content, str) and content.strip():
            if self.calls_in_text:
                rest = {key: value for key, value in message.items() if key != "tool_calls"}
                return {**rest, "content": f"{content}\n{written(calls)}"}
            if thinking is not None and self.thinking_in_text:
                rest = {key: value for key, value in message.items() if key not in _THINKING_NAMES}
                return {**rest, "content": f"{thinking}\n{content}"}
        elif isinstance(content, str):
            return {**message, "content": self.without_text}
        return message

    def answered(self, messages: Sequence[Message], after_calls: bool, calls_written: bool) -> list[Message]:
        """The messages, with answers of tools that the template would lose as user messages. `after_calls`: the turn
        before them has calls. `calls_written`: calls are written into the text of turns."""
        result: list[Message] = []
        for message in messages:
            if message["role"] != "tool":
                after_calls = bool(message.get("tool_calls"))
            elif self.loses_answers if calls_written else not after_calls and self.loses_stray_answers:
                message = {"role": "user", "content": message["content"], "answer": True}
                if result and result[-1].get("answer") and _both_texts(result[-1], message):
                    message["content"] = f"{result.pop()['content']}\n{message['content']}"
            result.append(message)
        return [{key: value for key, value in m.items() if key != "answer"} for m in result]


def _both_texts(*messages: Message) -> bool:
    return all(isinstance(message["content"], str) for message in messages)
