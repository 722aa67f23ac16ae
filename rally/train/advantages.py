"""What every sampled token was given, as spans of equal advantage: a person can see what an episode was taught."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby

import numpy as np

from rally.track import AdvantageSpan
from rally.train.packing import Row
from rally.types import Episode


def advantage_spans(
    episodes: Sequence[Episode], rows: Sequence[Row]
) -> dict[str, tuple[tuple[AdvantageSpan, ...], ...]]:
    """By episode id, the spans of each segment. `rows` are the segments with something sampled, in order."""
    following = iter(rows)
    return {
        episode.id: tuple(
            tuple(_spans(next(following), len(segment.prompt_ids))) if segment.sampled else ()
            for segment in episode.segments
        )
        for episode in episodes
    }


def _spans(row: Row, offset: int) -> Iterator[AdvantageSpan]:
    """Unbroken runs of sampled tokens with one advantage, counted from the first response token."""
    tokens = enumerate(zip(row.sampled, row.advantages, strict=True))
    for (_, value), run in groupby(tokens, key=lambda token: (token[1][0] - token[0], token[1][1])):
        places = [place for _, (place, _) in run]
        yield AdvantageSpan(_shortest(value), places[0] - offset, places[-1] + 1 - offset)


def _shortest(value: float) -> float:
    """The same single-precision number with the fewest digits: 0.71 and not 0.7099999785423279."""
    return float(str(np.float32(value)))
