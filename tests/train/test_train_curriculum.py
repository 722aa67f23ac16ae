"""A run follows its curriculum, reports its metrics, and resumes with the state of its sampler."""

import json
import shutil
from pathlib import Path

import pytest
from train_cases import EASY, Paper, run_config, small_policy
from transformers import AutoModelForCausalLM

from rally.chat import tiny_tokenizer
from rally.data import DataError, write_rows
from rally.recipes.arithmetic import data as arithmetic
from rally.runs.dry_run import dry_run
from rally.runs.train import train
from rally.track import MetricsRow, RunFolder
from rally.train.checkpoint.store import CheckpointError, CheckpointStore

BY_SUCCESS = ("data.curriculum.by=success", "data.val_files=null", "trainer.val_before_train=false")


def tried(folder: Path, step: int) -> list[str]:
    """The rows of a step, in the order of their groups."""
    return list(dict.fromkeys(episode.task.id for episode in RunFolder(folder).read_episodes(step)))


def curriculum(folder: Path, step: int) -> dict[str, float]:
    [row] = [r for r in RunFolder(folder).read_metrics() if isinstance(r, MetricsRow) and r.step == step]
    return {k.removeprefix("curriculum/"): v for k, v in row.metrics.items() if k.startswith("curriculum/")}


def state(folder: Path, step: int) -> dict[str, list[float]]:
    found = json.loads((folder / "checkpoints" / f"global_step_{step}" / "sampler.json").read_text())["state"]
    assert isinstance(found, dict)
    return found


@pytest.fixture(scope="module")
def measured(home: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of three steps by measured success. Only read."""
    folder = tmp_path_factory.mktemp("curriculum") / "run"
    train(run_config(home, folder, *BY_SUCCESS), Paper().console)
    return folder


def test_the_checkpoint_holds_what_the_episodes_showed(measured: Path) -> None:
    rewards: dict[str, list[float]] = {}
    for episode in RunFolder(measured).read_episodes(1):
        rewards.setdefault(episode.task.id, []).append(float(episode.reward or 0.0))
    assert state(measured, 1) == {row: [sum(r >= 0.5 for r in rs) / 4, 1] for row, rs in rewards.items()}
    metrics = curriculum(measured, 3)
    assert metrics["unseen_share"] == pytest.approx(1 - len(state(measured, 3)) / 12)
    shares = ("solved_share", "target_share", "unsolved_share", "unseen_share")
    assert sum(metrics[name] for name in shares) == pytest.approx(1) and 0 <= metrics["difficulty"] <= 1


def test_a_resumed_run_chooses_the_rows_that_the_first_one_chose(home: Path, measured: Path, tmp_path: Path) -> None:
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "global_step_3")
    train(run_config(home, run, *BY_SUCCESS), Paper().console)
    assert tried(run, 3) == tried(measured, 3)
    assert state(run, 3) == state(measured, 3) and curriculum(run, 3) == curriculum(measured, 3)
    assert len(tried(run, 3)) == 3 and tried(run, 3) != tried(run, 1)


def test_easy_rows_come_first(home: Path, tmp_path: Path, paper: Paper) -> None:
    rows = list(arithmetic.rows(12, 0, "train", EASY))
    for place, row in enumerate(rows):
        row["extra_info"] = {**row["extra_info"], "level": 12 - place}
    write_rows(rows, tmp_path / "train.parquet")
    overrides = (
        f"data.train_files={tmp_path / 'train.parquet'}",
        "data.curriculum={by: field, field: extra_info.level, start_share: 0.25, grow_steps: 3}",
        "trainer.total_training_steps=2",
        *BY_SUCCESS[1:],
    )
    config = run_config(home, tmp_path / "run", *overrides)
    dry_run(config, paper.console)
    assert "EasyToHard" in paper.text
    train(config, Paper().console)
    assert sorted(tried(tmp_path / "run", 1)) == ["train:10", "train:11", "train:9"]
    assert curriculum(tmp_path / "run", 1) == {"difficulty": 2.0, "open_share": 0.25}
    assert curriculum(tmp_path / "run", 2)["open_share"] == 0.5
    assert not (tmp_path / "run" / "checkpoints" / "global_step_2" / "sampler.json").exists(), "it learns nothing"
    with pytest.raises(DataError, match="must name a number in every row"):
        train(run_config(home, tmp_path / "other", *overrides, "data.curriculum.field=level"), Paper().console)


OWN = """
from rally.data import RowSampler

class LastRows(RowSampler):
    calls = 0
    def batch(self, step):
        return [len(self.tasks) - 1 - self.calls] * self.settings.batch_size
    def update(self, step, episodes):
        self.calls += 1
        return {"calls": self.calls}
    def state(self):
        return {"calls": self.calls}
    def load_state(self, state):
        self.calls = state["calls"]
"""


def test_a_users_class_chooses_learns_and_is_resumed(home: Path, tmp_path: Path) -> None:
    (tmp_path / "own.py").write_text(OWN, encoding="utf-8")
    overrides = (
        f"data.sampler.class_path={tmp_path / 'own.py'}",
        "data.sampler.class_name=LastRows",
        "trainer.total_epochs=3",
        *BY_SUCCESS[1:],
    )
    run = tmp_path / "run"
    train(run_config(home, run, *overrides, "trainer.total_training_steps=1"), Paper().console)
    train(run_config(home, run, *overrides, "trainer.total_training_steps=2"), Paper().console)
    assert [tried(run, step) for step in (1, 2)] == [["train:11"], ["train:10"]]
    assert curriculum(run, 2) == {"calls": 2} and state(run, 2) == {"calls": 2}


def test_another_sampler_begins_anew_and_says_so(home: Path, measured: Path, tmp_path: Path, paper: Paper) -> None:
    run = Path(shutil.copytree(measured, tmp_path / "run"))
    shutil.rmtree(run / "checkpoints" / "global_step_3")
    train(run_config(home, run, *BY_SUCCESS[1:]), paper.console)
    assert "state of the sampler SolvedSometimes; RowSampler starts without a state" in paper.text
    assert curriculum(run, 3) == {}


@pytest.mark.parametrize("bad", [{"x": {1, 2}}, {"x": {1: 2}}, {"x": (1, 2)}, {"x": float("nan")}])
def test_a_state_that_would_not_come_back_is_refused(home: Path, tmp_path: Path, bad: dict[str, object]) -> None:
    policy = small_policy(AutoModelForCausalLM.from_pretrained(home / "model"))
    store = CheckpointStore(tmp_path, warn=print)
    with pytest.raises(CheckpointError, match="return JSON values"):
        store.save(1, policy, tiny_tokenizer(), bad)
    assert list(tmp_path.iterdir()) == []
