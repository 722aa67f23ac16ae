"""Calls a tokenizer's chat template, with the inputs that the template takes.

Templates are rendered by the tokenizer (transformers). A sandbox of our own is used where transformers cannot: for
templates that read the clock, since equal messages must give equal text for the whole run, and for templates that
change their own lists or print generators, as llama.cpp's templates do. It renders everything else alike.
Which form the tool list has (OpenAI's, or bare functions), and whether the tools must be passed as the text
`functions`, is found by rendering a question.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from functools import cached_property, lru_cache
from types import GeneratorType
from typing import Any, NoReturn

import jinja2
import jinja2.sandbox
from transformers import PreTrainedTokenizerBase

from rally.types import Message

RENDERING_ERRORS = (
    *(jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, ArithmeticError),
    *(RecursionError, MemoryError, SyntaxError),  # the last for Python that a template becomes
)
STARTED = datetime.now()  # what templates print as the time of the conversation
_QUESTION: list[Message] = [{"role": "user", "content": "question"}]
_THINKING_NAMES = ("reasoning_content", "thinking", "reasoning")


class TemplateRenderer:
    """A chat template with one tool list. Errors of the template are raised as they are (RENDERING_ERRORS)."""

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        source: str | None,
        tools: Sequence[Mapping[str, Any]],
        kwargs: Mapping[str, Any],
    ) -> None:
        self._tokenizer, self._source, self._tools, self._kwargs = tokenizer, source, tools, kwargs
        self._own_sandbox = "strftime_now" in str(source or tokenizer.chat_template)

    def text(self, messages: Sequence[Message], generation_prompt: bool) -> str:
        return self._text(messages, generation_prompt, self._inputs)

    def _text(self, messages: Sequence[Message], generation_prompt: bool, inputs: Mapping[str, Any]) -> str:
        if not self._own_sandbox:
            try:
                rendered = self._tokenizer.apply_chat_template(
                    list(messages),
                    chat_template=self._source,
                    add_generation_prompt=generation_prompt,
                    tokenize=False,
                    **inputs,
                )
                assert isinstance(rendered, str)
                return rendered
            except jinja2.exceptions.SecurityError as error:
                if "'list' object is unsafe" not in str(error):
                    raise
            except TypeError as error:
                if "generator is not JSON serializable" not in str(error):
                    raise
            self._own_sandbox = True
        return self._sandboxed(messages, generation_prompt, inputs)

    @cached_property
    def _inputs(self) -> dict[str, Any]:
        """The tools and variables with which the template renders a question; those of OpenAI if none does."""
        functions = [tool.get("function", tool) for tool in self._tools]
        usual = {**self._kwargs, "tools": [*self._tools] or None}
        named = {"functions": json.dumps(functions, indent=4), "datetime": STARTED.strftime("%Y-%m-%d %H:%M:%S")}
        open_objects = {**usual, "tools": [_with_open_objects(tool) for tool in self._tools] or None}
        for inputs in (usual, {**usual, "tools": functions or None}, {**named, **usual}, open_objects):
            try:
                self._text(_QUESTION, True, inputs)
                return inputs
            except RENDERING_ERRORS:
                continue
        return usual

    def _sandboxed(self, messages: Sequence[Message], generation_prompt: bool, inputs: Mapping[str, Any]) -> str:
        source = self._tokenizer.get_chat_template(self._source, inputs["tools"])
        data = {**self._tokenizer.special_tokens_map, **inputs, "add_generation_prompt": generation_prompt}
        return _compiled(source).render(messages=[_plain(_aliased(m)) for m in messages], **_plain(data))


def _aliased(message: Message) -> Message:
    """The message with its thinking under the names that templates read, as transformers passes it."""
    thinking = next((message[name] for name in _THINKING_NAMES if message.get(name) is not None), None)
    return message if thinking is None else {"thinking": thinking, **message, "reasoning_content": thinking}


def _with_open_objects(schema: Any) -> Any:
    """The schema in which objects say that they may have other properties, as they may without saying so."""
    if isinstance(schema, Mapping):
        inside = {key: _with_open_objects(value) for key, value in schema.items()}
        return (
            {**inside, "additionalProperties": schema.get("additionalProperties", {})}
            if (schema.get("type") == "object")
            else inside
        )
    return [_with_open_objects(item) for item in schema] if isinstance(schema, list) else schema


def _plain(value: Any) -> Any:
    """A copy that has only JSON types, so that a template can neither change nor call what it is given."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if value is None or type(value) in (str, int, float, bool):
        return value
    return str(value) if isinstance(value, str) else f"<{type(value).__name__}>"


@lru_cache(maxsize=64)
def _compiled(source: str) -> jinja2.Template:
    # Lists may change: they are the template's own, or copies.
    sandbox = jinja2.sandbox.SandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    sandbox.filters["tojson"] = _tojson
    sandbox.globals |= {"raise_exception": _raise, "strftime_now": STARTED.strftime}
    return sandbox.from_string(source)


def _raise(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def _tojson(value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, **options: Any) -> str:
    value = list(value) if isinstance(value, GeneratorType) else value
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, **options)
