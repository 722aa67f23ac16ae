"""Errors of `rally serve engine` name its own options, never a key of a training run."""

import json
import re
from pathlib import Path

import pytest
import torch
from small_models import make_model
from transformers import Qwen3MoeConfig
from typer.testing import CliRunner

from rally.chat import tiny_tokenizer
from rally.cli.serve import app
from rally.engines import EmbeddedEngine, EngineError, EngineSettings
from rally.engines.embedded.settings import OptionNames
from rally.types import RallyError, SamplingParams

KEY = re.compile(r"\b(rollout|trainer|model|data|actor_rollout_ref)\.\w+")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with an unlimited context length in its configuration, and its tokenizer."""
    folder = tmp_path_factory.mktemp("served")
    model = make_model()
    model.resize_token_embeddings(len(tiny_tokenizer()))
    model.config.max_position_embeddings = 10**10
    model.save_pretrained(folder)
    tiny_tokenizer().save_pretrained(folder)
    return folder


def said(monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setattr("uvicorn.run", lambda *_, **__: pytest.fail("it serves"))
    mistake = CliRunner().invoke(app, ["engine", *words, "--port", "0"]).exception
    assert isinstance(mistake, RallyError), mistake
    assert not KEY.search(str(mistake)) and "\n" not in str(mistake)
    return str(mistake)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--device", "gpu"), "--device=gpu is not a device; choose auto, cpu, cuda"),
        (("--max-model-len", str(10**10 + 1)), "but the model supports at most 10000000000; lower --max-model-len"),
        (("--max-model-len", str(10**10)), "that --memory=0.5 allows; raise it, or lower --max-model-len"),
        (("--tokenizer", "/nowhere"), "or a .gguf file as --tokenizer"),
        (("--tool-format", "xml"), "unknown tool-call format 'xml'; choose one of"),
        (("--speculative-config", "ngram"), "--speculative-config=ngram: Invalid JSON"),
        (("--speculative-config", '{"method": "eagle"}'), "method: Input should be 'ngram'"),
        (("--speculative-config", '{"prompt_lookup_min": 9}'), "prompt_lookup_min is more than prompt_lookup_max"),
        (("--speculative-config", '{"num_speculative_tokens": 3}'), 'without a method; add "method": "ngram"'),
        (("--quantization", "fp8", "--accept-weights"), "--quantization=fp8 does not work with --accept-weights"),
    ],
)
def test_options_are_named(folder: Path, options: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert words in said(monkeypatch, str(folder), *options)


def test_a_model_is_served_in_fp8(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("uvicorn.run", lambda app, *_, **__: None)
    options = ["--quantization", "fp8", "--port", "0", "--max-model-len", "128", "--device", "cpu"]
    done = CliRunner().invoke(app, ["engine", str(folder), *options])
    assert done.exit_code == 0, done.exception
    text = " ".join(done.output.split())
    assert "start-up check: the rollout in FP8 differs by at most" in text
    assert "21 linear layers of the rollout compute in FP8" in text and "GiB for FP8 weights" in text


def test_experts_are_refused_before_weights_are_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    Qwen3MoeConfig().save_pretrained(tmp_path)
    told = said(monkeypatch, str(tmp_path), "--quantization", "fp8", "--device", "cpu")
    assert told == "--quantization=fp8 does not support qwen3_moe, which has experts; leave it out"


def test_a_gpu_that_is_not_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    told = said(monkeypatch, "x", "--device", "cuda")
    assert told == "--device=cuda, but torch finds no GPU; use --device=cpu or leave it out"
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    assert "but the last GPU that torch finds is cuda:1" in said(monkeypatch, "x", "--device", "cuda:2")


def test_the_model_is_named_as_in_the_usage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "without config.json; set MODEL to the folder that has it" in said(monkeypatch, str(tmp_path))
    assert said(monkeypatch, "nowhere.gguf") == "there is no GGUF file at nowhere.gguf; correct MODEL"
    (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}), encoding="utf-8")
    told = said(monkeypatch, str(tmp_path))
    hint = f"merge it into a whole model with: rally merge {tmp_path}"
    assert told == f"{tmp_path} contains LoRA adapters, not a whole model; {hint}"


async def test_a_client_is_told_in_the_same_words() -> None:
    settings = EngineSettings(
        max_model_len=32, max_num_seqs=2, option_names=OptionNames(max_model_len="--max-model-len")
    )
    engine = EmbeddedEngine(make_model(), settings, num_pages=8)
    try:
        for length, asked in ((40, 1), (20, 20)):
            with pytest.raises(EngineError, match=r"is 32 tokens \(--max-model-len\); "):
                await engine.generate([1] * length, SamplingParams(max_tokens=asked))
    finally:
        await engine.close()
