"""Tokens become text piece by piece, and the pieces joined are the text of the whole: no half character is sent, and
nothing that may turn out to belong to a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]
UNFINISHED = "\ufffd"  # what a decoder puts for bytes that are no character, or not yet


def before_stop(text: str, stops: Sequence[str]) -> str:
    """The text up to the first stop string in it."""
    ends = [at for stop in stops if (at := text.find(stop)) >= 0]
    return text[: min(ends)] if ends else text


class TextStream:
    """The text of one answer as it grows. Only the last few tokens are decoded again for each new one."""

    def __init__(self, decode: Decode, stops: Sequence[str]) -> None:
        self._decode, self._stops = decode, tuple(stops)
        self._ids: list[int] = []
        self._anchor = self._read = 0  # text up to token `_read` is out; decoding begins at `_anchor`, for its context
        self._text = ""
        self._sent = 0

    def push(self, ids: Sequence[int]) -> str:
        """What can be sent now that these tokens have come."""
        self._ids += ids
        before = self._decode(self._ids[self._anchor : self._read])
        text = self._decode(self._ids[self._anchor :])
        if not text.endswith(UNFINISHED):
            self._text += text[len(before) :]
            self._anchor, self._read = self._read, len(self._ids)
        return self._send(before_stop(self._text, self._stops), hold=True)

    def finish(self, whole: str) -> str:
        """What is left of the whole text."""
        return self._send(whole, hold=False)

    def _send(self, text: str, *, hold: bool) -> str:
        end = len(text) - self._held_back(text) if hold else len(text)
        piece = text[self._sent : end]
        self._sent = max(self._sent, end)
        return piece

    def _held_back(self, text: str) -> int:
        """Characters at the end that a stop string may begin with."""
        longest = max((len(stop) for stop in self._stops), default=0)
        for length in range(min(longest - 1, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0
