"""The pages of drills show the tests that exist."""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "docs"))

import make_drills  # noqa: E402


def test_pages_show_every_drill():
    every = make_drills.drills()
    for page, name in make_drills.PAGES.items():
        text = (ROOT / name).read_text()
        assert text == make_drills.with_table(text, page, every), "run: python docs/make_drills.py"


def test_unreadable_mark_is_refused(tmp_path):
    folder = tmp_path / "tests"
    folder.mkdir()
    (folder / "test_a.py").write_text("import pytest\n@pytest.mark.drill('other', 'a', 'b')\ndef test_b(): ...\n")
    try:
        make_drills.drills(folder)
    except ValueError as error:
        assert "test_a.py:2" in str(error)
    else:
        raise AssertionError("a mark of an unknown page was accepted")
