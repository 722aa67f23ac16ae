"""Dense vectors follow the encoder's conventions for prefix, pooling and length, by its family or its own files."""

import json
from pathlib import Path
from typing import Any

import faiss
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from search_cases import CORPUS, save_encoder, write_corpus
from transformers import AutoModel, AutoTokenizer

from rally.retrieval import IndexSpec, RetrievalError, build_index, dense, open_index
from rally.retrieval.encoder import Encoder, EncoderSettings, pool, settings_for

TEXTS = [row.get("contents") or f'"{row["title"]}"\n{row["text"]}' for row in CORPUS]
WORDS = " ".join(["query:", "passage:", "represent this sentence for searching relevant passages:", "doc:", *TEXTS])
QUERIES = ["capital of france.", "the tallest mountain", "rock"]


def by_hand(model: str | Path, text: str, pooling: str) -> np.ndarray[Any, Any]:
    """The reference: one text, no batch, no padding."""
    ids = AutoTokenizer.from_pretrained(model)(text, return_tensors="pt")
    with torch.no_grad():
        hidden_TH = AutoModel.from_pretrained(model)(**ids).last_hidden_state[0]
    vector_H = {"mean": hidden_TH.mean(0), "cls": hidden_TH[0], "last": hidden_TH[-1]}[pooling]
    unit_H: np.ndarray[Any, Any] = (vector_H / vector_H.norm()).numpy()
    return unit_H


@pytest.mark.parametrize(
    ("name", "pooling", "before_query", "before_passage"),
    [
        ("tiny-e5-base", "mean", "query: ", "passage: "),
        ("bge-tiny-en-v1.5", "cls", "Represent this sentence for searching relevant passages: ", ""),
        ("all-tiny-L2", "mean", "", ""),
    ],
)
def test_scores_are_those_of_the_family(
    tmp_path: Path, name: str, pooling: str, before_query: str, before_passage: str
) -> None:
    model = save_encoder(tmp_path / name, WORDS)
    spec = IndexSpec(kind="dense", encoder=str(model))
    built = build_index(write_corpus(tmp_path / "c.jsonl"), tmp_path / "index", spec)
    assert (built.passages, built.cut) == (5, 0)
    passages = np.stack([by_hand(model, before_passage + text, pooling) for text in TEXTS])
    found = open_index(tmp_path / "index").search(QUERIES, topk=10)
    for query, hits in zip(QUERIES, found, strict=True):
        scores = passages @ by_hand(model, before_query + query, pooling)
        assert [hit.document["id"] for hit in hits] == [str(i) for i in np.argsort(-scores)], "each once, none invented"
        np.testing.assert_allclose([hit.score for hit in hits], np.sort(scores)[::-1], atol=1e-5)


def test_the_encoder_s_own_files_come_before_its_family(tmp_path: Path) -> None:
    model = save_encoder(tmp_path / "e5-renamed", WORDS)
    kinds = ("Transformer", "Pooling", "Normalize")
    files: dict[str, Any] = {
        "modules.json": [{"type": f"sentence_transformers.models.{kind}", "path": f"1_{kind}"} for kind in kinds],
        "1_Pooling/config.json": {"pooling_mode_lasttoken": True, "pooling_mode_mean_tokens": False},
        "config_sentence_transformers.json": {"prompts": {"query": "doc: ", "document": ""}},
        "sentence_bert_config.json": {"max_seq_length": 6},
    }
    (model / "1_Pooling").mkdir()
    for file, content in files.items():
        (model / file).write_text(json.dumps(content))
    expected = EncoderSettings(pooling="last", query_prefix="doc: ", passage_prefix="", max_length=6)
    assert settings_for(str(model), {}) == expected
    assert settings_for(str(model), {"pooling": "cls", "max_length": None}).pooling == "cls"
    encoded = Encoder(str(model), expected, "cpu").passages(["berlin", "paris is the capital of france."])
    assert encoded.cut == 1, "six words and two special tokens are more than 6"
    np.testing.assert_allclose(encoded.vectors[0], by_hand(model, "berlin", "last"), atol=1e-5)


@pytest.mark.parametrize(
    ("model", "recipe"),
    [
        ("intfloat/multilingual-e5-large", EncoderSettings(query_prefix="query: ", passage_prefix="passage: ")),
        ("BAAI/bge-m3", EncoderSettings(pooling="cls")),
        (
            "BAAI/bge-base-zh-v1.5",
            EncoderSettings(pooling="cls", query_prefix="为这个句子生成表示以用于检索相关文章："),
        ),
        ("facebook/contriever", EncoderSettings(normalize=False)),
        ("sentence-transformers/all-MiniLM-L6-v2", EncoderSettings()),
    ],
)
def test_families_are_known_by_name(model: str, recipe: EncoderSettings) -> None:
    assert settings_for(model, {}) == recipe


def test_hnsw_and_hybrid_over_the_same_passages(tmp_path: Path) -> None:
    rows = [{"id": str(i), "contents": " ".join(f"w{(i * 7 + j * j) % 90}" for j in range(9))} for i in range(90)]
    model = save_encoder(tmp_path / "all-tiny", " ".join(f"w{i}" for i in range(90)))
    corpus, encoder = write_corpus(tmp_path / "c.jsonl", rows), str(model)
    build_index(corpus, tmp_path / "flat", IndexSpec(kind="dense", encoder=encoder))
    build_index(corpus, tmp_path / "hnsw", IndexSpec(kind="hybrid", encoder=encoder, vectors="hnsw"))
    queries = [row["contents"] for row in rows[:40]]
    for kind in ("flat", "hnsw"):
        found = open_index(tmp_path / kind).search(queries, 3)
        assert [hits[0].document["id"] for hits in found] == [row["id"] for row in rows[:40]]
        assert {len(hits) for hits in found} == {3}


def test_the_search_by_torch_finds_what_faiss_finds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dense, "CHUNK", 7)  # several chunks, the last one shorter than topk
    rng = np.random.default_rng(0)
    vectors_NH, queries_QH = (rng.standard_normal((n, 16)).astype(np.float32) for n in (30, 5))
    index = faiss.IndexFlatIP(16)
    index.add(vectors_NH)
    for topk in (1, 4, 30):
        spec = dense.OnCpu(index, "flat").nearest(queries_QH, topk)
        found = dense.OnGpu(index, "cpu").nearest(queries_QH, topk)
        np.testing.assert_array_equal(found.numbers_QK, spec.numbers_QK)
        np.testing.assert_allclose(found.scores_QK, spec.scores_QK, atol=2e-2)


def test_an_encoder_that_cannot_be_used_is_said(tmp_path: Path) -> None:
    corpus = write_corpus(tmp_path / "c.jsonl")
    with pytest.raises(RetrievalError, match=r"the encoder .*nowhere cannot be found"):
        build_index(corpus, tmp_path / "i", IndexSpec(kind="dense", encoder=str(tmp_path / "nowhere")))
    model = save_encoder(tmp_path / "projected", "a")
    (model / "modules.json").write_text(json.dumps([{"type": "sentence_transformers.models.Dense"}]))
    with pytest.raises(RetrievalError, match="has a Dense layer after pooling"):
        build_index(corpus, tmp_path / "i", IndexSpec(kind="dense", encoder=str(model)))
    assert not list(tmp_path.glob(".i*"))


@settings(max_examples=25)
@given(lengths=st.lists(st.integers(1, 6), min_size=1, max_size=5), left=st.booleans(), seed=st.integers(0, 99))
@pytest.mark.parametrize("pooling", ["mean", "cls", "last", "max"])
def test_padding_has_no_part_in_a_vector(pooling: Any, lengths: list[int], left: bool, seed: int) -> None:
    hidden_BTH = torch.randn((len(lengths), 6, 4), generator=torch.Generator().manual_seed(seed))
    mask_BT = torch.zeros((len(lengths), 6), dtype=torch.long)
    real = [slice(6 - n, 6) if left else slice(0, n) for n in lengths]
    for row, part in enumerate(real):
        mask_BT[row, part] = 1
    pooled_BH = pool(hidden_BTH, mask_BT, pooling)
    for row, part in enumerate(real):
        alone_BTH = hidden_BTH[row : row + 1, part]
        spec_H = pool(alone_BTH, torch.ones(alone_BTH.shape[:2], dtype=torch.long), pooling)[0]
        torch.testing.assert_close(pooled_BH[row], spec_H)


def test_vectors_that_were_made_before_are_taken_over(tmp_path: Path) -> None:
    model, corpus = save_encoder(tmp_path / "tiny-e5-base", WORDS), write_corpus(tmp_path / "c.jsonl")
    spec = {"kind": "dense", "encoder": str(model)}
    build_index(corpus, tmp_path / "made", IndexSpec(**spec))
    ready = tmp_path / "made" / "vectors.faiss"
    built = build_index(corpus, tmp_path / "brought", IndexSpec(**spec, ready=ready))
    assert built.cut is None and built.passages == 5
    ours, theirs = (open_index(tmp_path / name).search(QUERIES, topk=3) for name in ("made", "brought"))
    assert ours == theirs


def test_vectors_that_do_not_fit_are_told(tmp_path: Path) -> None:
    model, corpus = save_encoder(tmp_path / "tiny-e5-base", WORDS), write_corpus(tmp_path / "c.jsonl")
    by_distance, few = faiss.IndexFlatL2(4), faiss.IndexFlatIP(4)
    few.add(np.ones((2, 4), dtype=np.float32))
    (tmp_path / "torn").write_bytes(b"no index")
    faiss.write_index(by_distance, str(tmp_path / "distance"))
    faiss.write_index(few, str(tmp_path / "few"))
    for name, words in (
        ("distance", "only flat and HNSW indexes by inner product"),
        ("few", "has 2 vectors and the corpus 5 passages"),
        ("torn", "cannot be read as a faiss index"),
    ):
        with pytest.raises(RetrievalError, match=words):
            build_index(corpus, tmp_path / "out", IndexSpec(kind="dense", encoder=str(model), ready=tmp_path / name))
    with pytest.raises(RetrievalError, match="so --faiss has no effect"):
        IndexSpec(ready=tmp_path / "few")
