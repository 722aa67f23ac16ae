"""A working folder with the inputs of every recipe, made once per session."""

from pathlib import Path

import pytest
from recipes.recipe_cases import write_home


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_home(tmp_path_factory.mktemp("recipes"))
