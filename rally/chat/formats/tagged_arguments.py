"""Formats that write each argument between tags as raw text, which the tool's schema turns into a value.

Qwen3-Coder is `<tool_call><function=N><parameter=K>value</parameter></function></tool_call>`; GLM, MiniMax, DeepSeek
V3.2, Seed-OSS, Step and others differ in the tags only. The tags around a call and at the end of a turn are optional.
A parameter cut off by the end of the turn makes the call malformed, since its value is incomplete. A closing tag inside
a value is text unless an argument or the end of the call follows it.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any, NamedTuple

from rally.chat.formats.base import FoundCall, Schemas, ToolFormat, convert, first_words, malformed
from rally.chat.formats.json_calls import spaced
from rally.chat.formats.tolerant_json import read_whole
from rally.types import ToolCall

_NAME = r"(?!/)[^<>\"\n]{0,200}?"
_JSON_TYPES = {str: "string", bool: "boolean", int: "number", float: "number", list: "array", dict: "object"}


class Tags(NamedTuple):
    """An opening and a closing tag. `{name}` and `{key}` stand for the names of the tool and the argument, `{string}`
    for `true` if the value is text and `false` if it is JSON, `{type}` for its JSON type, `{index}` for the number of
    the call."""

    opening: str
    closing: str


class Body(NamedTuple):
    """The arguments after a call's opening tag, and where they end."""

    arguments: dict[str, Any]
    end: int


class TaggedArguments(ToolFormat):
    """Calls of `call` tags with `argument` tags inside, in one `section` each or, with `shared`, one for all.

    `cdata`: a value may stand in a CDATA section. `padded`: one newline on either side of a value is not part of it.
    `lead` and `trail` are tags around a call that may be missing."""

    def __init__(
        self,
        name: str,
        call: Tags,
        argument: Tags,
        section: Tags = Tags("", ""),  # noqa: B008
        *,
        shared: bool = True,
        padded: bool = False,
        lead: str = "",
        trail: str = "",
        joint: str = "\n",
        cdata: bool = False,
    ) -> None:
        self.name, self.call, self.argument, self.section = name, call, argument, section
        self._cdata = cdata
        self._shared, self._padded, self._lead, self._trail, self._joint = shared, padded, lead, trail, joint
        self.marks = tuple(
            mark.strip()
            for mark in (section.opening, call.opening.split("{")[0], argument.opening.split("{")[0])
            if mark
        )
        self.begins = first_words(section.opening, section.closing, lead, call.opening)

    @property
    def shape(self) -> str:
        between = f" between {re.sub(r'[^A-Za-z_:]+', '', self.section.opening)} tags" if self.section.opening else ""
        call = _filled(self.call.opening, "tool name").strip()
        argument = _filled(self.argument.opening, key="name").strip()
        closing = _filled(self.argument.closing, key="name").strip()
        return f"{call}{argument}value{closing}{self.call.closing.strip()}{between}"

    @cached_property
    def _start(self) -> re.Pattern[str]:
        call, lead = _pattern(self.call.opening), rf"(?:{spaced(self._lead)}\s*)?" if self._lead else ""
        # Of a call whose name is not followed as it should be, only the tag is taken.
        loose = re.escape(self.call.opening.split("{name}")[0])
        options = [rf"{lead}{call}", rf"(?P<loose>{lead}{loose})"]
        if self.section.opening:
            options.insert(
                0, rf"{spaced(self.section.opening.strip())}(?:\s*{lead}{call.replace('<name>', '<first>')})?"
            )
            options.append(rf"(?P<stray>{spaced(self.section.closing.strip())})")
        return re.compile("|".join(options))

    @cached_property
    def _argument(self) -> re.Pattern[str]:
        return re.compile(rf"\s*{_pattern(self.argument.opening)}")

    @cached_property
    def _begins(self) -> str:
        """A pattern of what may follow a value: another argument, or the end of the call."""
        section = self.section.closing.strip()
        ends = [re.escape(text) for text in (self.call.closing.strip(), section) if text]
        return "|".join([_pattern(self.argument.opening, grouped=False), *ends])

    @cached_property
    def _close(self) -> re.Pattern[str]:
        closing = _pattern(self.argument.closing.strip(), grouped=False)
        return re.compile(rf"{closing}(?=\s*(?:{self._begins}|\Z))")

    @cached_property
    def _unclosed_end(self) -> re.Pattern[str]:
        starts = [re.escape(self.call.opening.split("{")[0])]
        starts += [re.escape(self.section.opening.strip())] if self.section.opening else []
        return re.compile(rf"(?P<inside>{self._begins})|{'|'.join(starts)}")

    @cached_property
    def _end(self) -> re.Pattern[str]:
        closings = [self.call.closing, self._trail, self.section.closing]
        return re.compile("".join(rf"\s*(?:{spaced(text.strip())})?" for text in closings if text))

    @cached_property
    def _next(self) -> re.Pattern[str]:
        starts = [text.split("{")[0].strip() for text in (self.section.opening, self._lead, self.call.opening) if text]
        closing = self.section.closing or self.call.closing
        return re.compile(rf"(?={'|'.join(map(re.escape, starts))})|{re.escape(closing.strip())}")

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        found: list[FoundCall] = []
        at, closes = 0, [match.span() for match in self._close.finditer(text)]
        while (start := self._start.search(text, at)) is not None:
            found.append(self._call_at(text, start, closes, schemas))
            at = max(found[-1].end, start.end())
        return found

    def _call_at(self, text: str, start: re.Match[str], closes: list[tuple[int, int]], schemas: Schemas) -> FoundCall:
        fields = start.groupdict()
        name = (fields.get("first") or fields.get("name") or "").strip()
        if not name:
            if fields.get("stray"):
                reason = f"{self.section.closing} without {self.section.opening} before it"
                return self._broken(text, start, start.end(), reason)
            before = self.section.opening.strip() or "its mark"
            return self._broken(
                text, start, None, f"no {_filled(self.call.opening, 'tool name').strip()} follows {before}"
            )
        try:
            body = self._body(text, start.end(), closes, schemas.get(name, {}))
        except ValueError as error:
            return self._broken(text, start, None, str(error), name)
        closing = self._end.match(text, body.end)
        assert closing is not None, "every part of it is optional"
        end = closing.end()
        if text[end : end + 200].strip() and not closing.group().strip():
            expected = f"expected {_filled(self.argument.opening, key='name').strip()} or {self.call.closing.strip()}"
            return self._broken(text, start, None, f"{expected} at {text[end : end + 200].strip()[:20]!r}", name)
        return FoundCall(start.start(), end, ToolCall(name=name, arguments=body.arguments))

    def _body(self, text: str, at: int, closes: list[tuple[int, int]], schema: Mapping[str, Any]) -> Body:
        arguments: dict[str, Any] = {}
        properties = schema.get("properties") or {}
        while (opening := self._argument.match(text, at)) is not None:
            key, start = opening["key"].strip(), opening.end()
            place = bisect_left(closes, (start, 0))
            if place < len(closes):
                stop, at = closes[place]
            else:
                stop = at = self._end_of_unclosed(text, start, key)
            value = text[start:stop]
            if self._padded:
                value = value.removeprefix("\n").removesuffix("\n")
            if self._cdata and value.startswith("<![CDATA[") and value.endswith("]]>"):
                value = value[len("<![CDATA[") : -len("]]>")]
            fields = opening.groupdict()
            kind = "true" if fields.get("type") == "string" else "false" if fields.get("type") else fields.get("string")
            arguments[key] = self._value(value, kind, properties.get(key, {}))
        return Body(arguments, at)

    def _value(self, value: str, string: str | None, schema: Mapping[str, Any]) -> Any:
        if string == "true":
            return value
        if string == "false":
            try:
                return read_whole(value)
            except ValueError:
                return value
        return convert(value, schema)

    def _end_of_unclosed(self, text: str, start: int, key: str) -> int:
        """Where a value without its closing tag ends: at the next argument or the end of its call. Else ValueError."""
        following = self._unclosed_end.search(text, start)
        if following is None or following["inside"] is None:
            raise ValueError(f"the value of parameter {key!r} is not closed with {self.argument.closing.strip()}")
        return following.start()

    def _broken(self, text: str, start: re.Match[str], end: int | None, reason: str, name: str = "") -> FoundCall:
        if end is None:
            following = self._next.search(text, start.end())
            end = following.end() if following else len(text)
        return FoundCall(start.start(), end, malformed(reason, text[start.start() : end], self.shape, name))

    def render(self, calls: Sequence[ToolCall]) -> str:
        written = [self._rendered(call, number) for number, call in enumerate(calls, start=1)]
        if self._shared and self.section.opening:
            return f"{self.section.opening}{self._joint.join(written)}{self.section.closing}" if written else ""
        return self._joint.join(f"{self.section.opening}{one}{self.section.closing}" for one in written)

    def _rendered(self, call: ToolCall, number: int) -> str:
        margin = "\n" if self._padded else ""
        arguments = ""
        for key, value in call.arguments.items():
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            opening, closing = (_filled(tag, key=key, value=value) for tag in self.argument)
            arguments += f"{opening}{margin}{text}{margin}{closing}"
        opening = _filled(self.call.opening, call.name).replace("{index}", str(number))
        return f"{self._lead}{opening}{arguments}{self.call.closing}{self._trail}"


def _filled(tag: str, name: str = "", key: str = "", value: Any = "") -> str:
    string, kind = "true" if isinstance(value, str) else "false", _JSON_TYPES.get(type(value), "null")
    filled = tag.replace("{name}", name).replace("{key}", key)
    return filled.replace("{string}", string).replace("{type}", kind)


def _pattern(tag: str, grouped: bool = True) -> str:
    """A pattern for a tag with its fields. Whitespace may differ."""
    parts = re.split(r"\{(name|key|string|type|index)\}", tag)
    fields = {"string": "true|false", "type": "[a-z]+", "index": r"\d*", "name": _NAME, "key": _NAME}
    written = [
        (rf"(?P<{part}>{fields[part]})" if grouped and part != "index" else rf"(?:{fields[part]})")
        if at % 2
        else spaced(part)
        for at, part in enumerate(parts)
    ]
    # A name at the end of its tag ends where something else begins.
    return "".join(written) + ("" if parts[-1].strip() else r"(?=\s|<|\Z)")
