"""A tiny model that has memorised one tool call, and a `rally serve engine` process that serves it."""

import os
import random
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import httpx
import torch
import uvicorn
from forked import forked_command
from transformers import PreTrainedModel, Qwen2Config, Qwen2ForCausalLM

from rally.chat import ChatCodec, tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.engines.remote import Rally, ServerReplica
from rally.services.admission import Served
from rally.services.engine import create_app

ROOT = Path(__file__).resolve().parents[2]
NAME = "tiny"
TOKEN = "a token of the tests"
HIDDEN = ("--hidden-tools",)  # the tiny template does not show them
QUESTION = [{"role": "user", "content": "What is 12*3?"}]
CALL = {"name": "calculator", "arguments": {"expression": "12*3"}}
PARAMETERS = {"type": "object", "properties": {"expression": {"type": "string"}}, "required": ["expression"]}
TOOLS = [{"type": "function", "function": {"name": "calculator", "description": "", "parameters": PARAMETERS}}]


def write_model(folder: Path) -> Path:
    """A model that greedily calls the calculator after QUESTION, and writes random tokens after anything else."""
    tokenizer = tiny_tokenizer()
    torch.manual_seed(0)
    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = Qwen2Config(
        vocab_size=len(tokenizer), num_key_value_heads=2, max_position_embeddings=1024, initializer_range=0.1, **sizes
    )
    model = Qwen2ForCausalLM(config)
    learn_call(model, ChatCodec(tokenizer, tools=TOOLS))
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.eval().save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def learn_call(model: PreTrainedModel, codec: ChatCodec) -> None:
    function: dict[str, Any] = {"id": "call_0", "type": "function", "function": CALL}
    reply = {"role": "assistant", "content": "", "tool_calls": [function]}
    ids, mask, _ = codec.encode_conversation([*QUESTION, reply])
    ids_1T = torch.tensor([ids])
    labels_1T = torch.where(torch.tensor([mask]) == 1, ids_1T, -100)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(40):
        loss = model(input_ids=ids_1T, labels=labels_1T).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.1, "the call was not learned"


def free_port() -> int:
    """A port for a server that starts later. It is below those that the kernel gives to outgoing connections, one of
    which could have it by then."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


START_SECONDS = 280  # less than the limit of a test; one that ends is noticed at once


class EngineProcess:
    """`rally serve engine`, which can be killed."""

    def __init__(self, folder: Path, *options: str) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        words = [
            "-m",
            "rally.cli",
            "serve",
            "engine",
            str(folder),
            "--port",
            str(self.port),
            "--name",
            NAME,
            "--memory",
            "0.02",
            *HIDDEN,
            *options,
        ]
        environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        self._process = subprocess.Popen(forked_command(words), stdout=subprocess.DEVNULL, env=environment)

    def wait_ready(self) -> None:
        until = time.monotonic() + START_SECONDS
        while time.monotonic() < until:
            assert self._process.poll() is None, f"the server ended with {self._process.returncode}"
            try:
                assert httpx.get(f"{self.url}/health").status_code == 200
                return
            except httpx.TransportError:
                time.sleep(0.1)
        raise AssertionError("the server does not answer")

    def metrics(self) -> dict[str, float]:
        lines = httpx.get(f"{self.url}/metrics").text.splitlines()
        return {name: float(value) for name, value in (ln.rsplit(" ", 1) for ln in lines if not ln.startswith("#"))}

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()


class ServedModel:
    """Rally's own server over HTTP, in a thread."""

    def __init__(self, model: PreTrainedModel, max_model_len: int = 64) -> None:
        self.engine = EmbeddedEngine(model, EngineSettings(max_model_len=max_model_len, max_num_seqs=16))
        served = Served(engine=self.engine, tokenizer=tiny_tokenizer(), name="tiny")
        app = create_app(served, TOKEN, accepts_weights=True)
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        self._server = uvicorn.Server(uvicorn.Config(app, port=port, log_level="error"))
        self._thread = Thread(target=self._server.run, daemon=True)

    def replica(self) -> ServerReplica:
        return ServerReplica(self.url, Rally(), token=TOKEN)

    @property
    def weights(self) -> dict[str, torch.Tensor]:
        return self.engine.core.model.state_dict()

    @contextmanager
    def running(self) -> Iterator["ServedModel"]:
        self._thread.start()
        while not self._server.started:
            time.sleep(0.01)
        try:
            yield self
        finally:
            self._server.should_exit = True
            self._thread.join()
