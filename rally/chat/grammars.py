"""Writes the grammars of constrained decoding, in llguidance's variant of Lark.

A grammar describes the whole turn up to its end: a JSON value of a schema, tool calls in the format of the chat
template, or either. The arguments of a call are constrained by the tool's parameters. Formats that do not write the
arguments of a call as one JSON object cannot be constrained, which is an error in one sentence.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from transformers import PreTrainedTokenizerBase

from rally.chat.codec import ChatCodec
from rally.chat.formats.base import schemas_of
from rally.chat.templates import TemplateError
from rally.types import MAX_GRAMMAR, Message, RallyError, ToolCall

MAX_SCHEMA = 2**16  # characters of one schema as JSON
MAX_TOOLS = 128  # tools of a request that forces calls
JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
"""One line, as json.dumps writes it: free white space would let a generation go on forever without content."""
ANY_OBJECT: Mapping[str, Any] = {"type": "object"}
_PROBE = {"rally_probe": 0}
_ANY = r"(.|\n)*"

Choice = Literal["auto", "required"]


class ConstraintError(RallyError):
    """A constraint that cannot be written as a grammar."""


@dataclass(frozen=True, kw_only=True)
class Constraint:
    """What a turn must be. `schema` constrains the text of an answer. `choice`: a turn may be text or calls (auto), or
    must be calls. `only` is the one tool that may be called. `parallel`: a turn may have several calls."""

    schema: Mapping[str, Any] | None = None
    choice: Choice = "auto"
    only: str | None = None
    parallel: bool = True

    def binds(self, tools: Sequence[Mapping[str, Any]]) -> bool:
        """Whether it constrains anything."""
        return self.schema is not None or self.choice == "required" or (bool(tools) and not self.parallel)


class CallFrame(NamedTuple):
    """The text of a call around its arguments: before them in the first and in a later call (None: there can be only
    one), and after the last."""

    first: str
    later: str | None
    end: str


def call_frame(codec: ChatCodec, name: str) -> CallFrame | None:
    """How the chat template, or else the tool-call format, writes a call of a tool; None if the arguments are not one
    JSON object there."""
    call = ToolCall(name=name, arguments=_PROBE, id=codec.format.call_id(name, 0))
    arguments = json.dumps(_PROBE)
    for write in (lambda calls: _templated(codec, calls), codec.format.render):
        try:
            once, twice = (write([call] * count).split(arguments) for count in (1, 2))
        except TemplateError:
            continue
        if len(once) == 2 and _reads(codec, once, name):
            several = len(twice) == 3 and (once[0], once[1]) == (twice[0], twice[2])
            return CallFrame(once[0], twice[1] if several else None, once[1])
    return None


def _templated(codec: ChatCodec, calls: Sequence[ToolCall]) -> str:
    """The calls of a turn as the chat template writes them."""
    functions = [{"name": call.name, "arguments": call.arguments} for call in calls]
    written = [{"id": call.id, "type": "function", "function": f} for call, f in zip(calls, functions, strict=True)]
    return _turn_text(codec, {"role": "assistant", "content": "", "tool_calls": written})


def _turn_text(codec: ChatCodec, message: Message) -> str:
    ids = codec.encode_assistant(message)
    return codec.decode(ids[:-1] if ids and ids[-1] in codec.stop_ids else ids)


def _reads(codec: ChatCodec, frame: Sequence[str], name: str) -> bool:
    """Whether the format reads a call in this frame as it was written."""
    text = frame[0] + json.dumps(_PROBE) + frame[1]
    calls = codec.format.parse(text, codec.tools).calls
    return [(call.name, call.arguments, call.error) for call in calls] == [(name, _PROBE, None)]


def answer_prefix(codec: ChatCodec) -> str:
    """What the chat template writes before an answer, such as an empty thinking block."""
    try:
        text = _turn_text(codec, {"role": "assistant", "content": "0"})
    except TemplateError:
        return ""
    return text[:-1] if text.endswith("0") else ""


def grammar_of(constraint: Constraint, codec: ChatCodec) -> str:
    """The grammar of a turn; empty if the constraint allows everything. Raises ConstraintError."""
    tools = codec.tools
    if not constraint.binds(tools):
        return ""
    schemas = schemas_of(tools)
    if constraint.only is not None:
        if constraint.only not in schemas:
            raise ConstraintError(f"tool_choice names {constraint.only}, which is not among the tools; offer it")
        schemas = {constraint.only: schemas[constraint.only]}
    if constraint.choice == "required" and not schemas:
        raise ConstraintError("tool_choice=required needs tools; send some, or leave it out")
    if len(schemas) > MAX_TOOLS:
        raise ConstraintError(f"calls can be enforced over at most {MAX_TOOLS} tools, not {len(schemas)}; send fewer")
    rules = _Rules(codec.tokenizer)
    several = constraint.parallel and constraint.only is None
    if constraint.choice == "required":
        return rules.written(_calls(codec, schemas, rules, several))
    if constraint.schema is None:
        return rules.written(_text_or_calls(codec, schemas, rules, several))
    answer = f"{rules.literal(answer_prefix(codec))} {rules.json(constraint.schema)}".strip()
    calls = [_calls(codec, schemas, rules, several)] if schemas else []
    return rules.written(" | ".join([rules.add("answer", answer), *calls]))


def _text_or_calls(codec: ChatCodec, schemas: Mapping[str, Mapping[str, Any]], rules: _Rules, several: bool) -> str:
    """Text, and then calls or none. The text ends where the first mark of a call does: the library reads text greedily,
    so that it could not give a mark back."""
    tool_format = codec.format
    marks = [mark.strip() for mark in tool_format.marks if mark.strip()]
    if not marks:
        raise ConstraintError(
            f"the tool-call format {tool_format.name} has no mark that begins a call, so parallel_tool_calls=false "
            "cannot be enforced; leave it out, or set tool_choice=required"
        )
    spelled = [mark for mark in marks if rules.special(mark) is None]
    excluded = "".join(f" & ~/{_ANY}{_pattern(mark)}{_ANY}/" for mark in spelled)
    rules.add("TEXT", f"/{_ANY}/{excluded}")
    text = rules.add("text", "TEXT")
    if not spelled or spelled[0] != marks[0]:  # a special token, which is never part of a text
        return f"{text} | {text} {_calls(codec, schemas, rules, several)}"
    opened = rules.add("opened[lazy]", f"/{_ANY}{_pattern(marks[0])}/").removesuffix("[lazy]")
    return f"{text} | {opened} {_calls(codec, schemas, rules, several, after=marks[0])}"


def _calls(
    codec: ChatCodec, schemas: Mapping[str, Mapping[str, Any]], rules: _Rules, several: bool, after: str = ""
) -> str:
    """The calls of a turn; of the first only what follows the mark `after`."""
    firsts, laters, end = [], [], ""
    for number, (name, schema) in enumerate(schemas.items()):
        frame = call_frame(codec, name)
        if frame is None:
            raise ConstraintError(
                f"the tool-call format {codec.format.name} does not write the arguments of a call as one JSON object, "
                "so a call cannot be enforced; use tool_choice=auto, and leave parallel_tool_calls out"
            )
        arguments = rules.add(f"arguments_{number}", rules.json({**ANY_OBJECT, **schema}))
        firsts.append(f"{rules.literal(frame.first.partition(after)[2] if after else frame.first)} {arguments}")
        several = several and frame.later is not None
        laters.append(f"{rules.literal(frame.later or '')} {arguments}")
        end = frame.end
    first = rules.add("first_call", " | ".join(firsts))
    more = f" {rules.add('later_call', ' | '.join(laters))}*" if several else ""
    ending = f" {rules.literal(end)}" if end else ""
    return rules.add("calls", f"{first}{more}{ending}")


class _Rules:
    """The rules of a grammar, in the order added."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        added = tokenizer.added_tokens_decoder
        self._special = {token.content: i for i, token in added.items() if token.special}
        self._rules: dict[str, str] = {}

    def add(self, name: str, rule: str) -> str:
        self._rules[name] = rule
        return name

    def written(self, start: str) -> str:
        grammar = "\n".join(f"{name}: {rule}" for name, rule in {"start": start, **self._rules}.items())
        if len(grammar) > MAX_GRAMMAR:
            raise ConstraintError(
                f"the schemas of a request have {len(grammar)} characters, and {MAX_GRAMMAR} are the most; shorten them"
            )
        return grammar

    def special(self, text: str) -> int | None:
        """The special token that begins the text; it cannot be part of other text."""
        return next((i for token, i in self._special.items() if text.startswith(token)), None)

    def json(self, schema: Mapping[str, Any]) -> str:
        try:
            written = json.dumps({**schema, "x-guidance": JSON_STYLE}, allow_nan=False)
        except (ValueError, TypeError, RecursionError) as problem:
            raise ConstraintError(f"the schema is no JSON ({problem}); correct it") from None
        if len(written) > MAX_SCHEMA:
            raise ConstraintError(
                f"the schema has {len(written)} characters, and {MAX_SCHEMA} are the most; shorten it"
            )
        return f"%json {written}"

    def literal(self, text: str) -> str:
        """The text, in which special tokens are tokens."""
        parts: list[str] = []
        plain = ""
        while text:
            token = next((token for token in self._special if text.startswith(token)), None)
            if token is None:
                plain, text = plain + text[0], text[1:]
                continue
            parts += [*([json.dumps(plain)] if plain else []), f"<[{self._special[token]}]>"]
            plain, text = "", text[len(token) :]
        return " ".join([*parts, *([json.dumps(plain)] if plain else [])])


def _pattern(text: str) -> str:
    """A regular expression for the text."""
    return "".join(f"\\{char}" if char in r".^$*+?()[]{}|\/-&~" else char for char in text)
