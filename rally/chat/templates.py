"""Messages become the text that the model's own chat template gives them, the same text all day.

Whatever shape messages arrive in (content None, arguments as JSON text, empty tool_calls, the null fields of a parquet
row), the template sees the one shape that templates agree on.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

import jinja2
from transformers import PreTrainedTokenizerBase

from rally.images.loading import is_image
from rally.types import Message, RallyError


class TemplateError(RallyError):
    """The chat template cannot do what is asked of it."""


@dataclass(frozen=True)
class Escaped:
    """The text that is safe to render, and how many tokens were neutralised in it."""

    text: str
    count: int


class Escaper:
    """Knows one tokenizer's control tokens."""

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
        """Text of the system or the policy, whose control tokens are meant."""
        return _escape(text, self._placeholder)


def _any_of(tokens: set[str]) -> re.Pattern[str]:
    # A token of one character has no inside to put a space into; it is a letter, not a control token.
    words = sorted((t for t in tokens if len(t) > 1 and not t.isspace()), key=len, reverse=True)
    return re.compile("|".join(map(re.escape, words)) or r"(?!)")


def _escape(text: str, tokens: re.Pattern[str]) -> Escaped:
    total = 0
    while True:
        # Once more until nothing is left: breaking one token may leave another inside it.
        text, count = tokens.subn(lambda match: match[0][0] + " " + match[0][1:], text)
        if not count:
            return Escaped(text, total)
        total += count


SENTINEL = "rallysentinel"
QUESTION: Message = {"role": "user", "content": "question"}


class Template:
    """One tokenizer's chat template with one tool list; `text` and `tokens` are all there is to it."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        tools: Sequence[Mapping[str, Any]],
        chat_template: str | None,
        kwargs: Mapping[str, Any],
        placeholder: str | None = None,
    ) -> None:
        if chat_template is None and not tokenizer.chat_template:
            raise TemplateError("the tokenizer has no chat template; give one with chat_template=")
        self.tokenizer = tokenizer
        self.tools = openai_shape(tools)
        self.source = chat_template
        # A run over midnight must not change the date in its prompts: templates that print it ask for this name.
        self.kwargs = {"date_string": datetime.now().strftime("%d %b %Y"), **kwargs}
        self.placeholder = placeholder  # of images, where the policy sees them
        self.escaper = Escaper(tokenizer, placeholder)

    @property
    def knows_tools(self) -> bool:
        """Whether the template can show a list of tools at all; it may still be told not to."""
        return "tools" in str(self.source or self.tokenizer.chat_template)

    def text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self.raw_text([self.normal(m) for m in messages], generation_prompt)

    def raw_text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        """The rendering of messages that are in normal form already."""
        if not messages:
            raise TemplateError("there is no message to render; a conversation needs at least one")
        try:
            rendered = self.tokenizer.apply_chat_template(
                list(messages),
                tools=[*self.tools] or None,
                chat_template=self.source,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self.kwargs,
            )
        except (jinja2.TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
            roles = ", ".join(str(m.get("role")) for m in messages)
            raise TemplateError(f"the chat template cannot render the roles {roles}: {error}") from error
        assert isinstance(rendered, str)
        return rendered

    def tokens(self, text: str) -> list[int]:
        # Half a surrogate pair, which a tool may well print, is text that no tokenizer accepts.
        clean = text.encode("utf-8", "replace").decode("utf-8")
        ids: list[int] = self.tokenizer.encode(clean, add_special_tokens=False)
        return ids

    def normal(self, message: Message) -> Message:
        """The message as templates want it, observed text escaped."""
        result = {key: value for key, value in message.items() if value is not None}
        result["content"] = self.observed(str(result.get("role")), content_of(message.get("content")))
        calls = [_normal_call(call) for call in result.pop("tool_calls", ())]
        result = {**result, "tool_calls": calls} if calls else result
        if self.placeholder is None:
            return result
        return {key: v if key == "content" else self._without_placeholder(v) for key, v in result.items()}

    def observed(self, role: str, content: Any) -> Any:
        """Content with its control tokens neutralised where a tool or a user wrote it."""
        escape = {"tool": self.escaper.tool, "user": self.escaper.user}.get(role, self.escaper.trusted)
        if isinstance(content, str):
            return escape(content).text
        return [{**p, "text": escape(p["text"]).text} if isinstance(p.get("text"), str) else p for p in content]

    def _without_placeholder(self, value: Any) -> Any:
        """Names, arguments, thoughts and whatever else a template may print: none of it shows an image."""
        if isinstance(value, str):
            return self.escaper.trusted(value).text
        if isinstance(value, Mapping):
            inside = self._without_placeholder
            return {inside(key): inside(item) for key, item in value.items()}
        return [self._without_placeholder(item) for item in value] if isinstance(value, list) else value


def openai_shape(tools: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Tools in their {"type": "function"} wrapper, which templates expect; a bare function is given one."""
    return [dict(tool) if "function" in tool else {"type": "function", "function": dict(tool)} for tool in tools]


def content_of(content: Any) -> Any:
    """Text stays text, no content is empty text, and a list of only text parts is joined. An image becomes a bare part:
    templates print its place, and what it shows is not their business."""
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
        # What is not JSON is printed by the template as the text it is.
        with contextlib.suppress(ValueError):
            arguments = json.loads(arguments)
    named = {"name": function.get("name", ""), "arguments": arguments}
    return {"id": call.get("id") or "call_0", "type": "function", "function": named}
