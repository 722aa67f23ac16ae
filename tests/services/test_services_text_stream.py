"""Streamed pieces of text add up to the whole text, also if a token ends inside a character."""

from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from rally.models.load import load_tokenizer
from rally.services.openai_responses import TextStream, before_stop

BITS = ["a", "é", "東京", "🧑‍🚀", " ", "\n", "the end", "<|", "stop", "sto"]
TEXTS = st.lists(st.sampled_from(BITS), max_size=12).map("".join)
STOPS = st.lists(st.sampled_from(["stop", "top!", "京", "\n\n", "the"]), max_size=3)


@pytest.fixture(scope="module", params=["qwen3", "llama3_2"])
def tokenizer(request: pytest.FixtureRequest, shared: Path) -> PreTrainedTokenizerBase:
    return load_tokenizer(str(shared / "tokenizers" / request.param))


@given(text=TEXTS, stops=STOPS, sizes=st.lists(st.integers(1, 3), min_size=1, max_size=4))
def test_pieces_are_the_whole(
    tokenizer: PreTrainedTokenizerBase, text: str, stops: list[str], sizes: list[int]
) -> None:
    def decode(ids: Sequence[int]) -> str:
        return str(tokenizer.decode(list(ids)))

    ids = tokenizer.encode(text, add_special_tokens=False)
    stream = TextStream(decode, stops)
    whole = before_stop(decode(ids), stops)
    pieces, at = [], 0
    while at < len(ids):
        size = sizes[len(pieces) % len(sizes)]
        pieces.append(stream.push(ids[at : at + size]))
        at += size
    assert whole.startswith("".join(pieces)), "nothing that a stop string takes back was sent"
    assert "".join(pieces) + stream.finish(whole) == whole
    assert not any(piece.endswith("\ufffd") for piece in pieces)
