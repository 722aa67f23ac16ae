"""Where two samplings of one episode depart from each other is said exactly: which token it is, and who wrote it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

from rally.types import Segment

SHOWN = 8  # tokens of context on either side
_EMPTY = Segment(prompt_ids=())

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True)
class Departure:
    """The first token that is not the same in both. `writer` is who wrote it: prompt, policy, or tool or user."""

    segment: int
    place: int  # in the prompt, or in the response
    writer: str
    recorded: tuple[int, ...]  # the tokens around it
    now: tuple[int, ...]

    def words(self, decode: Decode) -> str:
        of = "the prompt" if self.writer == "prompt" else "the response"
        where = f"token {self.place} of {of}" + (f" of segment {self.segment}" if self.segment else "")
        by = "" if self.writer == "prompt" else f", which the {self.writer} wrote"
        return f"{where}{by}: recorded {decode(self.recorded)!r}, now {decode(self.now)!r}"


@dataclass(frozen=True)
class LogprobGap:
    """How far the log-probabilities of equal tokens are apart: how many are, the first of them, and the most."""

    count: int
    of: int
    segment: int
    place: int
    largest: float

    def words(self) -> str:
        where = f"token {self.place} of the response" + (f" of segment {self.segment}" if self.segment else "")
        return f"{self.count} of {self.of} log-probabilities, from {where} on, by {self.largest:.3g} at most"


def departure(recorded: Sequence[Segment], now: Sequence[Segment]) -> Departure | None:
    """The first token in which they differ, in content or in who wrote it; None if they are the same to the end."""
    for number, (a, b) in enumerate(zip_longest(recorded, now, fillvalue=_EMPTY)):
        if (at := _first(_prompt(a), _prompt(b))) is not None:
            return _at(number, at, "prompt", a.prompt_ids, b.prompt_ids)
        at = _first(_tokens(a), _tokens(b))
        if at is not None:
            sampled = (*a.response_mask[at : at + 1], *b.response_mask[at : at + 1])[0]
            return _at(number, at, "policy" if sampled else "tool or user", a.response_ids, b.response_ids)
    return None


def logprob_gap(
    recorded: Sequence[Segment], now: Sequence[Segment], until: Departure | None = None
) -> LogprobGap | None:
    """How the log-probabilities of sampled tokens differ, as far as the tokens are the same; None if to no bit."""
    pairs = [
        (number, place, a.response_logprobs[place], b.response_logprobs[place])
        for number, (a, b) in enumerate(zip(recorded, now, strict=False))
        for place in range(min(len(a.response_ids), len(b.response_ids)))
        if a.response_mask[place] and _before(number, place, until)
    ]
    apart = [pair for pair in pairs if pair[2] != pair[3]]
    if not apart:
        return None
    largest = max(abs(was - is_now) for _, _, was, is_now in apart)
    return LogprobGap(len(apart), len(pairs), apart[0][0], apart[0][1], largest)


def _before(segment: int, place: int, until: Departure | None) -> bool:
    if until is None:
        return True
    end = 0 if until.writer == "prompt" else until.place
    return (segment, place) < (until.segment, end)


def _prompt(segment: Segment) -> list[tuple[int, str]]:
    return list(zip(segment.prompt_ids, _shown(segment), strict=False))


def _tokens(segment: Segment) -> list[tuple[int, int, str]]:
    shown = _shown(segment)[len(segment.prompt_ids) :]
    return list(zip(segment.response_ids, segment.response_mask, shown, strict=True))


def _shown(segment: Segment) -> list[str]:
    """The image that each token of the history is part of: equal placeholders of two images are not the same."""
    names = [""] * len(segment.ids)
    for span in segment.images:
        names[span.start : span.end] = [span.image.hash] * (span.end - span.start)
    return names


def _first(a: Sequence[Any], b: Sequence[Any]) -> int | None:
    """The first place in which two sequences differ; where one ends, if it is the beginning of the other."""
    for place, (one, other) in enumerate(zip(a, b, strict=False)):
        if one != other:
            return place
    return None if len(a) == len(b) else min(len(a), len(b))


def _at(segment: int, place: int, writer: str, recorded: tuple[int, ...], now: tuple[int, ...]) -> Departure:
    around = slice(max(0, place - SHOWN), place + SHOWN)
    return Departure(segment, place, writer, recorded[around], now[around])
