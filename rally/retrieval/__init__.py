"""Guarantees: a corpus becomes a whole index, and a query becomes passages of it, best first, never invented."""

from rally.retrieval.hits import RetrievalError
from rally.retrieval.index import Built, Found, IndexSpec, Kind, SearchIndex, build_index, open_index
from rally.retrieval.query_batching import Batcher, Overloaded

__all__ = [
    "Batcher",
    "Built",
    "Found",
    "IndexSpec",
    "Kind",
    "Overloaded",
    "RetrievalError",
    "SearchIndex",
    "build_index",
    "open_index",
]
