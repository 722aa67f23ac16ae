"""A small corpus, a real server process over it, and a tiny encoder, for tests of search."""

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx

CORPUS = [
    {"id": "0", "title": "Paris", "text": "Paris is the capital of France."},
    {"id": "1", "title": "Berlin", "text": "Berlin is the capital of Germany."},
    {"id": "2", "contents": '"Mount Everest"\nThe tallest mountain on Earth, in the Himalayas.', "year": 1953},
    {"id": "3", "title": "The Who", "text": "An English rock band."},
    {"id": "4", "title": "東京", "text": "東京は日本の首都です。"},
]


def write_corpus(path: Path, rows: Iterable[Any] = CORPUS) -> Path:
    path.write_text("".join(f"{json.dumps(row, ensure_ascii=False)}\n" for row in rows), encoding="utf-8")
    return path


def free_port() -> int:
    """A port for a server that starts later. It is below those that the kernel gives to outgoing connections, one of
    which could have it by then."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


class Server:
    """A `rally serve retrieval` process that can be killed and restarted at the same port."""

    def __init__(self, index: Path) -> None:
        self._index = index
        self.port = free_port()
        self.base = f"http://127.0.0.1:{self.port}"
        self.url = f"{self.base}/retrieve"
        self.launch()

    def launch(self) -> None:
        command = [sys.executable, "-m", "rally.cli", "serve", "retrieval", str(self._index), "--port", str(self.port)]
        self._process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"OMP_NUM_THREADS": "1"})

    def wait_ready(self) -> None:
        until = time.monotonic() + 280
        while time.monotonic() < until:
            assert self._process.poll() is None, f"the server ended with {self._process.returncode}"
            try:
                assert httpx.get(f"{self.base}/health").status_code == 200
                return
            except httpx.TransportError:
                time.sleep(0.05)
        raise AssertionError("the server does not answer")

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


def save_encoder(folder: Path, vocabulary: str, seed: int = 0) -> Path:
    """A BERT of random weights whose tokens are the words of `vocabulary`."""
    import torch
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
    from transformers import BertConfig, BertModel, PreTrainedTokenizerFast

    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", *dict.fromkeys(vocabulary.lower().split())]
    tokenizer = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.Lowercase()
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    special = {"pad_token": "[PAD]", "unk_token": "[UNK]", "cls_token": "[CLS]", "sep_token": "[SEP]"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    torch.manual_seed(seed)
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = BertConfig(vocab_size=len(words), max_position_embeddings=64, initializer_range=0.5, **sizes)
    BertModel(config).eval().save_pretrained(folder)
    return folder
