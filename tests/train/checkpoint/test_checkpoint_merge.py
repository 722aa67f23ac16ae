"""Adapters and shards are merged into one folder that loads; what cannot be merged is one error sentence."""

import json
from pathlib import Path

import pytest
import torch
from small_models import make_model
from train_cases import files_of_at_most, same, small_policy, weights, write_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from rally.chat import tiny_tokenizer
from rally.cli.main import app
from rally.models.load import load_model, load_tokenizer
from rally.models.lora import LoraSettings, add_adapters
from rally.train.checkpoint.merge import MergeError, merge
from rally.train.checkpoint.store import CheckpointStore, damage

pytest.importorskip("peft")
IDS = torch.arange(20)[None]


@torch.no_grad()
def logits(model: torch.nn.Module) -> torch.Tensor:
    return model(input_ids=IDS).logits


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return write_model(tmp_path / "base")


@pytest.fixture
def adapted(base: Path, tmp_path: Path) -> tuple[Path, torch.Tensor]:
    """A checkpoint of adapters that have an effect, and the model's output with them."""
    model = load_model(str(base))
    add_adapters(model, LoraSettings(rank=4), str(base))
    torch.manual_seed(1)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.2)
    store = CheckpointStore(tmp_path / "checkpoints", warn=pytest.fail)
    return store.save(3, small_policy(model), tiny_tokenizer()), logits(model)


def test_a_checkpoint_of_adapters_becomes_a_model(adapted: tuple[Path, torch.Tensor], base: Path) -> None:
    checkpoint, expected = adapted
    result = CliRunner().invoke(app, ["merge", str(checkpoint)])
    assert result.exit_code == 0, result.output
    merged = checkpoint / "merged"
    model = AutoModelForCausalLM.from_pretrained(merged)
    assert torch.allclose(logits(model), expected, atol=1e-5)
    assert not torch.allclose(logits(AutoModelForCausalLM.from_pretrained(base)), expected, atol=1e-2)
    text = "What is 2+3?"
    assert load_tokenizer(str(merged))(text)["input_ids"] == tiny_tokenizer()(text)["input_ids"]
    assert damage(checkpoint) is None and not list(checkpoint.glob(".writing_*"))


def test_merged_weights_are_rounded_to_the_dtype_of_the_base(
    adapted: tuple[Path, torch.Tensor], base: Path, tmp_path: Path
) -> None:
    half = AutoModelForCausalLM.from_pretrained(base).bfloat16()
    half.save_pretrained(tmp_path / "half")
    folder = merge(adapted[0] / "actor", tmp_path / "out", str(tmp_path / "half")).folder
    model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto")
    assert model.dtype == torch.bfloat16
    assert torch.allclose(logits(model).float(), adapted[1], atol=0.5)


def test_a_base_that_has_moved_is_named_by_hand(adapted: tuple[Path, torch.Tensor], base: Path, tmp_path: Path) -> None:
    moved = base.rename(tmp_path / "moved")
    with pytest.raises(
        MergeError, match=r"the adapters cannot be loaded: .* does not exist; .* or a .gguf file as --base"
    ):
        merge(adapted[0])
    folder = merge(adapted[0], base=str(moved)).folder
    assert torch.allclose(logits(AutoModelForCausalLM.from_pretrained(folder)), adapted[1], atol=1e-5)


def test_shards_become_one_file(tmp_path: Path) -> None:
    model = make_model()
    model.save_pretrained(tmp_path / "shards", max_shard_size="100KB")
    tiny_tokenizer().save_pretrained(tmp_path / "shards")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 2
    merged = merge(tmp_path / "shards", tmp_path / "one")
    assert [p.name for p in merged.folder.glob("*.safetensors")] == ["model.safetensors"]
    assert not (merged.folder / "model.safetensors.index.json").exists() and "merged into one" in merged.what
    assert (merged.folder / "tokenizer.json").read_bytes() == (tmp_path / "shards" / "tokenizer.json").read_bytes()
    assert same(weights(AutoModelForCausalLM.from_pretrained(merged.folder)), weights(model))


def test_what_cannot_be_merged_is_told(adapted: tuple[Path, torch.Tensor], base: Path, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for path, words in (
        (tmp_path / "nowhere", "there is no folder"),
        (base, "is already a single model"),
        (tmp_path / "empty", "holds neither adapter_config.json nor model.safetensors.index.json"),
    ):
        with pytest.raises(MergeError, match=words):
            merge(path)
    (tmp_path / "there").mkdir()
    with pytest.raises(MergeError, match="already exists; remove it, or choose another folder with --out"):
        merge(adapted[0], tmp_path / "there")


@pytest.mark.parametrize("missing", ["a file", "a tensor"])
def test_shards_that_lack_something_give_no_folder(tmp_path: Path, missing: str) -> None:
    shards = tmp_path / "shards"
    make_model().save_pretrained(shards, max_shard_size="100KB")
    index = shards / "model.safetensors.index.json"
    if missing == "a file":
        sorted(shards.glob("*.safetensors"))[0].unlink()
        words = "is missing, so the model cannot be merged"
    else:
        stored = json.loads(index.read_text())
        lost = sorted(stored["weight_map"].values())[0]
        kept = {name: file for name, file in stored["weight_map"].items() if file != lost}
        index.write_text(json.dumps({"weight_map": kept}))
        words = "does not load correctly"
    with pytest.raises(MergeError, match=words):
        merge(shards, tmp_path / "one")
    assert not (tmp_path / "one").exists() and not list(tmp_path.glob(".writing_*"))


@pytest.mark.parametrize("problem", ["a full disk", "a file cut short"])
def test_what_safetensors_refuses_is_told_in_a_sentence(tmp_path: Path, problem: str) -> None:
    shards = tmp_path / "shards"
    make_model().save_pretrained(shards, max_shard_size="100KB")
    if problem == "a full disk":
        words, room = "cannot be merged.*File too large.*free disk space", 100_000
    else:
        words, room = "cannot be merged.*copy a damaged file again", 2**40
        sorted(shards.glob("*.safetensors"))[0].write_bytes(b"cut")
    with files_of_at_most(room), pytest.raises(MergeError, match=words):
        merge(shards, tmp_path / "one")
    assert not (tmp_path / "one").exists() and not list(tmp_path.glob(".writing_*"))
