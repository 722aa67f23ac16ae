"""Stages end when they should, and every command that they run is valid for the recipes."""

import sys
import time
from pathlib import Path

import pytest

from benchmarks import recipe_runs
from benchmarks.recipe_runs import Stage, plans, play
from rally.config import load_config, load_sft_config
from rally.config.yaml_files import read_document
from rally.recipes import find_recipe, list_recipes

TRAINING = """
import sys, time
from pathlib import Path
from rally.track import RunFolder
folder = RunFolder("runs/rally/one").create()
(folder.path / "checkpoints" / "global_step_2").mkdir(parents=True)
folder.log_metrics(1, {"reward/score/mean": 0.5, "val-core/x/acc/mean@1": 0.25})
if sys.argv[1] == "whole":
    folder.log_metrics(2, {"reward/score/mean": 0.5, "val-core/x/acc/mean@1": 0.75})
time.sleep(60)
"""


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("how", "seconds", "told"),
    [("whole", 50.0, "ended after its last validation"), ("half", 4.0, "ended, the time is up")],
)
def test_a_training_ends_with_its_last_validation_or_the_time(here: Path, how: str, seconds: float, told: str) -> None:
    command = [sys.executable, "-c", TRAINING, how]
    assert play(Stage("one", (), steps=2), command, time.monotonic() + seconds) == told
    assert (here / "runs/rally/one/metrics.jsonl").exists() and not (here / "runs/rally/one/checkpoints").exists()


def test_what_fails_and_what_comes_too_late_is_told(here: Path) -> None:
    command = [sys.executable, "-c", "print('no'); raise SystemExit(3)"]
    assert play(Stage("two", ()), command, time.monotonic() + 50) == "failed (3), see runs/printed/two.txt"
    assert Path("runs/printed/two.txt").read_text() == "no\n"
    assert play(Stage("two", ()), command, time.monotonic() - 1) == "not begun, the time is up"


def test_of_a_supervised_start_the_weights_stay(here: Path) -> None:
    step = here / "runs/rally/taught/checkpoints/global_step_4"
    for file in (step / "trainer.pt", step / "actor/model.safetensors"):
        file.parent.mkdir(parents=True, exist_ok=True)
        file.touch()
    for words, there in ((("eval",), True), (("sft",), False)):
        assert play(Stage("taught", words), [sys.executable, "-c", ""], time.monotonic() + 50) == "done"
        assert (step / "trainer.pt").exists() == there and (step / "actor/model.safetensors").exists()


def test_plans_are_known_by_name_and_runs_that_are_there_are_left_alone(
    here: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe_runs.main(["dapo", "--model", "M", "--dry", "trainer.seed=3"])
    assert "train --recipe gsm8k_tool/dapo trainer.total_training_steps=12" in capsys.readouterr().out
    with pytest.raises(SystemExit):
        recipe_runs.main(["drill", "--model", "M"])
    assert "there is no plan drill" in capsys.readouterr().err
    (here / "runs/rally/gsm8k_12_steps_dapo").mkdir(parents=True)
    with pytest.raises(SystemExit):
        recipe_runs.main(["ppo", "dapo", "--model", "M"])
    assert "runs/rally/gsm8k_12_steps_dapo would be written to, and is there already" in capsys.readouterr().err


@pytest.mark.parametrize(
    "stage", [stage for stages in plans("MODEL").values() for stage in stages], ids=lambda s: s.name
)
def test_every_command_is_one_that_its_recipe_takes(here: Path, stage: Stage) -> None:
    command, _, recipe, *keys = stage.words
    for key in keys:
        if "checkpoints/" in key:  # of an earlier stage
            (here / key.partition("=")[2]).mkdir(parents=True)
    for one in list_recipes():
        for needed in read_document(one.path).notes.needs:
            (here / needed / "bin").mkdir(parents=True, exist_ok=True)
            for made in ("train.parquet", "test.parquet", "sft.parquet", "sft.jsonl", "bin/python"):
                (here / needed / made).touch()
    if command == "sft":
        assert load_sft_config(find_recipe(recipe, "sft"), keys).trainer.run_dir == stage.folder
        return
    trainer = load_config(find_recipe(recipe, "eval" if command == "eval" else "train"), keys).trainer
    assert trainer.run_dir == stage.folder
    assert stage.steps in (None, trainer.total_training_steps)
    assert command == "eval" or trainer.total_training_steps % trainer.test_freq == 0, "the last step is validated"
