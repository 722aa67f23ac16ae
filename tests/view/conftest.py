"""One small run on disk and one browser, made once for all viewer tests."""

import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from view_cases import served, write_run

sys.path.append(str(Path(__file__).resolve().parents[2]))  # the benchmarks are scripts beside the package

from benchmarks.browser import Browser, find_chromium


@pytest.fixture(scope="session")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_run(tmp_path_factory.mktemp("runs") / "small")


@pytest.fixture(scope="session")
def address(run_path: Path) -> Iterator[str]:
    with served(run_path) as url:
        yield url


@pytest.fixture(scope="session")
def one_browser() -> Iterator[Browser]:
    if find_chromium() is None:
        reason = "chromium is not installed; `make chromium` does it"
        if os.environ.get("RALLY_REQUIRE_SHARED"):
            pytest.fail(reason)
        pytest.skip(reason)
    with Browser() as browser:
        yield browser


@pytest.fixture(scope="module")
def browser_of_module(one_browser: Browser) -> Iterator[Browser]:
    """A page that is left open would go on asking its server during all other tests."""
    yield one_browser
    one_browser.open("about:blank")


@pytest.fixture
def browser(browser_of_module: Browser) -> Iterator[Browser]:
    """A browser on an empty page. A test fails if its page logs an error."""
    browser_of_module.open("about:blank")
    browser_of_module.said.clear()
    yield browser_of_module
    # A page asks on when the server of its test has ended.
    assert [text for text in browser_of_module.said if "ERR_CONNECTION_REFUSED" not in text] == []
