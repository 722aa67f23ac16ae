"""The viewer's header is readable and usable at any window width and with any run name."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from view_cases import served, write_run

from benchmarks.browser import Browser

NAME = "grpo-qwen2.5-1.5b-gsm8k-with-a-name-as-people-give-them-0.3"
UNREACHABLE = """[...document.querySelectorAll('#bar a, #bar button, #bar select, #live')].filter((one) => {
  const b = one.getBoundingClientRect(), middle = document.elementFromPoint(b.left + b.width / 2, b.top + b.height / 2);
  return b.width < 15 || b.left < 0 || b.right > innerWidth || !(one === middle || one.contains(middle));
}).map((one) => one.textContent)"""


@pytest.fixture(scope="module", params=[1, 2])
def page(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    folder = tmp_path_factory.mktemp("narrow")
    runs = [write_run(folder / name, steps=1) for name in (NAME, "other")[: request.param]]
    with served(*runs) as url:
        yield url


@pytest.fixture
def window(browser: Browser) -> Iterator[Browser]:
    yield browser
    browser.resize(1360, 860)


@pytest.mark.parametrize("width", [320, 360, 480, 700, 800, 821, 1360])
def test_nothing_of_the_bar_is_cut_or_covered(window: Browser, page: str, width: int) -> None:
    window.resize(width, 640)
    window.open(f"{page}#/compare")
    window.wait("!!document.querySelector('.diff, .empty') && !!document.getElementById('live').textContent")
    assert window.evaluate(UNREACHABLE) == []
    assert window.evaluate("document.documentElement.scrollWidth") == width
    assert len(window.evaluate("[...document.querySelectorAll('#bar nav a')].map((a) => a.textContent)")) == 7


def test_a_name_that_is_cut_can_be_read(window: Browser, tmp_path: Path) -> None:
    with served(write_run(tmp_path / NAME, steps=1)) as url:
        window.resize(480, 640)
        window.open(url)
        assert window.wait("document.querySelector('.runname')?.title") == NAME
