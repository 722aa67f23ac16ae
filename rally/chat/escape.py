"""Observed text can never become a control token: a space is put into every token that a tool or user typed.

Text of a tool loses every tag token (`<|im_end|>`, `</tool_response>`, `<think>`); text of a user only the special
ones, because a question may well ask for `<think>` tags and must then show the real ones. Nobody's text, the policy's
neither, can write the placeholder of an image: what is shown is said by the images of a message alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from transformers import PreTrainedTokenizerBase


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
