"""The mismatch benchmark compares log-probabilities of trainer and engine token by token, and detects a difference."""

import asyncio
import json
import math
from pathlib import Path

import pytest
import torch

from benchmarks import mismatch
from rally.chat import tiny_tokenizer
from rally.demo.training_stages import small_model
from rally.engines.embedded import EngineSettings
from rally.models.load import load_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("mismatch") / "model"
    tokenizer = tiny_tokenizer()
    small_model(tokenizer, seed=0).save_pretrained(path)
    tokenizer.save_pretrained(path)
    return path


def test_the_numbers_by_hand() -> None:
    found = mismatch.Mismatch.of(torch.tensor([-1.0, -3.5, -0.1]), torch.tensor([-1.0, -3.0, -0.12]))
    k3 = (0 + (math.exp(-0.5) - 1 + 0.5) + (math.exp(0.02) - 1 - 0.02)) / 3
    assert (found.tokens, found.equal) == (3, 1) and found.far == pytest.approx(2 / 3)
    assert found.k3 == pytest.approx(k3, rel=1e-4) and found.most == pytest.approx(0.5)
    assert found.most_likely == pytest.approx(0.02, abs=1e-6), "exp(-3) is below 0.1"


def test_engine_and_trainer_agree_over_a_saved_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [{"question": "What is 2+2?"}, {"prompt": [{"role": "user", "content": "Compute 3*4"}]}]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    chosen = ["--model", str(folder), "--dtype", "float32", "--episodes", "5", "--new", "6"]
    mismatch.main([*chosen, "--prompts", str(tmp_path / "rows.jsonl")])
    printed = dict(line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines()[1:])
    printed = {name.strip(): value for name, value in printed.items()}
    assert int(printed["tokens compared"]) >= 5 and float(printed["mean k3"]) < 1e-9
    assert float(printed["largest |d|"]) < 1e-4
    mismatch.main([*chosen, "--prompts", str(tmp_path / "rows.jsonl"), "--quantization", "fp8"])
    printed = dict(line.rsplit("  ", 1) for line in capsys.readouterr().out.splitlines()[1:])
    printed = {name.strip(): value for name, value in printed.items()}
    assert 1e-4 < float(printed["mean |d|"]) < float(printed["largest |d|"]) < 1


def test_a_trainer_with_other_weights_is_seen(folder: Path) -> None:
    model = load_model(str(folder), dtype="float32")
    segments = asyncio.run(mismatch.sample(model, EngineSettings(max_model_len=32), [[5, 6, 7], [8, 9]], 8, ()))
    assert mismatch.Mismatch.of(*mismatch.compare(model, segments)).most < 1e-4
    with torch.no_grad():
        model.get_input_embeddings().weight *= 1.5
    assert mismatch.Mismatch.of(*mismatch.compare(model, segments)).k3 > 1e-3


def test_save_writes_a_folder_in_the_asked_type(folder: Path, tmp_path: Path) -> None:
    mismatch.main(["--model", str(folder), "--dtype", "bfloat16", "--save", str(tmp_path / "saved")])
    saved = load_model(str(tmp_path / "saved"), dtype="bfloat16")
    original = load_model(str(folder), dtype="bfloat16").state_dict()
    assert all(torch.equal(weight, original[name]) for name, weight in saved.state_dict().items())
    assert (tmp_path / "saved" / "tokenizer.json").is_file()


def test_rows_without_a_question_are_refused(tmp_path: Path, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "rows.jsonl").write_text('{"text": "hello"}\n')
    with pytest.raises(SystemExit):
        mismatch.main(["--model", str(folder), "--dtype", "float32", "--prompts", str(tmp_path / "rows.jsonl")])
    assert "question" in capsys.readouterr().err


def test_the_fixed_prompts_are_many_and_distinct() -> None:
    assert len(set(mismatch.PROMPTS)) == 64
