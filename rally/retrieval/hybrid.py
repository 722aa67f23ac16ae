"""Two rankings become one by reciprocal rank, so that scores which mean different things are never compared."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from rally.retrieval.hits import Hit, Ranker, best_first

DAMPING = 60
"""The usual constant: with it, being second in both rankings beats being first in only one."""
DEPTH = 100
"""How far down each ranking is read."""


class Hybrid:
    def __init__(self, *rankers: Ranker) -> None:
        self._rankers = rankers

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        rankings = [ranker.search(queries, max(DEPTH, topk)) for ranker in self._rankers]
        return [fuse(of_one_query)[:topk] for of_one_query in zip(*rankings, strict=True)]


def fuse(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """A passage earns 1 / (DAMPING + rank) from each ranking it is in, ranks counted from 1."""
    scores: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, hit in enumerate(ranking, start=1):
            scores[hit.number] += 1 / (DAMPING + rank)
    return best_first([Hit(number, score) for number, score in scores.items()])
