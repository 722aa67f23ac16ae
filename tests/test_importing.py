"""A user's file becomes its own module, and a failed import leaves nothing behind."""

import sys
from pathlib import Path

import pytest

from rally.importing import ImportFailed, import_path


def test_files_of_one_name_and_several_kinds_are_apart_and_import_their_neighbours(tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_mine.py").write_text("WORD = 'hello'\n", encoding="utf-8")
    (tmp_path / "mine.py").write_text("from neighbour_of_mine import WORD\n", encoding="utf-8")
    reward, sampler = (import_path(str(tmp_path / "mine.py"), kind) for kind in ("reward", "sampler"))
    assert reward is not sampler and reward.WORD == sampler.WORD == "hello"
    assert import_path("pkg://json", "reward") is import_path("json", "reward")


def test_a_file_that_fails_says_why_in_one_line_and_is_forgotten(tmp_path: Path) -> None:
    (tmp_path / "broken.py").write_text("raise ValueError('a\\nb')\n", encoding="utf-8")
    with pytest.raises(ImportFailed, match=r"^ValueError: a b$"):
        import_path(str(tmp_path / "broken.py"), "reward")
    assert "rally_reward_broken" not in sys.modules
    with pytest.raises(ImportFailed, match=r"does not end in \.py"):
        import_path(str(tmp_path / "broken.txt"), "reward")
    with pytest.raises(ImportFailed, match="No module named 'no_such'"):
        import_path("pkg://no_such.module", "reward")
