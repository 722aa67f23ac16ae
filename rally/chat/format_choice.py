"""Finds the tool-call format in which a chat template writes calls, by rendering a call and reading it back.

The call has an unusual name and arguments of every type. Of several formats that read it, the most specific one is
taken: the one that writes the call as the template does, or else the one whose marks the template contains.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple

from rally.chat.formats import FORMATS, ToolFormat, convert
from rally.chat.templates import QUESTION, Template, TemplateError, common_prefix
from rally.types import Message, ToolCall

Reading = Literal["exact", "as text", "plain words"]
READINGS: tuple[Reading, ...] = ("exact", "as text", "plain words")
TOOL_NAME = "rally_probe_7"
_TYPES = {"query": "string", "topk": "integer", "exact": "boolean", "tags": "array", "options": "object"}
PROPERTIES = {name: {"type": kind, "description": f"The {name}."} for name, kind in _TYPES.items()}
TOOL = {
    "type": "function",
    "function": {
        "name": TOOL_NAME,
        "description": "Looks something up.",
        "parameters": {"type": "object", "properties": PROPERTIES, "required": ["query"]},
    },
}
UNUSUAL: dict[str, Any] = {
    "query": 'blue "whales", it\'s <b>é & 5 > 3</b> [1]',
    "topk": 37,
    "exact": True,
    "tags": ["x y", 2],
    "options": {"deep": {"k": None}},
}
FLAT: dict[str, Any] = {"query": UNUSUAL["query"], "topk": 37, "exact": True}
WORDS: dict[str, Any] = {"query": "blue whales", "topk": 37}


class FormatFit(NamedTuple):
    """A format that reads the template's calls: `exact`; `as text`, where numbers, lists or objects are printed as
    text that the schema must convert; or `plain words`, where a text with quotes or commas cannot be read back."""

    format: ToolFormat
    reading: Reading


class FormatChoice(NamedTuple):
    """The formats that read what the template renders, the most specific first, and the rendering of a call. It is
    empty if the template omits calls; `described` are then the formats whose marks it contains. `refusal` is why the
    template renders no call."""

    fits: tuple[FormatFit, ...]
    rendered: str
    described: tuple[ToolFormat, ...] = ()
    refusal: str = ""

    def reading(self, tool_format: ToolFormat) -> Reading | None:
        return next((fit.reading for fit in self.fits if fit.format.name == tool_format.name), None)

    def problem(self, tool_format: ToolFormat, key: str) -> str:
        """Why calls cannot be read with this format, as a sentence that names the one that fits; empty if they can, or
        if the template shows no calls. `key` is the configuration key of the format."""
        if self.refusal:
            return f"{self.refusal}; use another template (custom_chat_template)"
        if not self.rendered or self.reading(tool_format) is not None:
            return ""
        shown = f"it writes {self.rendered.strip()[:200]!r}"
        if self.fits:
            fitting = self.fits[0].format.name
            return (
                f"{key}={tool_format.name} does not parse calls as the chat template renders them; set it to {fitting}"
            )
        return (
            f"no tool-call format reads calls as the chat template renders them ({shown}); use another template "
            f"(custom_chat_template), or write a format for it and name it in {key} (docs/chat.md)"
        )


_chosen: dict[str, FormatChoice] = {}


def choose_format(template: Template, also: ToolFormat | None = None) -> FormatChoice:
    """The formats that fit the template. `also` is a format that is not registered. Cached by template."""
    source = str(template.source or template.tokenizer.chat_template)
    key = json.dumps([source, template.kwargs, template.tokenizer.bos_token, list(FORMATS)], default=repr)
    if key not in _chosen:
        probe = Template(template.tokenizer, [TOOL], template.source, template.kwargs)
        _chosen[key] = _choice(probe, source, FORMATS.values())
    choice = _chosen[key]
    if also is not None and all(also is not one for one in FORMATS.values()):
        own = _choice(Template(template.tokenizer, [TOOL], template.source, template.kwargs), source, [also])
        return choice._replace(fits=(*choice.fits, *own.fits), rendered=choice.rendered or own.rendered)
    return choice


def _choice(template: Template, source: str, formats: Any) -> FormatChoice:
    texts: dict[tuple[str, str], str] = {}
    refusals: list[str] = []
    found: list[tuple[tuple[int, ...], FormatFit]] = []
    for place, one in enumerate(formats):
        for arguments, readings in ((UNUSUAL, READINGS[:2]), (FLAT, READINGS[:2]), (WORDS, READINGS[2:])):
            call_id = one.call_id(TOOL_NAME, 0)
            key = (call_id, json.dumps(arguments))
            if key not in texts:
                try:
                    texts[key] = rendered_call(template, arguments, call_id)
                except TemplateError as problem:
                    texts[key] = ""
                    refusals.append(str(problem))
            text = texts[key]
            reading = _read(one, text, arguments, readings) if TOOL_NAME in text else None
            if reading is not None:
                if arguments is FLAT and reading == "exact":
                    reading = "as text"  # lists or objects are not read
                written = one.render([ToolCall(name=TOOL_NAME, arguments=arguments, id=call_id)])
                likeness = 0 if written in text else 1 if _squeezed(written) in _squeezed(text) else 2
                marks = 1 if not one.marks else 0 if _all_marks(one, source) else 2
                plain = one.name == "plain"
                found.append(((READINGS.index(reading), plain, likeness, marks, place), FormatFit(one, reading)))
                break
    found.sort(key=lambda pair: pair[0])
    shown = next((text for text in texts.values() if TOOL_NAME in text), "")
    described = [] if shown else [one for one in formats if one.marks and _all_marks(one, source)]
    described.sort(key=lambda one: -sum(len(mark) for mark in one.marks))  # the most specific first
    refusal = refusals[0] if refusals and not shown else ""
    return FormatChoice(tuple(fit for _, fit in found), shown, tuple(described), refusal)


def _all_marks(one: ToolFormat, source: str) -> bool:
    return all(mark.strip() in source for mark in one.marks)


def _read(one: ToolFormat, text: str, arguments: dict[str, Any], readings: Sequence[Reading]) -> Reading | None:
    calls = one.parse(text, [TOOL]).calls
    if len(calls) != 1 or calls[0].error is not None or calls[0].name != TOOL_NAME:
        return None
    got = calls[0].arguments
    if got == arguments:
        return readings[0]
    converted = {key: convert(v, PROPERTIES.get(key, {})) if isinstance(v, str) else v for key, v in got.items()}
    return readings[-1] if converted == arguments else None


def rendered_call(template: Template, arguments: dict[str, Any], call_id: str) -> str:
    """The text that the template adds for a turn with this call. Raises TemplateError."""
    call = {"id": call_id, "type": "function", "function": {"name": TOOL_NAME, "arguments": arguments}}
    befores = [template.raw_text([QUESTION], prompted) for prompted in (True, False)]
    message: Message = template.normal({"role": "assistant", "content": "", "tool_calls": [call]})
    whole = template.raw_text([QUESTION, message], False)
    before = befores[0] if whole.startswith(befores[0]) else common_prefix(befores[1], whole)
    return whole[len(before) :]


def _squeezed(text: str) -> str:
    return "".join(text.split())
