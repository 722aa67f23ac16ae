"""What every sampled token was given, as spans of equal advantage: a person can see what an episode was taught."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

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
    places, values = row.sampled, row.advantages
    neighbours = zip(places, places[1:], values, values[1:], strict=False)
    breaks = [i for i, (p, q, a, b) in enumerate(neighbours, start=1) if q - p != 1 or a != b]
    for first, end in pairwise((0, *breaks, len(places))):
        # 0.71 and not 0.7099999785423279: the fewest digits that are the same single-precision number.
        value = float(str(np.float32(values[first])))
        yield AdvantageSpan(value, places[first] - offset, places[end - 1] + 1 - offset)
