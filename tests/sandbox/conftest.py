"""One warm sandbox per test worker, and the skip rule for machines without bubblewrap."""

import os
import shutil
from collections.abc import Iterator

import pytest

from rally.sandbox import Sandbox


@pytest.fixture(scope="session")
def sandbox() -> Iterator[Sandbox]:
    sandbox = Sandbox()
    sandbox.start_now()
    yield sandbox
    sandbox.close()


@pytest.fixture
def bubblewrap() -> None:
    """A machine without it skips these tests; CI fails."""
    if shutil.which("bwrap") is None:
        reason = "bubblewrap is not installed; run: make sandbox"
        if os.environ.get("RALLY_REQUIRE_SHARED"):
            pytest.fail(reason)
        pytest.skip(reason)
