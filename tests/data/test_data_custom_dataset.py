"""Rows of a user's dataset class, also one written for verl, are treated like rows from files."""

from pathlib import Path
from typing import Any

import pytest

from rally.config import ConfigError, load_config
from rally.data import DataError, write_rows
from rally.runs.build.data import tasks_of

ROW = {
    "data_source": "towns",
    "prompt": [{"role": "user", "content": "Which town lies on the Neckar?"}],
    "reward_model": {"style": "rule", "ground_truth": "Heidelberg"},
}
CLASSES = """
from verl.utils.dataset import RLHFDataset

class Suffixed(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = [self.changed(row) for row in self.dataframe]

    def changed(self, row):
        said = row[self.prompt_key][-1]["content"] + self.config.get("suffix", " Answer briefly.")
        return {**row, "agent_name": "tool_agent", self.prompt_key: [{"role": "user", "content": said}]}

class Counted:
    def __init__(self, data_files):
        self.words = open(data_files[0]).read().split()

    def __len__(self):
        return len(self.words)

    def __getitem__(self, number):
        word = self.words[number]
        return {
            "data_source": "letters",
            "prompt": [{"role": "user", "content": f"How many letters has {word}?"}],
            "reward_model": {"style": "rule", "ground_truth": str(len(word))},
        }

class Asked(RLHFDataset):
    def __getitem__(self, number):
        return {**super().__getitem__(number), "agent_name": "single_turn_agent"}

class Torn(RLHFDataset):
    def __getitem__(self, number):
        return self._build_messages(number)

class Framed(RLHFDataset):
    def _read_files_and_tokenize(self):
        super()._read_files_and_tokenize()
        self.dataframe = Frame(self.dataframe)

class Frame:
    # like pandas: iloc gives a row, [] a column
    def __init__(self, rows):
        self.iloc = [type("Series", (dict,), {"to_dict": dict.copy})(row) for row in rows]

    def __len__(self):
        return len(self.iloc)

class Broken:
    def __init__(self, data_files):
        raise KeyError("nothing there")

class Endless:
    pass
"""


@pytest.fixture
def written(tmp_path: Path, tiny_model_folder: str) -> list[str]:
    (tmp_path / "classes.py").write_text(CLASSES)
    (tmp_path / "words.txt").write_text("oak birch")
    write_rows([ROW], tmp_path / "train.parquet")
    return [f"data.custom_cls.path={tmp_path}/classes.py", f"actor_rollout_ref.model.path={tiny_model_folder}"]


@pytest.fixture
def tiny_model_folder(tmp_path: Path) -> str:
    from rally.chat import tiny_tokenizer

    tiny_tokenizer().save_pretrained(tmp_path / "model")
    return str(tmp_path / "model")


def tasks(written: list[str], name: str, file: str) -> Any:
    config = load_config(overrides=[*written, f"data.custom_cls.name={name}", f"data.train_files={file}"])
    return tasks_of(config, config.data.train_files)


def test_a_data_set_of_verl_changes_its_rows(written: list[str], tmp_path: Path) -> None:
    [task] = tasks(written, "Suffixed", f"{tmp_path}/train.parquet")
    assert task.prompt[0]["content"] == "Which town lies on the Neckar? Answer briefly."
    assert (task.agent_name, task.ground_truth, task.id) == ("tool_agent", "Heidelberg", "train:0")


def test_a_data_set_of_verl_gives_each_row_itself(written: list[str], tmp_path: Path) -> None:
    [asked], [framed] = (tasks(written, name, f"{tmp_path}/train.parquet") for name in ("Asked", "Framed"))
    assert (asked.agent_name, framed.ground_truth) == ("single_turn_agent", "Heidelberg")
    with pytest.raises(DataError, match="the data set class tokenizes its rows itself"):
        tasks(written, "Torn", f"{tmp_path}/train.parquet")


def test_a_class_that_makes_its_rows(written: list[str], tmp_path: Path) -> None:
    found = tasks(written, "Counted", f"{tmp_path}/words.txt")
    assert [task.ground_truth for task in found] == ["3", "5"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Broken", "cannot be used (KeyError: 'nothing there')"),
        ("Endless", "cannot be used (TypeError"),
        ("Missing", "has no class Missing; correct data.custom_cls.name"),
    ],
)
def test_a_class_that_gives_none_is_told(written: list[str], tmp_path: Path, name: str, words: str) -> None:
    with pytest.raises(DataError) as caught:
        tasks(written, name, f"{tmp_path}/words.txt")
    assert words in str(caught.value)


def test_a_class_needs_both_keys_and_its_file() -> None:
    with pytest.raises(ConfigError, match="set both"):
        load_config(overrides=["data.custom_cls.name=Rows"])
    with pytest.raises(ConfigError, match=r"nowhere.py does not exist"):
        load_config(overrides=["data.custom_cls.path=nowhere.py", "data.custom_cls.name=Rows"])
