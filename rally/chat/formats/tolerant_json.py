"""A JSON reader that accepts the common mistakes of language models.

Beyond JSON it accepts single-quoted strings, raw newlines inside strings, trailing commas, bare keys, and Python's
True, False and None. It never completes truncated input, because half a call must not be executed. Its errors are
written for the model.
"""

from __future__ import annotations

import json
import re
from typing import Any, NamedTuple

MAX_DEPTH = 64
_STRICT = json.JSONDecoder(strict=False)
_SPACE = re.compile(r"\s*")
_BARE_KEY = re.compile(r"[A-Za-z_][\w.-]*")
_NUMBER = re.compile(r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?(?![\w.])")
_WORDS = {"true": True, "True": True, "false": False, "False": False, "null": None, "None": None}
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "b": "\b", "f": "\f", "\n": ""}


class Value(NamedTuple):
    """A value and the position right after it."""

    value: Any
    end: int


def read_json(text: str, start: int = 0) -> Value:
    """The value that begins at `start`, after optional whitespace. Raises ValueError."""
    start = _skip(text, start)
    try:
        value, end = _STRICT.raw_decode(text, start)
        # The fast decoder has no depth limit, so text that may be nested too deeply goes to the slow one.
        if text.count("{", start, end) + text.count("[", start, end) > MAX_DEPTH:
            raise ValueError
    except (ValueError, RecursionError):
        value, end = _Reader(text).value(start, 0)
    return Value(_without_surrogates(value) if text.find("\\u", start, end) >= 0 else value, end)


def read_whole(text: str) -> Any:
    """The value that makes up all of `text`. Raises ValueError."""
    value, end = read_json(text)
    rest = text[end:].strip()
    if rest:
        raise ValueError(f"unexpected text after the value: {rest[:20]!r}")
    return value


def _skip(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()


def _without_surrogates(value: Any) -> Any:
    """The value with surrogate pairs joined and lone surrogates, which no tokenizer can encode, replaced."""
    if isinstance(value, str):
        return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    if isinstance(value, list):
        return [_without_surrogates(v) for v in value]
    if isinstance(value, dict):
        return {_without_surrogates(k): _without_surrogates(v) for k, v in value.items()}
    return value


class _Reader:
    """Recursive descent over one text; every method takes a position and returns a Value."""

    def __init__(self, text: str) -> None:
        self.text = text

    def value(self, at: int, depth: int) -> Value:
        if depth > MAX_DEPTH:
            raise ValueError(f"nested deeper than {MAX_DEPTH} levels")
        at = _skip(self.text, at)
        char = self.text[at : at + 1]
        if char == "{":
            return self._object(at + 1, depth)
        if char == "[":
            return self._array(at + 1, depth)
        if char in ("'", '"'):
            return self._string(at + 1, char)
        return self._scalar(at)

    def _object(self, at: int, depth: int) -> Value:
        result: dict[str, Any] = {}
        while self._peek(at) != "}":
            key, at = self._key(_skip(self.text, at))
            at = self._expect(at, ":")
            result[key], at = self.value(at, depth + 1)
            at = self._comma_or(at, "}")
        return Value(result, _skip(self.text, at) + 1)

    def _array(self, at: int, depth: int) -> Value:
        items: list[Any] = []
        while self._peek(at) != "]":
            item, at = self.value(at, depth + 1)
            items.append(item)
            at = self._comma_or(at, "]")
        return Value(items, _skip(self.text, at) + 1)

    def _key(self, at: int) -> Value:
        if self.text[at] in "'\"":
            return self._string(at + 1, self.text[at])
        match = _BARE_KEY.match(self.text, at)
        if match is None:
            raise ValueError(f"expected a key in double quotes at {self._near(at)}")
        return Value(match.group(), match.end())

    def _string(self, at: int, quote: str) -> Value:
        parts: list[str] = []
        while at < len(self.text):
            char = self.text[at]
            if char == quote:
                return Value("".join(parts), at + 1)
            if char == "\\" and at + 1 < len(self.text):
                char, at = self._escape(at + 1)
            else:
                at += 1
            parts.append(char)
        raise ValueError("a string is not closed")

    def _escape(self, at: int) -> Value:
        char = self.text[at]
        code = self.text[at + 1 : at + 5]
        if char == "u" and re.fullmatch(r"[0-9a-fA-F]{4}", code):
            return Value(chr(int(code, 16)), at + 5)
        return Value(_ESCAPES.get(char, char), at + 1)

    def _scalar(self, at: int) -> Value:
        for word, value in _WORDS.items():
            if self.text.startswith(word, at):
                return Value(value, at + len(word))
        match = _NUMBER.match(self.text, at)
        if match is None:
            raise ValueError(f"expected a value at {self._near(at)}")
        digits = match.group()
        return Value(float(digits) if re.search(r"[.eE]", digits) else int(digits), match.end())

    def _peek(self, at: int) -> str:
        at = _skip(self.text, at)
        if at >= len(self.text):
            raise ValueError("it ends before its brackets are closed")
        return self.text[at]

    def _expect(self, at: int, char: str) -> int:
        if self._peek(at) != char:
            raise ValueError(f"expected {char!r} at {self._near(at)}")
        return _skip(self.text, at) + 1

    def _comma_or(self, at: int, closer: str) -> int:
        """The position after one comma, or of the closing bracket. Raises ValueError."""
        return at if self._peek(at) == closer else self._expect(at, ",")

    def _near(self, at: int) -> str:
        at = _skip(self.text, at)
        return repr(self.text[at : at + 20]) if at < len(self.text) else "the end"
