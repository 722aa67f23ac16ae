"""Guarantees: a corpus becomes a whole index, and a query becomes passages of it, best first, never invented."""

from rally.retrieval.hits import RetrievalError
from rally.retrieval.index import BuiltIndex, IndexSpec, Kind, ScoredPassage, SearchIndex, build_index, open_index
from rally.retrieval.query_batching import Batcher, Overloaded

__all__ = [
    "Batcher",
    "BuiltIndex",
    "ScoredPassage",
    "IndexSpec",
    "Kind",
    "Overloaded",
    "RetrievalError",
    "SearchIndex",
    "build_index",
    "open_index",
]
