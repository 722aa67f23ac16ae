"""The interface of rankers: a search returns at most `topk` hits per query, best first, in a reproducible order."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from rally.types import RallyError


class RetrievalError(RallyError):
    """An invalid corpus, index or search."""


def require(module: str, package: str) -> Any:
    """Import an optional library; RetrievalError with the command that installs it if it is missing."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise RetrievalError(f"this index needs the package {package}; run: pip install 'rally-rl[search]'") from None


class Hit(NamedTuple):
    """The number of a passage, and its score, which is comparable within one query."""

    number: int
    score: float


class Ranker(Protocol):
    """A search method. `search` may be called from several threads."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]: ...


def best_first(hits: Sequence[Hit]) -> list[Hit]:
    """Sorted by score; ties in the order of the corpus."""
    return sorted(hits, key=lambda hit: (-hit.score, hit.number))
