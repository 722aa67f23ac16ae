"""Builds, opens and searches index folders. A folder is written beside its path, flushed and renamed last.

meta.json                        kind and size of the index, and settings of its encoder
passages.jsonl, offsets.npy      the passages, memory-mapped
bm25/                            the word index (bm25, hybrid)
vectors.faiss                    the vectors (dense, hybrid)
manifest.json                    size and checksums of every file, compared when the index is opened
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, NamedTuple, get_args

from rally.retrieval.bm25 import Bm25, Bm25Writer
from rally.retrieval.corpus import Passages, PassageWriter, count_passages, read_passages
from rally.retrieval.dense import Dense, Floats, Vectors, import_vectors, write_vectors
from rally.retrieval.encoder import Encoder, EncoderSettings, settings_for
from rally.retrieval.hits import Hit, Ranker, RetrievalError, best_first
from rally.util.atomic_files import atomic_folder
from rally.util.checksums import UNREADABLE, damage, reason, seal

_log = logging.getLogger(__name__)

DAMPING = 60
"""The usual constant of reciprocal rank fusion: second in both rankings beats first in only one."""
DEPTH = 100
"""The number of hits that are taken from each ranking."""


class Hybrid:
    """A `Ranker` that fuses the rankings of several."""

    def __init__(self, *rankers: Ranker) -> None:
        self._rankers = rankers

    def search(self, queries: Sequence[str], topk: int) -> list[list[Hit]]:
        rankings = [ranker.search(queries, max(DEPTH, topk)) for ranker in self._rankers]
        return [fuse(ranking)[:topk] for ranking in zip(*rankings, strict=True)]


def fuse(rankings: Sequence[Sequence[Hit]]) -> list[Hit]:
    """Reciprocal rank fusion: a passage scores 1 / (DAMPING + rank) in each ranking, with ranks from 1."""
    scores: dict[int, float] = defaultdict(float)
    for ranking in rankings:
        for rank, hit in enumerate(ranking, start=1):
            scores[hit.number] += 1 / (DAMPING + rank)
    return best_first([Hit(number, score) for number, score in scores.items()])


Kind = Literal["bm25", "dense", "hybrid"]
Progress = Callable[[Iterable[Any], int | None, str], Iterable[Any]]
"""Wraps an iterable to show progress, with the total if it is known and a label."""

FORMAT, WITHOUT_CHECKSUMS = 2, 1
META, BM25_FOLDER, VECTORS = "meta.json", "bm25", "vectors.faiss"
ENCODE_BATCH = 4096


@dataclass(frozen=True, kw_only=True)
class IndexSpec:
    """What to build. `recipe` overrides fields of the encoder's default settings."""

    kind: Kind = "bm25"
    encoder: str | None = None
    vectors: Vectors = "flat"
    device: str = "cpu"
    recipe: Mapping[str, Any] = field(default_factory=dict)
    ready: Path | None = None
    """An existing faiss file with one vector per passage, in order; it determines `vectors`."""

    def __post_init__(self) -> None:
        if self.kind not in get_args(Kind) or self.vectors not in get_args(Vectors):
            raise RetrievalError(
                f"there is no {self.vectors} index of kind {self.kind!r}; use --kind bm25, dense or hybrid"
            )
        if self.kind != "bm25" and self.encoder is None:
            raise RetrievalError(f"a {self.kind} index needs --encoder, a folder or a name such as intfloat/e5-base-v2")
        shape = None if self.vectors == "flat" else "hnsw"
        device = None if self.device == "cpu" else self.device
        about_vectors = {"encoder": self.encoder, **self.recipe, "vectors": shape, "device": device}
        about_vectors["faiss"] = self.ready
        unused = next((name for name, value in about_vectors.items() if value is not None), None)
        if self.kind == "bm25" and unused is not None:
            option = f"--{unused.replace('_', '-')}"
            raise RetrievalError(f"a bm25 index has no vectors, so {option} has no effect; use --kind dense or hybrid")


class BuiltIndex(NamedTuple):
    """A finished index. `recipe` are the encoder's settings, `cut` the number of truncated passages, if it read any."""

    path: Path
    passages: int
    recipe: EncoderSettings | None
    cut: int | None

    def facts(self) -> list[list[str]]:
        """The encoder's settings, to show to the user: wrong ones do not fail but give bad results."""
        if self.recipe is None:
            return []
        rows = [[name, json.dumps(value, ensure_ascii=False)] for name, value in asdict(self.recipe).items()]
        return rows if self.cut is None else [*rows, ["passages cut to max_length", f"{self.cut:,}"]]


class ScoredPassage(NamedTuple):
    """A passage as its JSON in the corpus, and its score."""

    raw: bytes
    score: float

    @property
    def document(self) -> dict[str, Any]:
        row: dict[str, Any] = json.loads(self.raw)
        return row


class SearchIndex:
    """An open index. It may be searched from several threads."""

    def __init__(self, passages: Passages, ranker: Ranker, kind: Kind) -> None:
        self._passages = passages
        self._ranker = ranker
        self.kind = kind

    def __len__(self) -> int:
        return len(self._passages)

    def search(self, queries: Sequence[str], topk: int) -> list[list[ScoredPassage]]:
        """At most `topk` passages for each query, best first."""
        if topk < 1:
            raise RetrievalError(f"topk must be at least 1, not {topk}")
        rankings = self._ranker.search(queries, min(topk, len(self)))
        return [[ScoredPassage(self._passages.raw(hit.number), hit.score) for hit in hits] for hits in rankings]


def build_index(corpus: Path, out: Path, spec: IndexSpec, progress: Progress = lambda items, *_: items) -> BuiltIndex:
    """Build an index of the corpus at `out`. On failure nothing is left."""
    if not corpus.is_file():
        raise RetrievalError(f"the corpus {corpus} does not exist; give the path of a .jsonl or .jsonl.gz file")
    if out.exists():
        raise RetrievalError(f"{out} exists already; remove it, or give another folder with --out")
    recipe = None if spec.encoder is None else settings_for(spec.encoder, spec.recipe)
    with atomic_folder(out) as folder:
        total = _write_passages(corpus, folder, spec.kind, progress)
        vectors, cut = spec.vectors, None
        if spec.ready is not None:
            vectors = import_vectors(spec.ready, folder / VECTORS, total)
        elif recipe is not None:
            cut = _write_vectors(folder, spec, recipe, progress)
        meta: dict[str, Any] = {"format": FORMAT, "kind": spec.kind, "passages": total}
        if recipe is not None:
            meta |= {"encoder": _absolute(spec.encoder), "vectors": vectors, "recipe": asdict(recipe), "cut": cut}
        (folder / META).write_text(json.dumps(meta, ensure_ascii=False, indent=2) + "\n", encoding="utf-8")
        seal(folder)
    return BuiltIndex(out, total, recipe, cut)


def open_index(path: str | Path, device: str = "cpu") -> SearchIndex:
    """Open an index. The encoder and flat vector search run on `device`."""
    folder = Path(path).expanduser()
    meta = _read_meta(folder)
    if meta["format"] == WITHOUT_CHECKSUMS:
        _log.warning("the index %s was written without checksums, so damage may go unnoticed; build it again", folder)
    elif problem := damage(folder):
        raise _damaged(folder, problem)
    try:
        return _opened(folder, meta, device)
    except RetrievalError:
        raise
    except UNREADABLE as problem:
        raise _damaged(folder, reason(problem)) from problem


def _opened(folder: Path, meta: dict[str, Any], device: str) -> SearchIndex:
    kind: Kind = meta["kind"]
    rankers: list[Ranker] = []
    if kind != "dense":
        rankers.append(Bm25(folder / BM25_FOLDER))
    if kind != "bm25":
        encoder = Encoder(meta["encoder"], EncoderSettings(**meta["recipe"]), device)
        rankers.append(Dense(folder / VECTORS, encoder, meta["vectors"], device))
    return SearchIndex(Passages(folder), rankers[0] if len(rankers) == 1 else Hybrid(*rankers), kind)


def _damaged(folder: Path, problem: str) -> RetrievalError:
    return RetrievalError(f"the index {folder} is damaged ({problem}); build it again")


def _read_meta(folder: Path) -> dict[str, Any]:
    try:
        meta = json.loads((folder / META).read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise RetrievalError(
            f"there is no index at {folder}; build one with: rally data index CORPUS.jsonl --out {folder}"
        ) from None
    except (OSError, ValueError, RecursionError) as problem:
        raise _damaged(folder, f"{META}: {reason(problem)}") from problem
    if not isinstance(meta, dict):
        raise _damaged(folder, f"{META} holds a {type(meta).__name__} instead of an object")
    if meta.get("format") not in (FORMAT, WITHOUT_CHECKSUMS):
        raise RetrievalError(f"the index {folder} was written by another version of Rally; build it again")
    return meta


def _write_passages(corpus: Path, folder: Path, kind: Kind, progress: Progress) -> int:
    total = count_passages(corpus)
    if not total:
        raise RetrievalError(f"the corpus {corpus} has no passages; write one JSON object per line")
    rows = progress(read_passages(corpus), total, "passages")
    if kind == "dense":
        with PassageWriter(folder) as stored:
            for passage in rows:
                stored.add(passage)
        return total
    with PassageWriter(folder) as stored, Bm25Writer(folder / BM25_FOLDER) as words:
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
            if len(texts) == ENCODE_BATCH or number == len(passages) - 1:
                encoded = encoder.passages(texts)
                cut += encoded.cut
                texts.clear()
                yield encoded.vectors

    write_vectors(folder / VECTORS, chunks(), encoder.width, spec.vectors)
    return cut


def _absolute(encoder: str | None) -> str:
    """The absolute path of a folder, because a server may be started elsewhere; a hub name unchanged."""
    assert encoder is not None
    return str(Path(encoder).resolve()) if Path(encoder).is_dir() else encoder
