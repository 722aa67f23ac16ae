"""Runs over the folder of an earlier one say what is different: the model evaluated, the settings of a resumed run."""

from pathlib import Path

from train_cases import Paper, run_config

from rally.runs.evaluate import _name_what_is_evaluated
from rally.runs.train import _name_changed_keys
from rally.track import RunFolder


def test_a_trained_run_says_that_its_first_model_is_evaluated(home: Path, tmp_path: Path) -> None:
    config, paper = run_config(home, tmp_path), Paper()
    _name_what_is_evaluated(config, paper.console)
    assert not paper.text, "nothing was trained"
    checkpoints = config.run_dir / "checkpoints"
    checkpoints.mkdir(parents=True)
    (checkpoints / "latest_checkpointed_iteration.txt").write_text("7\n")
    _name_what_is_evaluated(config, paper.console)
    key, actor = "actor_rollout_ref.model.path", checkpoints / "global_step_7" / "actor"
    assert f"evaluating {config.model.path}, not a checkpoint of this run" in paper.text
    assert f"set {key}={actor}" in paper.text
    actor.mkdir(parents=True)
    again, silent = run_config(home, tmp_path, f"{key}={actor}"), Paper()
    _name_what_is_evaluated(again, silent.console)
    assert not silent.text


def test_a_resumed_run_names_the_settings_that_differ(home: Path, tmp_path: Path) -> None:
    config, paper, folder = run_config(home, tmp_path), Paper(), RunFolder(tmp_path / "run").create()
    _name_changed_keys(folder, config, paper.console)  # nothing is recorded
    folder.save_config(config.to_yaml())
    _name_changed_keys(folder, config, paper.console)
    assert not paper.text
    other = run_config(home, tmp_path, "actor_rollout_ref.actor.clip_ratio=0.35", "trainer.seed=77")
    _name_changed_keys(folder, other, paper.console)
    assert "actor_rollout_ref.actor.clip_ratio: 0.2 -> 0.35, trainer.seed: 0 -> 77" in paper.text
    folder.config_path.write_text("[broken")
    _name_changed_keys(folder, other, paper.console)
