"""Which episodes of a file are traced is a function of the file: the same ones, however often it is read."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from rally.types import Episode


class Chosen(NamedTuple):
    """An episode and its number among those of its group."""

    episode: Episode
    sample: int


def chosen(episodes: Sequence[Episode], most: int | None) -> Iterator[Chosen]:
    """The episodes of at most `most` groups, whole groups, drawn by a hash so that no part of the data is favoured."""
    kept = _drawn({e.group for e in episodes}, most)
    count: Counter[str] = Counter()
    for episode in episodes:
        if episode.group in kept:
            yield Chosen(episode, count[episode.group])
        count[episode.group] += 1


def _drawn(groups: Iterable[str], most: int | None) -> set[str]:
    ordered = sorted(groups, key=lambda group: hashlib.blake2b(group.encode("utf-8", "surrogatepass")).digest())
    return set(ordered[:most])
