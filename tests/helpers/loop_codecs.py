"""Codecs over three real tokenizers and the tiny one, built once, all with the tools `calculator` and `search`."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rally.chat import ChatCodec, tiny_tokenizer

FORMATS = {"qwen2_5": "hermes", "qwen3": "qwen3", "llama3_2": "llama3_json"}


def schema(name: str, parameter: str) -> dict[str, Any]:
    parameters = {"type": "object", "properties": {parameter: {"type": "string"}}, "required": [parameter]}
    return {"type": "function", "function": {"name": name, "description": "A tool.", "parameters": parameters}}


TOOLS = [schema("calculator", "expression"), schema("search", "query")]


@pytest.fixture(scope="session")
def codecs(shared: Path) -> dict[str, ChatCodec]:
    made = {"tiny": ChatCodec(tiny_tokenizer(), "hermes", TOOLS)}
    for name, tool_format in FORMATS.items():
        made[name] = ChatCodec(AutoTokenizer.from_pretrained(shared / "tokenizers" / name), tool_format, TOOLS)
    return made


@pytest.fixture(scope="session")
def tiny() -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), "hermes", TOOLS)
