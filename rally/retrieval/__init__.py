"""Retrieval: builds BM25, dense and hybrid indexes over a corpus of passages, and searches them."""

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
