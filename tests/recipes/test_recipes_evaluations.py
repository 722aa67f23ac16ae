"""`rally run` evaluates the model as it is and the last checkpoint, also on the data of eval*.yaml in the folder."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from recipes.test_recipes_pipeline import Here
from typer.testing import CliRunner

from rally.cli.main import app
from rally.recipes import RecipeError, catalog, find_recipe
from rally.recipes.pipeline import RecipeOptions, evaluations_before, preparation
from rally.track import RunFolder

TRAIN = """
recipe: {about: one kind of task, hardware: a CPU}
data: {train_batch_size: 2, max_prompt_length: 1500, max_response_length: 8}
env:
  name: rally.recipes.tool_use.environment.ToolUse
  args: {kind: irrelevance}
  train_size: 4
  val_size: 1
actor_rollout_ref:
  model: {path: models/tiny, enable_gradient_checkpointing: false}
  actor: {ppo_mini_batch_size: 2}
  rollout: {n: 2, max_num_seqs: 8}
trainer: {total_training_steps: 1, test_freq: 1, startup_check: false}
"""
OTHER = """
base: train.yaml
recipe: {about: other tasks}
env: {name: null, val_size: 2, mixture: [{name: rally.recipes.tool_use.environment.ToolUse, label: other,
  args: {kind: single}, weight: 0}]}
trainer: {val_only: true}
"""
OUT = "trainer.default_local_dir"


@pytest.fixture
def recipe(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The recipe `mine`, with an evaluation on other tasks."""
    folder = tmp_path / "recipes" / "mine"
    folder.mkdir(parents=True)
    (folder / "train.yaml").write_text(TRAIN)
    (folder / "eval_other.yaml").write_text(OTHER)
    monkeypatch.setattr(catalog, "FOLDER", folder.parent)
    monkeypatch.chdir(home)
    catalog.list_recipes.cache_clear()
    yield tmp_path / "run"
    catalog.list_recipes.cache_clear()


def test_other_data_is_evaluated_before_and_after(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.cli.run.subprocess", SimpleNamespace(Popen=Here))
    words = ["run", "mine", f"{OUT}={recipe}", "env.val_size=3"]
    first = CliRunner().invoke(app, words, catch_exceptions=False)
    assert first.exit_code == 0, first.output
    kept = {}
    for name, labels, rows in (
        ("before_eval_other", {"other"}, 2),
        ("global_step_1", {"rally.recipes.tool_use.environment.ToolUse"}, 3),
        ("global_step_1_eval_other", {"other"}, 2),
    ):
        folder = RunFolder(recipe / "eval" / name / "eval")
        episodes = list(folder.read_episodes(0, validate=True))
        assert {e.task.data_source for e in episodes} == labels and len(episodes) == rows, name
        kept[name] = (folder.path / "metrics.jsonl").stat().st_mtime_ns
    table = first.output.partition("before and after")[2]
    line = next(line for line in table.splitlines() if "other/" in line)
    assert len(line.split()) == 3, "the metric, as it is and after; the training does not validate it"
    second = CliRunner().invoke(app, words, catch_exceptions=False)
    assert second.output.replace("\n", " ").count("already done") == 4
    for name, written in kept.items():
        assert (recipe / "eval" / name / "eval" / "metrics.jsonl").stat().st_mtime_ns == written


def test_the_evaluation_of_another_model_is_not_taken(recipe: Path) -> None:
    options = RecipeOptions(overrides=(f"{OUT}={recipe}",))
    [stage] = evaluations_before("mine", options)
    assert f"{OUT}={recipe}/eval/before_eval_other" in stage.args
    [written] = stage.outputs
    written.parent.mkdir(parents=True)
    written.write_text("{}")
    written.with_name("config.yaml").write_text(json.dumps({"actor_rollout_ref": {"model": {"path": "another"}}}))
    with pytest.raises(RecipeError, match=r"is the evaluation of another, not of models/tiny; move or remove"):
        evaluations_before("mine", options)


def test_an_evaluation_is_no_training(recipe: Path) -> None:
    assert find_recipe("mine/eval_other", "eval").name == "eval_other.yaml"
    assert find_recipe("mine", "eval").name == "train.yaml"
    with pytest.raises(RecipeError, match=r"there is no recipe .* for `rally train`"):
        find_recipe("mine/eval_other", "train")


def test_a_supervised_start_is_compared_with_the_model_as_it_is(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(home)
    python = home / "envs" / "bfcl" / "bin" / "python"
    python.parent.mkdir(parents=True, exist_ok=True)
    if not python.exists():
        python.symlink_to(sys.executable)
    options = RecipeOptions(model="models/tiny", overrides=("data.max_prompt_length=999", "env.val_size=3"))
    own, bfcl = evaluations_before("tool_use", options)
    assert own.args[:3] == ("eval", "--recipe", "tool_use") and "env.val_size=3" in own.args
    assert "actor_rollout_ref.model.path=models/tiny" in own.args
    assert bfcl.args[2] == "tool_use/eval_bfcl", "which sets lengths and sizes of its own"
    assert "data.max_prompt_length=999" not in bfcl.args and "env.val_size=3" not in bfcl.args
    assert evaluations_before("triage", RecipeOptions()) == [], "random weights that the recipe makes"


def test_the_environment_of_an_evaluation_is_made_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert [(stage.title, stage.line) for stage in preparation("tool_use", RecipeOptions())] == [
        ("data", "rally data tool_use --out data/tool_use"),
        ("supervised start", "rally sft --recipe tool_use"),
        ("environment", "rally env make bfcl --out envs/bfcl"),
    ]
