"""Codecs over three real tokenizers and the tiny one, built once per session."""

from pathlib import Path

import pytest
from chat_cases import FORMAT, TOOLS
from transformers import AutoTokenizer

from rally.chat import ChatCodec, tiny_tokenizer


@pytest.fixture(scope="session")
def codecs(shared: Path) -> dict[str, ChatCodec]:
    made = {"tiny": ChatCodec(tiny_tokenizer(), "hermes", TOOLS)}
    for name in ("qwen2_5", "qwen3", "llama3_2"):
        tokenizer = AutoTokenizer.from_pretrained(shared / "tokenizers" / name)
        made[name] = ChatCodec(tokenizer, FORMAT[name], TOOLS)
    return made


@pytest.fixture(scope="session")
def tiny() -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), "hermes", TOOLS)
