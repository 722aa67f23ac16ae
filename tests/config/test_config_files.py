"""A configuration file can extend another, knows its own folder, and names the commands that make its inputs."""

from pathlib import Path

import pytest

from rally.config import ConfigError, load_config, load_sft_config


def write(folder: Path, name: str, text: str) -> Path:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)
    return folder / name


def test_an_overlay_changes_what_it_says_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path, "base/first.yaml", "data: {train_batch_size: 7, seed: 3}\ntrainer: {seed: 1}\n")
    write(tmp_path, "base/second.yaml", "base: first.yaml\ndata.seed: 4\n")
    top = write(tmp_path, "top.yaml", "base: base/second.yaml\ntrainer: {total_epochs: 2}\n")
    config = load_config(top, ["trainer.total_epochs=5"])
    assert (config.data.train_batch_size, config.data.seed) == (7, 4)
    assert (config.trainer.seed, config.trainer.total_epochs) == (1, 5)


def test_here_is_the_folder_of_the_file_that_says_it(tmp_path: Path) -> None:
    write(tmp_path, "base/tools.yaml", "tools: []")
    write(tmp_path, "base/a.yaml", "actor_rollout_ref.rollout.multi_turn.tool_config_path: ${here}/tools.yaml")
    top = write(tmp_path, "b.yaml", "base: base/a.yaml")
    assert load_config(top).tool_config_path == str(tmp_path / "base" / "tools.yaml")


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("base: a.yaml", "builds on itself: a.yaml -> a.yaml"),
        ("base: [x.yaml]", "base must be the name of one YAML file"),
        ("base: gone.yaml", "gone.yaml does not exist"),
        ("recipe: {abuot: x}", "abuot"),
        ("recipe: words", "recipe"),
    ],
)
def test_a_wrong_base_is_told(text: str, told: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path, "a.yaml", text))
    assert told in str(caught.value)


def test_what_is_missing_is_told_with_the_command_that_makes_it(tmp_path: Path) -> None:
    data = tmp_path / "rows"
    notes = f"recipe:\n  about: x\n  needs:\n    {data}: rally data x --out {data}\n    {tmp_path}/unread: rally y\n"
    train = write(tmp_path, "a.yaml", f"{notes}data.train_files: {data}/train.parquet\n")
    sft = write(tmp_path, "b.yaml", f"base: a.yaml\ndata.val_files: {data}/test.parquet\n")
    for load, path in ((load_config, train), (load_sft_config, sft)):
        with pytest.raises(ConfigError) as caught:
            load(path)
        assert caught.value.problems == (f"{data} does not exist; make it with: rally data x --out {data}",)
    other = write(tmp_path, "other.parquet", "")
    assert load_config(train, [f"data.train_files={other}"]).data.train_files == (str(other),)
    beside = f"{data}_two/train.parquet"
    with pytest.raises(ConfigError, match="check the path"):
        load_config(train, [f"data.train_files={beside}"])
