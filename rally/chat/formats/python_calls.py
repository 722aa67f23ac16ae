"""Formats that write calls as Python: `[search(query="x", topk=3)]`.

Llama 4, Llama 3.2, LFM2 and OLMo 3 do, with or without marks around them. Arguments are literals, read with `ast` and
never evaluated; JSON's `true`, `false` and `null` are accepted. Without marks, a call must stand in a list at the
beginning of a line.
"""

from __future__ import annotations

import ast
import contextlib
import functools
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from rally.chat.formats.base import FoundCall, Schemas, ToolFormat, malformed
from rally.chat.formats.json_calls import JsonCalls, spaced
from rally.chat.formats.plain_call import positional_names
from rally.chat.formats.tolerant_json import read_whole
from rally.types import ToolCall

_CALL = re.compile(r"\s*([A-Za-z_][\w.-]{0,200})\(")
# At the beginning of a line, or after Llama 3's mark. Lists of known tools are found anywhere.
_BARE = r"(?:\A|(?<=\n)|(?<=<\|python_tag\|>))[^\S\n]*\[\s*[A-Za-z_][\w.-]{0,200}\("
_KEYWORD = re.compile(r"\s*([^\W\d][\w.-]*)\s*=(?!=)")
_TOKEN = re.compile(r"'''|\"\"\"|['\"\[\](){},\n]")
_STRING = {
    quote: re.compile(
        rf"(?:[^\\{quote[0]}]|\\.|{quote[0]}(?!{quote[1:]}))*?{quote}"
        if quote[1:]
        else rf"(?:[^\\{quote}]|\\.)*{quote}",
        re.DOTALL,
    )
    for quote in ("'''", '"""', "'", '"')
}
_CLOSERS = {"(": ")", "[": "]", "{": "}"}
_WORDS = {"true": True, "false": False, "null": None}
MAX_DEPTH = 64
MAX_BROKEN = 100
MAX_LITERAL = 1_000_000
MAX_PARAMETERS = 64


class SplitArguments(NamedTuple):
    """Arguments split at the commas outside brackets and strings, and the position after the closing bracket."""

    parts: list[str]
    end: int


class PythonCalls(ToolFormat):
    """Calls in one list after `opening`, or with `lines` one on each line. A `bare` list is read and written without
    the marks; they are read too."""

    shape = "[tool_name(parameter='value')]"

    def __init__(self, name: str, opening: str, closing: str, *, lines: bool = False, bare: bool = False) -> None:
        self.name, self.opening, self.closing = name, opening, closing
        self.marks = () if bare else (opening,)
        self._lines, self._bare = lines, bare
        self.shape = "tool_name(parameter='value')" if lines else type(self).shape
        self._starts = functools.lru_cache(maxsize=16)(self._start_of)
        self._close = re.compile(rf"\s*{spaced(closing)}")
        self._json = JsonCalls(name, opening, closing, layout="list")

    def _start_of(self, tools: tuple[str, ...]) -> re.Pattern[str]:
        """A pattern of the marks and, if it is bare, of a list of calls."""
        options = [rf"(?P<open>{spaced(self.opening)})", rf"(?P<close>{spaced(self.closing)})"]
        if self._bare:
            known = rf"|(?<![\w\])])\[\s*(?:{'|'.join(map(re.escape, tools))})\(" if tools else ""
            options.append(rf"(?P<bare>{_BARE}{known})")
        return re.compile("|".join(options))

    def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
        found: list[FoundCall] = []
        at = broken = 0
        starts = self._starts(tuple(schemas))
        while (start := starts.search(text, at)) is not None:
            if broken > MAX_BROKEN:  # each may read to the end of the text
                reason = f"more than {MAX_BROKEN} calls cannot be read"
                return [*found, FoundCall(at, len(text), malformed(reason, text[at:], self.shape))]
            if start.lastgroup == "close":
                reason = f"{self.closing} without {self.opening} before it"
                found.append(FoundCall(start.start(), start.end(), malformed(reason, start.group(), self.shape)))
            else:
                begin = start.start() if start.lastgroup == "bare" else start.end()
                found += self._calls(text, start.start(), begin, start.lastgroup == "bare", schemas)
            broken += found[-1].call.error is not None
            at = max(found[-1].end, start.end())
        return found

    def _calls(self, text: str, start: int, begin: int, bare: bool, schemas: Schemas) -> list[FoundCall]:
        """The calls after an opening mark, or of a bare list."""
        listed = re.compile(r"\s*(\[)?\s*").match(text, begin)
        assert listed is not None
        if not bare and text.startswith(("{", "["), listed.end()):
            calls, end = self._json.read(text, begin, schemas)
            return [FoundCall(start, end, calls[0]), *(FoundCall(end, end, call) for call in calls[1:])]
        found: list[FoundCall] = []
        at = listed.end()
        while (opening := _CALL.match(text, at)) is not None:
            first = start if not found else opening.start(1)
            try:
                split = split_arguments(text, opening.end())
            except ValueError as error:
                end = self._broken_end(text, opening.end(), schemas)
                found.append(FoundCall(first, end, malformed(str(error), text[first:end], self.shape, opening[1])))
                return found
            raw = text[opening.start(1) : split.end]
            try:
                call = ToolCall(
                    name=opening[1], arguments=arguments_of(split.parts, schemas.get(opening[1], {})), raw=raw
                )
            except ValueError as error:
                call = malformed(str(error), raw, self.shape, opening[1])
            after = re.compile(r"\s*[,;]?").match(text, split.end)
            at = after.end() if after else split.end
            found.append(FoundCall(first, at if _CALL.match(text, at) else split.end, call))
        if not found:
            end = self._broken_end(text, at, schemas)
            problem = malformed("expected tool_name(parameter='value')", text[start:end], self.shape)
            return [FoundCall(start, end, problem)]
        closing = re.compile(r"[\s,;]*\]?").match(text, at) if listed[1] else None
        end = closing.end() if closing and closing.group().strip() else found[-1].end
        if not bare and (last := self._close.match(text, end)):
            end = last.end()
        elif not bare:
            stop = self._broken_end(text, end, schemas)
            if shown := text[end:stop].strip():
                problem = malformed(f"expected a call at {shown[:20]!r}", shown, self.shape)
                return [*found, FoundCall(end, stop, problem)]
        found[-1] = found[-1]._replace(end=end)
        return found

    def _broken_end(self, text: str, at: int, schemas: Schemas) -> int:
        """Where a malformed part ends: after the closing mark, before the next opening mark, or at the end."""
        following = self._starts(tuple(schemas)).search(text, at)
        if following is None:
            return len(text)
        return following.end() if following.lastgroup == "close" else following.start()

    def render(self, calls: Sequence[ToolCall]) -> str:
        written = [f"{call.name}({', '.join(f'{k}={v!r}' for k, v in call.arguments.items())})" for call in calls]
        if not written:
            return ""
        if self._lines:
            return f"{self.opening}{chr(10).join(written)}{self.closing}"
        listed = f"[{', '.join(written)}]"
        return listed if self._bare else f"{self.opening}{listed}{self.closing}"


def split_arguments(text: str, start: int) -> SplitArguments:
    """Split at the commas of a call whose opening bracket is before `start`. Raises ValueError."""
    parts: list[str] = []
    begin, waiting, at = start, [")"], start
    while (token := _TOKEN.search(text, at)) is not None:
        at, mark = token.end(), token.group()
        if mark[0] in "'\"":
            if text[token.start() - 1].isalnum() and text[token.start() - 1] not in "rbfuRBFU":
                at = token.start() + 1  # an apostrophe, as in "it's", opens no string
                continue
            if mark[1:] and text.startswith(mark[0] * 2, token.start()) and not _STRING[mark].match(text, at):
                at, mark = token.start() + 1, mark[0]
            string = _STRING[mark].match(text, at)
            if string is None:
                raise ValueError("a string is not closed")
            at = string.end()
        elif mark in _CLOSERS:
            if len(waiting) > MAX_DEPTH:
                raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
            waiting.append(_CLOSERS[mark])
        elif mark == waiting[-1]:
            waiting.pop()
            if not waiting:
                last = text[begin : token.start()]
                return SplitArguments([*parts, last] if last.strip() else parts, at)
        elif mark == "," and len(waiting) == 1:
            parts.append(text[begin : token.start()])
            begin = at
        elif mark in ")]}":
            raise ValueError(f"expected {waiting[-1]!r} and not {mark!r}")
    raise ValueError("its bracket is not closed")


def arguments_of(parts: Sequence[str], schema: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments by name; one without a name gets that of its place in the schema. Raises ValueError."""
    properties, names = schema.get("properties") or {}, positional_names(schema)
    arguments: dict[str, Any] = {}
    for place, part in enumerate(parts):
        keyword = _KEYWORD.match(part)
        if keyword is None and place >= len(names):
            raise ValueError(f"it has no parameter for {part.strip()[:40]!r}")
        name = keyword[1] if keyword else names[place]
        text = part[keyword.end() :] if keyword else part
        together = None
        with contextlib.suppress(ValueError):
            together = {name: _literal(text, name, {})}
        together = together or _without_commas(text, name, properties)
        arguments |= together or {name: _literal(text, name, properties.get(name, {}))}
    return arguments


def _without_commas(text: str, name: str, properties: Mapping[str, Any]) -> dict[str, Any] | None:
    """The arguments in `"x"topk=3exact=true`, as a chat template of Gemma 3 writes them; None if it is something else.
    Only known parameters are separated so, and only where a literal ends."""
    names = "|".join(re.escape(one) for one in sorted(properties, key=len, reverse=True) if one != name)
    starts = list(re.finditer(rf"({names})=(?!=)", text))[:MAX_PARAMETERS] if names else []
    for start in starts:
        with contextlib.suppress(ValueError):
            value = _literal(text[: start.start()], name, {})
            later, rest = start[1], text[start.end() :]
            try:
                return {name: value, later: _literal(rest, later, {})}
            except ValueError:
                left = {key: schema for key, schema in properties.items() if key != name}
                together = _without_commas(rest, later, left)
                if together is not None:
                    return {name: value, **together}
    return None


def _literal(text: str, name: str, schema: Mapping[str, Any]) -> Any:
    text = text.strip()
    try:
        if len(text) > MAX_LITERAL:
            raise ValueError
        return _value(ast.parse(text, mode="eval").body, 0)
    except (SyntaxError, ValueError, RecursionError, MemoryError, TypeError):
        with contextlib.suppress(ValueError):  # raw newlines in a string, as JSON's reader accepts them
            return read_whole(text)
        if schema.get("type") == "string" and text and not re.search(r"['\"\[\](){}]", text):
            return text  # without quotes, as some models write single words
        raise ValueError(f"the value of {name} is no literal: {text[:40]!r}") from None


def _value(node: ast.expr, depth: int) -> Any:
    """The value of a literal. Raises ValueError for everything that would have to be computed."""
    if depth > MAX_DEPTH:
        raise ValueError
    if isinstance(node, ast.Constant) and (node.value is None or isinstance(node.value, bool | int | float | str)):
        return node.value
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item, depth + 1) for item in node.elts]
    if isinstance(node, ast.Dict):
        keys = [_value(key, depth + 1) for key in node.keys if key is not None]
        if len(keys) != len(node.values) or not all(isinstance(key, str) for key in keys):
            raise ValueError
        return dict(zip(keys, (_value(value, depth + 1) for value in node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        number = _value(node.operand, depth + 1)
        if isinstance(number, int | float) and not isinstance(number, bool):
            return -number if isinstance(node.op, ast.USub) else number
    raise ValueError
