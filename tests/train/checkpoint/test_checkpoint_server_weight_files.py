"""Weight folders for servers equal, byte for byte, those of transformers, and are never incomplete."""

import os
from pathlib import Path

import pytest
import torch
from small_models import make_model
from transformers import AutoModelForCausalLM, PreTrainedModel

from rally.train.checkpoint.server_weight_files import WeightWriter, layout_of


def contents(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def change(model: PreTrainedModel) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter))


@pytest.mark.parametrize("family", ["qwen2", "gemma3"], ids=["untied", "tied"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_each_folder_is_what_transformers_would_write(tmp_path: Path, family: str, dtype: torch.dtype) -> None:
    model = make_model(family).to(dtype)

    def first(folder: Path) -> None:
        model.save_pretrained(folder, max_shard_size="100KB")

    written = []
    writer = WeightWriter(lambda folder: (written.append(folder), first(folder)), model.state_dict)
    for number in range(3):
        writer(tmp_path / str(number))
        first(tmp_path / "expected")
        assert contents(tmp_path / str(number)) == contents(tmp_path / "expected")
        assert len(list((tmp_path / str(number)).glob("*.safetensors"))) > 1
        change(model)
    assert written == [tmp_path / "0"], "transformers writes the first alone"


def test_a_folder_with_other_names_or_values_is_always_left_to_transformers(tmp_path: Path) -> None:
    model = make_model("qwen2")
    renamed = {f"other.{name}": weight for name, weight in model.state_dict().items()}
    writer = WeightWriter(model.save_pretrained, lambda: renamed)
    for number in range(2):
        change(model)
        writer(tmp_path / str(number))
        loaded = AutoModelForCausalLM.from_pretrained(tmp_path / str(number))
        assert all(map(torch.equal, loaded.state_dict().values(), model.state_dict().values()))
    change(model)
    assert layout_of(tmp_path / "1", model.state_dict()) is None


def test_a_full_disk_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("qwen2")
    writer = WeightWriter(model.save_pretrained, model.state_dict)
    writer(tmp_path / "first")

    def full(file: int, data: memoryview, start: int) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.pwrite", full)
    with pytest.raises(OSError, match="No space left"):
        writer(tmp_path / "second")


def test_a_large_weight_is_written_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, write = make_model("qwen2"), os.pwrite
    monkeypatch.setattr("rally.train.checkpoint.server_weight_files.PIECE", 1000)
    monkeypatch.setattr("os.pwrite", lambda file, data, start: write(file, data[:300], start))  # short writes
    writer = WeightWriter(model.save_pretrained, model.state_dict)
    for name in ("first", "second"):
        writer(tmp_path / name)
    assert contents(tmp_path / "first") == contents(tmp_path / "second")
