"""No damaged checkpoint is resumed, merged or evaluated: an older one is used, or the reason is one sentence."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from train_cases import Paper, run_config, write_model

from rally.models.load import LoadError, load_model
from rally.runs.train import train
from rally.train.checkpoint.merge import MergeError, merge
from rally.train.checkpoint.store import CheckpointError, open_checkpoint
from rally.types import RallyError
from rally.util.checksums import MANIFEST, read_manifest, seal

NO_VALIDATION = ("data.val_files=null", "trainer.val_before_train=false")


@pytest.fixture(scope="module")
def finished(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two steps with a checkpoint after each."""
    folder = tmp_path_factory.mktemp("finished") / "run"
    train(run_config(home, folder, "trainer.total_training_steps=2", *NO_VALIDATION), Paper().console)
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished, tmp_path / "run")
    return tmp_path / "run"


def resume(home: Path, run: Path, *overrides: str) -> str:
    paper = Paper()
    train(run_config(home, run, "trainer.total_training_steps=3", *NO_VALIDATION, *overrides), paper.console)
    return paper.text


def checkpoint(run: Path, step: int) -> Path:
    return run / "checkpoints" / f"global_step_{step}"


def flip(file: Path) -> None:
    """Change the lowest bit of the byte in the middle: the last place of a number, which any reader accepts."""
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


@pytest.mark.parametrize("name", ["actor/model.safetensors", "trainer.pt", "sampler.json", "counters.json"])
@pytest.mark.drill(
    "reliability", "A bit of the newest checkpoint flips", "The run resumes from the one before it, with a warning"
)
def test_a_flipped_bit_makes_the_run_resume_from_the_older_checkpoint(home: Path, run: Path, name: str) -> None:
    if not (checkpoint(run, 2) / name).exists():
        pytest.skip("this run has no such part")
    flip(checkpoint(run, 2) / name)
    said = resume(home, run)
    assert f"global_step_2 is damaged ({name} was changed after it was written: its checksum differs)" in said
    assert "global_step_1 is used instead" in said and "global_step_1, step 1" in said
    assert open_checkpoint(checkpoint(run, 3)).step == 3


@pytest.mark.drill("reliability", "Every checkpoint is damaged", "The run stops with one sentence")
def test_a_run_without_a_good_checkpoint_stops(home: Path, run: Path) -> None:
    flip(checkpoint(run, 1) / "trainer.pt")
    flip(checkpoint(run, 2) / "trainer.pt")
    with pytest.raises(CheckpointError, match=r"global_step_2 is damaged .*, nor can the 1 before it; copy a good one"):
        resume(home, run)
    assert sorted(p.name for p in (run / "checkpoints").glob("global_step_*")) == ["global_step_1", "global_step_2"]
    path = f"trainer.resume_from_path={checkpoint(run, 2)}"
    with pytest.raises(CheckpointError, match=r"global_step_2 cannot be used: trainer.pt was changed"):
        resume(home, run, "trainer.resume_mode=resume_path", path)


def test_a_checkpoint_of_an_older_version_is_used_with_a_note(home: Path, run: Path) -> None:
    sizes = {name: record.size for name, record in read_manifest(checkpoint(run, 2)).items()}
    (checkpoint(run, 2) / MANIFEST).write_text(json.dumps(sizes), encoding="utf-8")
    said = resume(home, run)
    assert "global_step_2 was written without checksums; only the sizes were compared" in said
    assert "global_step_2, step 2" in said


def test_the_weights_of_a_checkpoint_are_compared_wherever_they_are_loaded(run: Path) -> None:
    load_model(str(checkpoint(run, 2) / "actor"))
    flip(checkpoint(run, 2) / "actor" / "model.safetensors")
    with pytest.raises(LoadError, match=r"actor is damaged \(actor/model.safetensors was changed after it was written"):
        load_model(str(checkpoint(run, 2) / "actor"))


def test_a_damaged_checkpoint_is_not_merged(run: Path) -> None:
    actor = checkpoint(run, 2) / "actor"
    weights = load_file(actor / "model.safetensors")
    half = dict(list(weights.items())[::2])
    save_file(half, actor / "a.safetensors", {"format": "pt"})
    save_file({n: v for n, v in weights.items() if n not in half}, actor / "b.safetensors", {"format": "pt"})
    places = {name: "a.safetensors" if name in half else "b.safetensors" for name in weights}
    (actor / "model.safetensors").unlink()
    (actor / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}), encoding="utf-8")
    seal(checkpoint(run, 2))
    flip(actor / "b.safetensors")
    for named in (checkpoint(run, 2), actor):
        with pytest.raises(MergeError, match=r"is damaged \(actor/b.safetensors was changed"):
            merge(named, run / "merged")
    flip(actor / "b.safetensors")  # as it was
    merge(checkpoint(run, 2), run / "merged")
    flip(run / "merged" / "model.safetensors")
    with pytest.raises(LoadError, match=r"merged is damaged \(model.safetensors was changed"):
        load_model(str(run / "merged"))


def other_model(run: Path, folder: Path) -> None:
    """Weights of other names in the place of the checkpoint's."""
    weights = load_file(checkpoint(run, 2) / "actor" / "model.safetensors")
    save_file({f"other.{n}": v for n, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def other_shapes(run: Path, folder: Path) -> None:
    weights = load_file(folder / "model.safetensors")
    save_file({n: torch.cat([v, v]) for n, v in weights.items()}, folder / "model.safetensors", {"format": "pt"})


def other_optimizer(run: Path, folder: Path) -> None:
    state = torch.load(folder.parent / "trainer.pt", weights_only=True)
    for one in state["optimizer"]["state"].values():
        one["exp_avg"] = torch.zeros(3)
    torch.save(state, folder.parent / "trainer.pt")


def empty_state(run: Path, folder: Path) -> None:
    torch.save({}, folder.parent / "trainer.pt")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (other_model, "are not those of the model that its config.json describes: .* is missing, and"),
        (other_shapes, "cannot be loaded"),
        (
            other_optimizer,
            r"trainer.pt does not fit this run \(exp_avg of .* should have the shape .*, and has \(3,\)\)",
        ),
        (empty_state, "trainer.pt does not fit this run"),
    ],
)
@pytest.mark.drill("reliability", "A checkpoint holds parts of another model", "The run stops with one sentence")
def test_a_checkpoint_of_another_model_is_refused(home: Path, run: Path, change, words: str) -> None:  # type: ignore[no-untyped-def]
    change(run, checkpoint(run, 2) / "actor")
    seal(checkpoint(run, 2))
    with pytest.raises(RallyError, match=words):
        resume(home, run)


def test_a_checkpoint_of_another_size_of_model_is_refused(home: Path, run: Path, tmp_path: Path) -> None:
    """Weights and optimizer fit each other, but not the model of the configuration."""
    model = write_model(tmp_path / "wide")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 64}), encoding="utf-8")
    with pytest.raises(LoadError, match=r"is of another model than .*: hidden_size is 32 instead of 64"):
        resume(home, run, f"actor_rollout_ref.model.path={model}")
