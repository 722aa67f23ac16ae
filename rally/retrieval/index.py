"""An index folder is whole or not there, says what it is made of, and answers queries with passages, best first.

    meta.json                        what the index is, and how its encoder is used
    passages.jsonl, offsets.npy      the passages, memory-mapped
    bm25/                            words (bm25, hybrid)
    vectors.faiss                    vectors (dense, hybrid)

It is written beside its place, flushed, and renamed last.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rally.retrieval.bm25 import Bm25, Bm25Writer
from rally.retrieval.corpus import Passages, PassageWriter, count_passages, read_passages
from rally.retrieval.dense import Dense, Floats, Vectors, bring_vectors, write_vectors
from rally.retrieval.encoder import Encoder, EncoderSettings, recipe_for
from rally.retrieval.hits import Hit, Ranker, RetrievalError, best_first
from rally.util.atomic import atomic_folder

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


Kind = Literal["bm25", "dense", "hybrid"]
Progress = Callable[[Iterable[Any], int | None, str], Iterable[Any]]
"""Passes items through and shows how many have come, of the total if that is known."""

FORMAT = 1
META, WORDS, VECTORS = "meta.json", "bm25", "vectors.faiss"
ENCODED_AT_ONCE = 4096


@dataclass(frozen=True, kw_only=True)
class IndexSpec:
    """What to build. `recipe` overrides single fields of what the encoder's own files say."""

    kind: Kind = "bm25"
    encoder: str | None = None
    vectors: Vectors = "flat"
    device: str = "cpu"
    recipe: dict[str, Any] = field(default_factory=dict)
    ready: Path | None = None
    """A faiss file of vectors that were made before, one per passage in their order; it says what `vectors` is."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.vectors not in get_args(Vectors):
            raise RetrievalError(f"there is no {self.vectors} index of the kind {self.kind!r}")
        if self.kind != "bm25" and self.encoder is None:
            raise RetrievalError(f"a {self.kind} index needs --encoder, a folder or a name such as intfloat/e5-base-v2")
        shape = None if self.vectors == "flat" else "hnsw"
        about_vectors = {"encoder": self.encoder, **self.recipe, "vectors": shape, "faiss": self.ready}
        idle = next((name for name, value in about_vectors.items() if value is not None), None)
        if self.kind == "bm25" and idle is not None:
            raise RetrievalError(f"a bm25 index has no vectors, so {idle} does nothing; give --kind dense or hybrid")


class BuiltIndex(NamedTuple):
    """`recipe` is how the encoder is used, `cut` how many passages were longer than it reads, where it read them."""

    path: Path
    passages: int
    recipe: EncoderSettings | None
    cut: int | None

    def facts(self) -> list[list[str]]:
        """What a user should see of how the encoder is used: nothing fails when it is wrong."""
        if self.recipe is None:
            return []
        used = [[name, json.dumps(value, ensure_ascii=False)] for name, value in asdict(self.recipe).items()]
        return used if self.cut is None else [*used, ["passages cut to max_length", f"{self.cut:,}"]]


class ScoredPassage(NamedTuple):
    """A passage as the JSON that stands in the corpus, and its score."""

    raw: bytes
    score: float

    @property
    def document(self) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.raw)
        return row


class SearchIndex:
    """Safe to search from several threads."""

    def __init__(self, passages: Passages, ranker: Ranker, kind: Kind) -> None:
        self._passages = passages
        self._ranker = ranker
        self.kind = kind

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        """For each query at most `topk` passages, best first; fewer where fewer fit."""
        if topk < 1:
            raise RetrievalError(f"topk must be at least 1, not {topk}")
        found = self._ranker.search(queries, min(topk, len(self)))
        return [[ScoredPassage(self._passages.raw(hit.number), hit.score) for hit in hits] for hits in found]


def build_index(corpus: Path, out: Path, spec: IndexSpec, progress: Progress = lambda items, *_: items) -> BuiltIndex:
    """Read the corpus, and leave a whole index at `out` or nothing."""
    if not corpus.is_file():
        raise RetrievalError(f"the corpus {corpus} does not exist")
    if out.exists():
        raise RetrievalError(f"{out} exists already; remove it, or give another folder with --out")
    recipe = None if spec.encoder is None else recipe_for(spec.encoder, spec.recipe)
    with atomic_folder(out) as folder:
        total = _write_words(corpus, folder, spec.kind, progress)
        vectors, cut = spec.vectors, None
        if spec.ready is not None:
            vectors = bring_vectors(spec.ready, folder / VECTORS, total)
        elif recipe is not None:
            cut = _write_vectors(folder, spec, recipe, progress)
        meta: dict[str, Any] = {"format": FORMAT, "kind": spec.kind, "passages": total}
        if recipe is not None:
            meta |= {"encoder": _lasting(spec.encoder), "vectors": vectors, "recipe": asdict(recipe), "cut": cut}
        (folder / META).write_text(json.dumps(meta, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
    return BuiltIndex(out, total, recipe, cut)


def open_index(path: str | Path, device: str = "cpu") -> SearchIndex:
    """An index ready to search; an encoder runs on `device`, and so does a flat search by vectors."""
    folder = Path(path).expanduser()
    meta = _read_meta(folder)
    kind: Kind = meta["kind"]
    rankers: list[Ranker] = []
    if kind != "dense":
        rankers.append(Bm25(folder / WORDS))
    if kind != "bm25":
        encoder = Encoder(meta["encoder"], EncoderSettings(**meta["recipe"]), device)
        rankers.append(Dense(folder / VECTORS, encoder, meta["vectors"], device))
    return SearchIndex(Passages(folder), rankers[0] if len(rankers) == 1 else Hybrid(*rankers), kind)


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta: dict[str, Any] = json.loads((folder / META).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        raise RetrievalError(
            f"there is no index at {folder}; build one with: rally data index CORPUS.jsonl --out {folder}"
        ) from None
    if meta.get("format") != FORMAT:
        raise RetrievalError(f"the index {folder} was written by another version of Rally; build it again")
    return meta


def _write_words(corpus: Path, folder: Path, kind: Kind, progress: Progress) -> int:
    total = count_passages(corpus)
    if not total:
        raise RetrievalError(f"the corpus {corpus} has no passages")
    rows = progress(read_passages(corpus), total, "passages")
    if kind == "dense":
        with PassageWriter(folder) as stored:
            for passage in rows:
                stored.add(passage)
        return total
    with PassageWriter(folder) as stored, Bm25Writer(folder / WORDS) as words:
        for number, passage in enumerate(rows):
            stored.add(passage)
            words.add(number, passage.contents)
    return total


def _write_vectors(folder: Path, spec: IndexSpec, recipe: EncoderSettings, progress: Progress) -> int:
    assert spec.encoder is not None
    passages, encoder = Passages(folder), Encoder(spec.encoder, recipe, spec.device)
    cut = 0

    def chunks() -> Iterator[Floats]:
        nonlocal cut
        texts: list[str] = []
        for number in progress(range(len(passages)), len(passages), "vectors"):
            texts.append(passages.contents(number))
            if len(texts) == ENCODED_AT_ONCE or number == len(passages) - 1:
                encoded = encoder.passages(texts)
                cut += encoded.cut
                texts.clear()
                yield encoded.vectors

    write_vectors(folder / VECTORS, chunks(), encoder.width, spec.vectors)
    return cut


def _lasting(encoder: str | None) -> str:
    """A folder by its whole path, because a server is started from somewhere else; a hub's name as it is."""
    assert encoder is not None
    return str(Path(encoder).resolve()) if Path(encoder).is_dir() else encoder
