"""A search gives each query its hits, best first: at most `topk`, none that is not there, in an order that repeats."""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, NamedTuple, Protocol

from rally.types import RallyError


class RetrievalError(RallyError):
    """A corpus, an index or a search that is not what it must be."""


def require(module: str, package: str) -> Any:
    """An optional library, or the command that installs it."""
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name != module:
            raise
        raise RetrievalError(f"this index needs the package {package}; run: pip install 'rally-rl[search]'") from None


class Hit(NamedTuple):
    """A passage by its number, and how well it fits; scores compare within one query."""

    number: int
    score: float


class Ranker(Protocol):
    """One way to find passages. `search` may be called from several threads."""

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]: ...


def best_first(hits: Sequence[Hit]) -> list[Hit]:
    """By score; of equals, the passage that stands first in the corpus."""
    return sorted(hits, key=lambda hit: (-hit.score, hit.number))
