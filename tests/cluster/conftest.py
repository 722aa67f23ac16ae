"""The helpers of the training tests, and a folder with a tiny model, rows and a reward function."""

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

import pytest
from train_cases import Paper, write_model, write_reward, write_tasks


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model")
    write_tasks(folder)
    write_reward(folder)
    return folder


@pytest.fixture
def paper() -> Paper:
    return Paper()
