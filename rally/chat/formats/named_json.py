"""Formats that write the tool's name between marks and its arguments as a JSON object.

DeepSeek, Kimi, Mistral (from v11 on), Functionary, Solar and gpt-oss do. Every mark that begins a call gives one,
malformed or not; so does a mark around all calls that has no call inside. A valid JSON value determines where the
arguments end, so that marks inside strings are text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import replace

from rally.chat.formats.base import CallKeys, FoundCall, Schemas, ToolFormat, argument_object, first_words, malformed
from rally.chat.formats.json_calls import JsonCalls, spaced
from rally.chat.formats.tolerant_json import read_json
from rally.types import ToolCall

_FENCE = re.compile(r"\s*```(?:json)?", re.IGNORECASE)
_CLUTTER = re.compile(r"[\s}]*(?:```)?")
_FIELD = re.compile(r"\{(name|id)\}")
_LOOSE_ID = re.compile(r"(?:functions\.)?(?P<name>[^\s:]+?)(?::\d*)?")  # without the prefix or the number
# The longest name or id. A limit keeps the search linear.
_FIELDS = {"name": r"(?P<name>[^<>\[\]{}\n]{0,200}?)", "id": r"(?P<id>[^<>\[\]{}\n]{0,200}?)"}


class NamedJson(ToolFormat):
    """`opening` has `{name}` or `{id}` where the tool's name and the call's id stand; the arguments follow, and then
    `closing`. `section` are the marks around all calls. An `id_pattern` finds the name in an id (Kimi)."""

    def __init__(
        self,
        name: str,
        opening: str,
        closing: str = "",
        *,
        section: tuple[str, str] = ("", ""),
        joint: str = "",
        id_pattern: str | None = None,
        not_tools: Sequence[str] = (),
    ) -> None:
        self.name, self.opening, self.closing, self.section = name, opening, closing, section
        self._joint, self._not_tools = joint, frozenset(not_tools)
        self._id_pattern = re.compile(id_pattern) if id_pattern else None
        first = _FIELD.split(opening)[0]
        # The mark that begins a call; a code word after it, as `function` in DeepSeek V3, may be missing.
        self._first = re.match(r"<[^<>]*>|\[[^\[\]]*\]|.*", first, re.DOTALL)[0].strip()  # type: ignore[index]
        self.marks = tuple(mark for mark in (section[0], self._first) if mark)
        self.begins = first_words(self._first, *section)
        pieces = _FIELD.split(opening)
        if not re.search(r"[<>\[]", pieces[-1]):
            pieces[-1] = ""  # the name ends where the arguments or a code fence begin
        header = "".join(_FIELDS[p] if at % 2 else _lenient(p) for at, p in enumerate(pieces))
        self._header = re.compile(header + ("" if pieces[-1] else r"(?=\s*(?:```(?:json)?\s*)?[{\[\"'])"))
        opens = [re.escape(self._first), *(re.escape(mark) for mark in section if mark)]
        self._start = re.compile("|".join(sorted(opens, key=len, reverse=True)))
        closes = [rf"\s*{spaced(part)}" for part in re.findall(r"<[^<>]*>|\[[^\[\]]*\]", closing)]
        self._end = re.compile("".join(f"(?:{close})?" for close in closes))
        self._section_end = re.compile(rf"\s*{spaced(section[1])}") if section[1] else None
        written = opening.replace("{name}", "tool name").replace("{id}", "call id")
        self.shape = f'{written}{{"parameter": "value"}}{closing}'.replace("\n", " ")

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        found: list[FoundCall] = []
        at, opened = 0, -1  # `opened`: where a section without a call so far begins
        while (start := self._start.search(text, at)) is not None:
            mark, at = start.group(), start.end()
            if mark == self.section[0] and mark != self._first:
                if opened >= 0:
                    found.append(self._empty(text, opened, start.start()))
                opened = start.start()
            elif mark == self.section[1] and mark != self._first:
                found.append(self._empty(text, opened if opened >= 0 else start.start(), at))
                opened = -1
            else:
                begin = (
                    opened if opened >= 0 and not text[opened + len(self.section[0]) : start.start()].strip() else -1
                )
                one = self._call_at(text, start.start(), schemas)
                if one is None:
                    continue
                if opened >= 0 and begin < 0:
                    found.append(self._empty(text, opened, start.start()))
                found.append(one if begin < 0 else one._replace(start=begin))
                opened, at = -1, max(one.end, at)
        if opened >= 0:
            found.append(self._empty(text, opened, len(text)))
        return found

    def _empty(self, text: str, start: int, end: int) -> FoundCall:
        reason = f"there is no call after {self.section[0]}"
        return FoundCall(start, end, malformed(reason, text[start:end], self.shape))

    def _call_at(self, text: str, start: int, schemas: Schemas) -> FoundCall | None:
        """The call that begins at `start`; None for what is no call, as Functionary's text for the user."""
        header = self._header.match(text, start)
        if header is None:
            stop = self._next(text, start + len(self._first))
            reason = f"its beginning is not {self.opening!r} with a name"
            return FoundCall(start, stop, malformed(reason, text[start:stop], self.shape))
        fields = header.groupdict()
        name, call_id = (fields.get("name") or "").strip(), (fields.get("id") or "").strip()
        if self._id_pattern is not None:
            inside = self._id_pattern.fullmatch(call_id) or _LOOSE_ID.fullmatch(call_id)
            name = inside["name"] if inside else ""
        if name in self._not_tools:
            return None
        return self._with_arguments(text, start, header.end(), name, call_id, schemas)

    def _with_arguments(self, text: str, start: int, at: int, name: str, call_id: str, schemas: Schemas) -> FoundCall:
        begin = fence.end() if (fence := _FENCE.match(text, at)) else at
        try:
            if not name:
                raise ValueError("it does not name a tool")
            value, end = read_json(text, begin)
            call = ToolCall(name=name, arguments=argument_object(value, schemas.get(name, {})), id=call_id)
        except ValueError as error:
            stop = self._next(text, begin)
            return FoundCall(start, stop, malformed(str(error), text[start:stop], self.shape, name))
        clutter = _CLUTTER.match(text, end)
        closing = self._end.match(text, clutter.end() if clutter else end)
        if closing is not None and closing.group():
            end = closing.end()
        if self._section_end is not None and (last := self._section_end.match(text, end)):
            end = last.end()
        return FoundCall(start, end, call)

    def _next(self, text: str, start: int) -> int:
        """Where a malformed call ends: after its closing marks, or before the next call."""
        following = self._start.search(text, start)
        stop = following.start() if following else len(text)
        if following and following.group() == self.section[1] and self.section[1]:
            return following.end()
        return stop

    def call_id(self, name: str, number: int) -> str:
        return f"functions.{name}:{number}" if self._id_pattern else super().call_id(name, number)

    def accepts_id(self, call_id: str) -> bool:
        return self._id_pattern is None or self._id_pattern.fullmatch(call_id) is not None

    def render(self, calls: Sequence[ToolCall]) -> str:
        written = []
        for number, call in enumerate(calls):
            call_id = call.id if call.id and self.accepts_id(call.id) else self.call_id(call.name, number)
            opening = self.opening.replace("{name}", call.name).replace("{id}", call_id)
            written.append(f"{opening}{json.dumps(call.arguments, ensure_ascii=False)}{self.closing}")
        return f"{self.section[0]}{self._joint.join(written)}{self.section[1]}" if written else ""


def _lenient(literal: str) -> str:
    """A pattern for the text between fields: whitespace, code words and code fences may be missing."""
    parts = re.findall(r"<[^<>]*>|\[[^\[\]]*\]|```\w*|\s+|[^<\[`\s]+|.", literal)
    return "".join(
        r"\s*" if part.isspace() else rf"(?:{re.escape(part)})?" if re.match(r"\w|`", part) else re.escape(part)
        for part in parts
    )


class Functionary(NamedJson):
    """Functionary v3.2: `>>>f` and the arguments on the next line. The generation prompt ends with the first mark."""

    def __init__(self, name: str, opening: str, *, not_tools: Sequence[str]) -> None:
        super().__init__(name, opening, not_tools=not_tools)
        self._start = re.compile(r">>>(?!all\n)(?=[\w.-]{1,200}\n)")  # and not a Python prompt
        self.begins = ()  # the first call has no mark of its own

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        if re.match(r"[\w.-]{1,200}\n\s*\{", text) is None:
            return super().find(text, schemas)
        shift = len(self._first)
        found = super().find(self._first + text, schemas)
        return [FoundCall(max(0, one.start - shift), max(0, one.end - shift), one.call) for one in found]


class Mistral(ToolFormat):
    """`[TOOL_CALLS]` and then a list with ids (v3 to v7), or for each call its name, id and arguments (v11), or name
    and arguments (v13). All are read; `layout` is what is written. Ids are 9 letters and digits."""

    marks = begins = ("[TOOL_CALLS]",)

    def __init__(self, name: str, layout: str) -> None:
        self.name = name
        self._list = JsonCalls(name, "[TOOL_CALLS]", layout="list", keys=CallKeys(id="id"))
        v11 = NamedJson(name, "[TOOL_CALLS]{name}[CALL_ID]{id}[ARGS]")
        v13 = NamedJson(name, "[TOOL_CALLS]{name}[ARGS]")
        self._named = (v11, v13, NamedJson(name, "[TOOL_CALLS]{name}"))
        self._writer: ToolFormat = {"list": self._list, "v11": v11, "v13": v13}[layout]
        if layout != "list":
            self.marks = ("[TOOL_CALLS]", *(("[CALL_ID]",) if layout == "v11" else ()), "[ARGS]")

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        found: list[FoundCall] = []
        at = text.find("[TOOL_CALLS]")
        while at >= 0:
            inside = at + len("[TOOL_CALLS]")
            if re.compile(r"\s*(?:```(?:json)?\s*)?[\[{]").match(text, inside) and not text.startswith(
                "[ARGS]", inside
            ):
                calls, end = self._list.read(text, inside, schemas)
                first = calls[0] if calls[1:] else replace(calls[0], raw=text[at:end])
                found += [FoundCall(at, end, first), *(FoundCall(end, end, call) for call in calls[1:])]
            else:
                named = next((one for one in self._named if one._header.match(text, at)), self._named[1])
                one = named._call_at(text, at, schemas)
                assert one is not None
                found.append(one)
                end = max(one.end, inside)
            at = text.find("[TOOL_CALLS]", end)
        return found

    def render(self, calls: Sequence[ToolCall]) -> str:
        numbered = (
            replace(call, id=call.id if self.accepts_id(call.id) else self.call_id(call.name, number))
            for number, call in enumerate(calls)
        )
        return self._writer.render(list(numbered))

    def call_id(self, name: str, number: int) -> str:
        return f"call{number % 100_000:05d}"

    def accepts_id(self, call_id: str) -> bool:
        return re.fullmatch(r"[A-Za-z0-9]{9}", call_id) is not None


class Harmony(ToolFormat):
    """gpt-oss: `<|channel|>commentary to=functions.f <|constrain|>json<|message|>{...}`. The recipient may stand before
    the channel. The turn then ends with `<|call|>`."""

    name = "harmony"
    marks = ("<|channel|>", "to=functions.")
    shape = '<|channel|>commentary to=functions.tool name <|constrain|>json<|message|>{"parameter": "value"}'
    _HEADER = re.compile(
        r"(?:<\|start\|>assistant)?[^\S\n]{0,20}(?:<\|channel\|>[^<>\n]{0,100}?)?\bto=functions\."
        r"(?P<name>[^\s<>]{0,200})(?P<rest>(?:(?!<\|message\|>|to=functions\.)[^\n]){0,200})(?P<end><\|message\|>)?"
    )
    _CLOSE = re.compile(r"\s*<\|call\|>(?=<\|start\|>assistant)")

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        found: list[FoundCall] = []
        at = 0
        while text.find("to=functions.", at) >= 0 and (header := self._HEADER.search(text, at)) is not None:
            name, at = header["name"], header.end()
            if header["end"] is None:
                call = malformed("<|message|> does not follow the recipient", header.group(), self.shape, name)
                found.append(FoundCall(header.start(), at, call))
                continue
            try:
                value, end = read_json(text, at)
                call = ToolCall(name=name, arguments=argument_object(value, schemas.get(name, {})))
                if not name:
                    raise ValueError("it does not name a tool")
                closing = self._CLOSE.match(text, end)
                at = closing.end() if closing else end
            except ValueError as error:
                following = re.compile(r"<\|(?:call|start|channel|end)\|>").search(text, at)
                at = following.start() if following else len(text)
                call = malformed(str(error), text[header.start() : at], self.shape, name)
            found.append(FoundCall(header.start(), at, call))
        return found

    def render(self, calls: Sequence[ToolCall]) -> str:
        return "<|call|><|start|>assistant".join(
            f"<|channel|>commentary to=functions.{call.name} <|constrain|>json<|message|>"
            f"{json.dumps(call.arguments, ensure_ascii=False)}"
            for call in calls
        )
