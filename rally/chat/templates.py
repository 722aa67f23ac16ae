"""Renders messages with the model's chat template, after normalizing and escaping them.

Messages may have content None, arguments as JSON text, empty tool_calls, or the null fields of a Parquet row; the
template always gets the same form. Control tokens in tool and user text are escaped. The date is fixed at the start,
so that equal messages give equal text for the whole run. A new template is first tried in a killable process.

Some templates print nothing for a tool message after a turn without a call, or only the first of several. A rendering
that lacks the text of a system, user or tool message is an error (`MessageLost`), whoever asked for it.
"""

from __future__ import annotations

import contextlib
import html
import json
import re
from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedTokenizerBase

from rally.chat.formats import ToolFormat
from rally.chat.message_forms import MessageForms
from rally.chat.render_limits import check_rendering
from rally.chat.template_renderer import RENDERING_ERRORS, STARTED, TemplateRenderer
from rally.images.loading import is_image
from rally.types import Message, RallyError, ToolCall


class TemplateError(RallyError):
    """The chat template cannot render the messages, or lacks a property that Rally needs."""


class MessageLost(TemplateError):
    """The chat template leaves a message out of its rendering, or prints only a part of it."""


@dataclass(frozen=True)
class Escaped:
    """Text that is safe to render, and the number of tokens escaped in it."""

    text: str
    count: int


class Escaper:
    """Escapes the control tokens of a tokenizer by inserting a space into them."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, placeholder: str | None = None) -> None:
        shown = {placeholder} if placeholder else set()
        added = tokenizer.added_tokens_decoder.values()
        special = {str(token) for token in added if token.special} | set(tokenizer.all_special_tokens)
        tags = {str(token) for token in added if re.fullmatch(r"[<\[].+[>\]]", str(token), re.DOTALL)}
        self._special = _any_of(special | shown)
        self._control = _any_of(special | tags | shown)
        self._placeholder = _any_of(shown)

    def tool(self, text: str) -> Escaped:
        return _escape(text, self._control)

    def user(self, text: str) -> Escaped:
        return _escape(text, self._special)

    def trusted(self, text: str) -> Escaped:
        """Escape only image placeholders. For text of the system or the policy, whose control tokens are intended."""
        return _escape(text, self._placeholder)


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    # A token of one character is a letter, not a control token, and cannot be split by a space.
    longest_first = sorted((t for t in tokens if len(t) > 1 and not t.isspace()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")


def _escape(text: str, tokens: re.Pattern[str]) -> Escaped:
    total = 0
    while True:
        # Repeated until none is left: splitting one token may leave another inside it.
        text, count = tokens.subn(lambda match: match[0][0] + " " + match[0][1:], text)
        if not count:
            return Escaped(text, total)
        total += count


SENTINEL = "rallysentinel"
QUESTION: Message = {"role": "user", "content": "question"}
_CALL = {"id": "call_0", "type": "function", "function": {"name": "lookup", "arguments": {"query": "x"}}}
_ANSWER: Message = {"role": "assistant", "content": "answer"}
_ASKS: Message = {"role": "assistant", "content": "", "tool_calls": [_CALL]}
_TOOL: Message = {"role": "tool", "name": "lookup", "tool_call_id": "call_0", "content": "42"}
TRIALS: list[list[Message]] = [
    [QUESTION],
    [{"role": "system", "content": "rules"}, QUESTION],
    [QUESTION, _ANSWER, QUESTION],
    [QUESTION, _ASKS, _TOOL, _TOOL, _ANSWER, QUESTION],
]
_tried: set[str] = set()  # templates that have passed
MAX_SHAPES = 4096
_SWITCH = re.compile(r"/(?:no_)?think")  # switches that some templates act on and do not print


def lost_message(messages: Sequence[Message], text: str) -> int | None:
    """The place of the first system, user or tool message whose text is not in the rendering; None if all are. Spaces
    are ignored, and a text may be quoted as JSON or HTML. Equal texts must occur as often as there are messages."""
    squeezed, times = _squeezed(text), Counter[str]()
    for at, message in enumerate(messages):
        for part in () if message["role"] == "assistant" else _texts(message["content"]):
            times[part] += 1
            if squeezed.count(_squeezed(part)) >= times[part]:
                continue
            quoted = (part, json.dumps(part, ensure_ascii=False)[1:-1], json.dumps(part)[1:-1], html.escape(part))
            if sum(squeezed.count(form) for form in {_squeezed(form) for form in quoted}) < times[part]:
                return at
    return None


def _squeezed(text: str) -> str:
    return "".join(_SWITCH.sub("", text).split())


def _texts(content: Any) -> list[str]:
    parts = [content] if isinstance(content, str) else [part.get("text") for part in content]
    return [part for part in parts if isinstance(part, str) and _squeezed(part)]


def _marked(message: Message, mark: str) -> Message:
    """The message with `mark` for its text."""
    content = message["content"]
    if content is None:
        return message
    if isinstance(content, str):
        return {**message, "content": mark if content and message["role"] != "assistant" else content}
    return {**message, "content": [{**part, "text": mark} if part.get("text") else part for part in content]}


def common_prefix(a: str, b: str) -> str:
    """The text with which both begin."""
    return a[: next((at for at, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))]


class Template:
    """The chat template of a tokenizer with one tool list."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]],
        chat_template: str | None,
        kwargs: Mapping[str, Any],
        placeholder: str | None = None,
    ) -> None:
        if chat_template is None and not tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template; pass one with chat_template=")
        self.tokenizer = tokenizer
        self.tools = openai_shape(tools)
        self.source = chat_template
        # Templates that print the date read this name. It must not change during a run.
        self.kwargs = {"date_string": STARTED.strftime("%d %b %Y"), **kwargs}
        self._renderer = TemplateRenderer(tokenizer, chat_template, self.tools, self.kwargs)
        self.placeholder = placeholder  # of images, for a vision model
        self.format = ToolFormat()  # its ids are those that templates of its family accept; `ChatCodec` sets it
        self.writes_calls = False  # the template omits calls, so that the format writes them into the content
        self.escaper = Escaper(tokenizer, placeholder)
        self.forms = MessageForms(self._rendered_or_none, lambda name, number: self.format.call_id(name, number))
        self._complete: set[Hashable] = set()  # shapes of conversations of which the template prints every message
        source = str(self.source or tokenizer.chat_template)
        if source not in _tried:
            check_rendering(self._longest_trial)
            _tried.add(source)

    def _longest_trial(self) -> int:
        """Render short conversations of every role. Returns the length of the longest text."""
        longest = 0
        for messages in TRIALS:
            for generation_prompt in (True, False):
                try:
                    longest = max(longest, len(self.raw_text([self.normal(m) for m in messages], generation_prompt)))
                except TemplateError as error:  # a template may refuse a role
                    if isinstance(error.__cause__, MemoryError):
                        raise error.__cause__ from None
        return longest

    @property
    def shows_tools(self) -> bool:
        """Whether a prompt names every tool with its parameters. The tiny tokenizer's template omits them on purpose
        unless `show_tools` is set."""
        prompt = self.raw_text([QUESTION], True)
        functions = [tool["function"] for tool in self.tools]
        names = [str(function["name"]) for function in functions]
        names += [str(name) for one in functions for name in (one.get("parameters") or {}).get("properties") or {}]
        on_purpose = "show_tools" in str(self.source or self.tokenizer.chat_template)
        return all(name in prompt for name in names) or (on_purpose and not self.kwargs.get("show_tools"))

    def text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """Render messages. Raises MessageLost if one is left out."""
        normal = self.normals(messages)
        return self.complete(normal, lambda some: self.raw_text(some, generation_prompt), generation_prompt)

    def complete(self, normal: Sequence[Message], render: Callable[[Sequence[Message]], str], key: Hashable) -> str:
        """`render(normal)`. Raises MessageLost if it lacks the text of a system, user or tool message. Short texts may
        occur by chance, so each new shape of conversation (`key` and the roles) is also rendered with unique texts."""
        text = render(normal)
        lost = lost_message(normal, text)
        shape = (key, tuple((m["role"], bool(m["content"]), bool(m.get("tool_calls"))) for m in normal))
        if lost is None and shape not in self._complete:
            marked = [_marked(m, f"rallymark{at}end") for at, m in enumerate(normal)]
            with contextlib.suppress(TemplateError):  # it may ask for a content that a mark is not
                lost = lost_message(marked, render(marked))
            if len(self._complete) >= MAX_SHAPES:
                self._complete.clear()
        if lost is not None:
            roles = ", ".join(str(m["role"]) for m in normal)
            raise MessageLost(
                f"the chat template does not print the whole text of message {lost + 1} ({normal[lost]['role']}) when "
                f"the roles are {roles}; use a template that does (custom_chat_template)"
            )
        self._complete.add(shape)
        return text

    def raw_text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """Render messages that are already normalized."""
        if not messages:
            raise TemplateError("there is no message to render; a conversation needs at least one")
        try:
            return self._renderer.text(messages, generation_prompt)
        except RENDERING_ERRORS as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            problem = str(error) or type(error).__name__
            raise TemplateError(f"the chat template cannot render the roles {roles}: {problem}") from error

    def tokens(self, text: str) -> list[int]:
        # A tool may print a lone surrogate, which no tokenizer accepts.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = self.tokenizer.encode(clean, add_special_tokens=False)
        return ids

    def normals(self, messages: Sequence[Message], after_calls: bool = False) -> list[Message]:
        """The messages in the form that the template takes. `after_calls`: a turn with calls is before them."""
        return self.forms.answered([self.normal(m) for m in self.with_ids(messages)], after_calls, self.writes_calls)

    def normal(self, message: Message) -> Message:
        """The message in the form that templates expect, with tool and user text escaped."""
        result = {key: value for key, value in message.items() if value is not None}
        result["content"] = self.observed(str(result.get("role")), content_of(message.get("content")))
        if result.get("role") == "assistant":
            result = self.forms.reply(result)
        calls = [_normal_call(call) for call in result.pop("tool_calls", ())]
        if calls and self.writes_calls and isinstance(result["content"], str):
            written = self._written(calls)
            result["content"] = f"{result['content']}\n{written}" if result["content"].strip() else written
        elif calls:
            result = self.forms.turn({**result, "tool_calls": [self._as_taken(call) for call in calls]}, self._written)
        if self.placeholder is None:
            return result
        return {key: v if key == "content" else self._without_placeholder(v) for key, v in result.items()}

    def _as_taken(self, call: dict[str, Any]) -> dict[str, Any]:
        """The call with its arguments as an object or, for templates that ask for it, as JSON text."""
        function = call["function"]
        if isinstance(function["arguments"], str) or not self.forms.json_text:
            return call
        return {**call, "function": {**function, "arguments": json.dumps(function["arguments"], ensure_ascii=False)}}

    def _written(self, calls: Sequence[Mapping[str, Any]]) -> str:
        return self.format.render([_tool_call(call) for call in calls])

    def _rendered_or_none(self, messages: Sequence[Message]) -> str | None:
        try:
            return self.raw_text(messages, False)
        except TemplateError:
            return None

    def with_ids(self, messages: Sequence[Message]) -> Sequence[Message]:
        """The messages with call ids that templates of this family accept. Mistral's are 9 letters and digits; Kimi's
        hold the name of the tool and a number that counts the calls of the whole conversation."""
        if self.format.accepts_id("call_0"):
            return messages
        result: list[Message] = []
        waiting: list[tuple[str, str]] = []  # ids of calls without an answer so far: as sent, and as rendered
        number = 0
        for message in messages:
            if calls := message.get("tool_calls"):
                waiting, renamed = [], []
                for call in calls:
                    given = str(call.get("id") or "")
                    name = str((call.get("function") or call).get("name", ""))
                    made = given if self.format.accepts_id(given) else self.format.call_id(name, number)
                    number += 1
                    waiting.append((given, made))
                    renamed.append({**call, "id": made})
                message = {**message, "tool_calls": renamed}
            elif message.get("role") == "tool":
                given = str(message.get("tool_call_id") or "")
                place = next((at for at, (sent, made) in enumerate(waiting) if given in (sent, made)), 0)
                made = waiting.pop(place)[1] if waiting else given
                if not self.format.accepts_id(made):
                    made = self.format.call_id(str(message.get("name") or "tool"), number)
                    number += 1
                message = {**message, "tool_call_id": made}
            result.append(message)
        return result

    def observed(self, role: str, content: Any) -> Any:
        """The content, with its control tokens escaped if a tool or a user wrote it."""
        escape = {"tool": self.escaper.tool, "user": self.escaper.user}.get(role, self.escaper.trusted)
        if isinstance(content, str):
            return escape(content).text
        return [{**p, "text": escape(p["text"]).text} if isinstance(p.get("text"), str) else p for p in content]

    def _without_placeholder(self, value: Any) -> Any:
        """Escape image placeholders in names, arguments, thinking and any other field that a template may print."""
        if isinstance(value, str):
            return self.escaper.trusted(value).text
        if isinstance(value, Mapping):
            inside = self._without_placeholder
            return {inside(key): inside(item) for key, item in value.items()}
        return [self._without_placeholder(item) for item in value] if isinstance(value, list) else value


def openai_shape(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """The tools in the {"type": "function"} wrapper that templates expect."""
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]


def content_of(content: Any) -> Any:
    """The content as text, or as a list of parts if it has images. None becomes empty text, and a list of text parts is
    joined. An image becomes a bare part, because templates only print a placeholder."""
    if content is None or isinstance(content, str):
        return content or ""
    if not isinstance(content, list):
        return json.dumps(content, ensure_ascii=False)
    if all(part.get("type") == "text" for part in content):
        return "".join(str(part["text"]) for part in content)
    return [{"type": "image"} if is_image(part) else part for part in content]


def _normal_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function") or call
    arguments = function.get("arguments") or {}
    if isinstance(arguments, str):
        # Arguments that are not JSON are rendered as text.
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    named = {"name": function.get("name", ""), "arguments": arguments}
    return {"id": call.get("id") or "call_0", "type": "function", "function": named}


def _tool_call(call: Mapping[str, Any]) -> ToolCall:
    """A normalized call for a format to write."""
    function = call["function"]
    arguments = function["arguments"]
    if isinstance(arguments, str):  # for a template that takes JSON text
        with contextlib.suppress(ValueError, RecursionError):
            arguments = json.loads(arguments)
    arguments = arguments if isinstance(arguments, dict) else {}
    return ToolCall(name=str(function["name"]), arguments=arguments, id=str(call["id"]))
