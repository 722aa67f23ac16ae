"""BM25 search with tantivy: no model, no GPU, memory-mapped. Any text is a valid query.

Words are runs of letters and digits, lowercased, without accents, stemmed as English. Each Chinese or Japanese
character is a word. Stop words of a query are dropped, unless it has no other words ("The Who").
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from rally.retrieval.hits import Hit, best_first, require

FIELD, NUMBER, ANALYZER = "contents", "number", "rally"
HEAP_BYTES = 512 * 1024 * 1024
MAX_WORD_LENGTH = 64
_IDEOGRAPHS = r"\p{Han}\p{Hiragana}\p{Katakana}"
_WORD = rf"[{_IDEOGRAPHS}]|[\p{{L}}\p{{N}}\p{{M}}--[{_IDEOGRAPHS}]]+"


class Bm25Writer:
    """Adds passages by number; they are on disk when the block ends.

    It writes with one thread, so that the same corpus gives the same index and the same order of ties.
    """

    def __init__(self, folder: Path) -> None:
        self._tantivy = require("tantivy", "tantivy")
        folder.mkdir()
        index = self._tantivy.Index(_schema(self._tantivy), str(folder))
        index.register_tokenizer(ANALYZER, _analyzer(self._tantivy, stop_words=False))
        self._writer = index.writer(HEAP_BYTES, 1)

    def __enter__(self) -> Bm25Writer:
        return self

    def add(self, number: int, contents: str) -> None:
        document = self._tantivy.Document()
        document.add_text(FIELD, contents)
        document.add_unsigned(NUMBER, number)
        self._writer.add_document(document)

    def __exit__(self, kind: type[BaseException] | None, value: BaseException | None, at: TracebackType | None) -> None:
        if kind is None:
            self._writer.commit()
        self._writer.wait_merging_threads()


class Bm25:
    """A `Ranker` over a BM25 index."""

    def __init__(self, folder: Path) -> None:
        self._tantivy = require("tantivy", "tantivy")
        index = self._tantivy.Index.open(str(folder))
        self._schema = index.schema
        self._searcher = index.searcher()
        self._all_words = _analyzer(self._tantivy, stop_words=False)
        self._rare_words = _analyzer(self._tantivy, stop_words=True)

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        return [self._search(query, topk) for query in queries]

    def _search(self, query: str, topk: int) -> list[Hit]:
        text = query.encode("utf-8", "replace").decode()
        words = dict.fromkeys(self._rare_words.analyze(text) or self._all_words.analyze(text))
        if not words:
            return []
        hits = self._searcher.search(self._any_of(words), topk, count=False).hits
        numbers = self._searcher.fast_field_values(NUMBER, [address for _, address in hits])
        return best_first([Hit(number, score) for number, (score, _) in zip(numbers, hits, strict=True)])

    def _any_of(self, words: dict[str, None]) -> Any:
        """A query built from terms instead of parsed: model output is full of query syntax characters."""
        should, term = self._tantivy.Occur.Should, self._tantivy.Query.term_query
        terms = [(should, term(self._schema, FIELD, word, "freq")) for word in words]
        return self._tantivy.Query.boolean_query(terms)


def _schema(tantivy: Any) -> Any:
    builder = tantivy.SchemaBuilder()
    builder.add_text_field(FIELD, tokenizer_name=ANALYZER, index_option="freq")
    builder.add_unsigned_field(NUMBER, fast=True)
    return builder.build()


def _analyzer(tantivy: Any, stop_words: bool) -> Any:
    kind = tantivy.Filter
    filters = [kind.remove_long(MAX_WORD_LENGTH), kind.lowercase(), kind.ascii_fold()]
    if stop_words:
        filters.append(kind.stopword("english"))
    builder = tantivy.TextAnalyzerBuilder(tantivy.Tokenizer.regex(_WORD))
    for filter_ in (*filters, kind.stemmer("english")):
        builder = builder.filter(filter_)
    return builder.build()
