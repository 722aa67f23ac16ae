"""A working folder that holds what every recipe needs, made once."""

from pathlib import Path

import pytest
from recipes.recipe_cases import write_home


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_home(tmp_path_factory.mktemp("recipes"))
