"""An index is built completely or not at all, accepts any text as a query, and names damaged lines of the corpus."""

import gzip
import json
import multiprocessing
import os
import shutil
import signal
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import CORPUS, save_encoder, write_corpus
from typer.testing import CliRunner

from rally.cli.main import app
from rally.retrieval import IndexSpec, RetrievalError, SearchIndex, build_index, open_index
from rally.retrieval.hits import Hit
from rally.retrieval.index import fuse
from rally.util.checksums import MANIFEST


@pytest.fixture(scope="module")
def index(tmp_path_factory: pytest.TempPathFactory) -> SearchIndex:
    folder = tmp_path_factory.mktemp("words")
    build_index(write_corpus(folder / "corpus.jsonl"), folder / "index", IndexSpec())
    return open_index(folder / "index")


def ids(index: SearchIndex, query: str, topk: int = 5) -> list[str]:
    return [hit.document["id"] for hit in index.search([query], topk)[0]]


@pytest.mark.parametrize(
    ("query", "first"),
    [
        ("What is the capital of Germany?", "1"),
        ("CAPITALS of frânce", "0"),
        ("the who", "3"),
        ("日本の首都", "4"),
        ('contents:"Everest" AND (NOT -', "2"),
    ],
)
def test_words_find_their_passage(index: SearchIndex, query: str, first: str) -> None:
    assert ids(index, query)[0] == first


def test_only_passages_that_share_a_word_are_found_and_never_more_than_there_are(index: SearchIndex) -> None:
    assert ids(index, "capital", topk=100) == ["0", "1"]
    assert index.search(["", "?!", "xylophone"], 3) == [[], [], []]


def test_a_document_is_the_line_of_the_corpus_with_contents(index: SearchIndex) -> None:
    (everest,) = index.search(["everest"], 1)[0]
    assert everest.document == CORPUS[2]
    (paris,) = index.search(["paris"], 1)[0]
    assert paris.document == {**CORPUS[0], "contents": '"Paris"\nParis is the capital of France.'}


@settings(max_examples=50)
@given(query=st.text())
def test_any_text_is_a_query(index: SearchIndex, query: str) -> None:
    (hits,) = index.search([query + "\ud800"], 2)
    assert [hit.score for hit in hits] == sorted((hit.score for hit in hits), reverse=True)


def test_threads_and_batches_find_what_one_query_finds(index: SearchIndex) -> None:
    queries = ["capital", "the who", "mountain in the himalayas", ""] * 50
    alone = [index.search([query], 3)[0] for query in queries]
    assert index.search(queries, 3) == alone
    with ThreadPoolExecutor(4) as threads:
        assert [found[0] for found in threads.map(lambda query: index.search([query], 3), queries)] == alone


def test_the_same_corpus_gives_the_same_ties(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl", [{"id": str(i), "text": f"same words {i % 3}"} for i in range(2000)])
    found = []
    for name in ("a", "b"):
        build_index(corpus, tmp_path / name, IndexSpec())
        found.append(ids(open_index(tmp_path / name), "words", 50))
    assert found[0] == found[1] == [str(i) for i in range(50)]


@pytest.mark.parametrize(
    ("line", "sentence"),
    [
        (b'{"id": "x", "text"', "line 3: this is not JSON"),
        (b'{"text": NaN}', "line 3: this is not JSON .NaN"),
        (b'["text"]', "line 3: a passage must be a JSON object, not list"),
        (b'{"id": 3}', "line 3: a passage needs `contents`, or `title` and `text`"),
        (b'{"contents": "  "}', "line 3: `contents` must be a non-empty string"),
        (b'{"contents": 7}', "line 3: `contents` must be a non-empty string"),
        (b'{"text": "caf\xe9"}', "line 3: this is not UTF-8"),
        (b'{"text": "\\ud83d"}', "line 3: half of a surrogate pair"),
    ],
)
def test_a_damaged_line_is_named_and_nothing_is_left(tmp_path: Path, line: bytes, sentence: str) -> None:
    corpus = tmp_path / "corpus.jsonl"
    corpus.write_bytes(b'{"text": "fine"}\n\n' + line + b"\n")
    with pytest.raises(RetrievalError, match=sentence):
        build_index(corpus, tmp_path / "index", IndexSpec())
    assert os.listdir(tmp_path) == ["corpus.jsonl"]


def _build_and_die(corpus: Path, out: Path) -> None:
    def die(items: Iterable[Any], *_: Any) -> Iterator[Any]:
        for number, item in enumerate(items):
            if number == 3:
                os.kill(os.getpid(), signal.SIGKILL)
            yield item

    build_index(corpus, out, IndexSpec(), die)


def test_a_build_that_is_killed_leaves_no_index_behind(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "c.jsonl"), tmp_path / "index"
    builder = multiprocessing.get_context("fork").Process(target=_build_and_die, args=(corpus, out))
    builder.start()
    builder.join()
    assert builder.exitcode == -signal.SIGKILL
    with pytest.raises(RetrievalError, match=r"there is no index at .*; build one with: rally data index"):
        open_index(out)
    build_index(corpus, out, IndexSpec())
    assert len(open_index(out)) == len(CORPUS)


def test_an_index_is_not_overwritten_and_a_damaged_one_not_opened(tmp_path: Path) -> None:
    corpus, out = write_corpus(tmp_path / "c.jsonl"), tmp_path / "index"
    build_index(corpus, out, IndexSpec())
    with pytest.raises(RetrievalError, match="exists already"):
        build_index(corpus, out, IndexSpec())
    with (out / "passages.jsonl").open("ab") as lines:
        lines.write(b"{}")
    with pytest.raises(RetrievalError, match="is damaged"):
        open_index(out)


def test_the_command_builds_from_gzip_and_says_what_it_wrote(tmp_path: Path) -> None:
    packed = tmp_path / "corpus.jsonl.gz"
    packed.write_bytes(gzip.compress(write_corpus(tmp_path / "corpus.jsonl").read_bytes()))
    done = CliRunner().invoke(app, ["data", "index", str(packed), "--out", str(tmp_path / "index")])
    assert done.exit_code == 0
    assert "passages 5/5" in done.output
    assert "5 passages" in done.output
    assert json.loads((tmp_path / "index" / "meta.json").read_text())["kind"] == "bm25"


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"kind": "dense"}, "a dense index needs --encoder"),
        ({"encoder": "x"}, "a bm25 index has no vectors, so --encoder has no effect"),
        ({"recipe": {"pooling": "cls", "max_length": None}}, "so --pooling has no effect"),
        ({"vectors": "hnsw"}, "so --vectors has no effect"),
    ],
)
def test_options_that_do_nothing_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(RetrievalError, match=sentence):
        IndexSpec(**options)


def test_an_empty_or_missing_corpus_is_said(tmp_path: Path) -> None:
    with pytest.raises(RetrievalError, match="does not exist"):
        build_index(tmp_path / "none.jsonl", tmp_path / "index", IndexSpec())
    (tmp_path / "empty.jsonl").write_text("\n \n")
    with pytest.raises(RetrievalError, match="has no passages"):
        build_index(tmp_path / "empty.jsonl", tmp_path / "index", IndexSpec())


def test_reciprocal_rank_prefers_what_both_rankings_know() -> None:
    words, vectors = [Hit(7, 30.0), Hit(2, 20.0), Hit(5, 1.0)], [Hit(9, 0.9), Hit(2, 0.8)]
    fused = fuse([words, vectors])
    assert [hit.number for hit in fused] == [2, 7, 9, 5]
    assert fused[0].score == pytest.approx(2 / 62)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An index with every kind of file."""
    folder = tmp_path_factory.mktemp("hybrid")
    spec = IndexSpec(kind="hybrid", encoder=str(save_encoder(folder / "encoder", "paris berlin capital")))
    return build_index(write_corpus(folder / "corpus.jsonl"), folder / "index", spec).path


def damages(file: Path) -> Iterator[bytes]:
    """The content of a file after each kind of damage."""
    content = file.read_bytes()
    for place in {0, len(content) // 3, len(content) // 2, len(content) - 1}:
        flipped = bytearray(content)
        flipped[place] ^= 1
        yield bytes(flipped)
    yield from (content[: len(content) // 2], b"", bytes(len(content)), content + b"\0", b"[]", b"null", b"\xff\xfe")


@pytest.mark.drill("reliability", "A file of a retrieval index is damaged", "The index is not opened; one sentence")
def test_no_damage_to_an_index_goes_unnoticed(hybrid: Path, tmp_path: Path) -> None:
    open_index(hybrid)
    copy = tmp_path / "index"
    shutil.copytree(hybrid, copy)
    files = sorted(path for path in copy.rglob("*") if path.is_file() and path.stat().st_size)
    assert len(files) > 10
    for file in files:
        content = file.read_bytes()
        for damaged in damages(file):
            file.write_bytes(damaged)
            if file.name == MANIFEST and damaged.strip() == content.strip():
                continue
            with pytest.raises(RetrievalError, match=r"damaged|there is no index|another version"):
                open_index(copy)
        file.unlink()
        with pytest.raises(RetrievalError, match=r"damaged|there is no index"):
            open_index(copy)
        file.write_bytes(content)
    open_index(copy)


def test_an_index_of_an_older_version_is_opened_with_a_warning(
    hybrid: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    copy = tmp_path / "index"
    shutil.copytree(hybrid, copy)
    (copy / MANIFEST).unlink()
    meta = json.loads((copy / "meta.json").read_text(encoding="utf-8"))
    (copy / "meta.json").write_text(json.dumps(meta | {"format": 1}), encoding="utf-8")
    assert ids(open_index(copy), "everest")[0] == "2"
    assert "was written without checksums" in caplog.text
    for name in ("offsets.npy", "passages.jsonl", "vectors.faiss", "meta.json", "bm25/meta.json"):
        content = (copy / name).read_bytes()
        for damaged in (content[: len(content) // 2], b"", b"[]", b"\xff\xfe"):
            (copy / name).write_bytes(damaged)
            with pytest.raises(RetrievalError):
                open_index(copy)
        (copy / name).write_bytes(content)
