"""Fixtures every test may use: the shared folder of real data and tokenizers, found by RALLY_SHARED."""

import os
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and tokenizers; a clone without it skips by name, CI fails instead."""
    path = Path(os.environ.get("RALLY_SHARED", ROOT.parent / "shared")).resolve()
    if (path / "tokenizers").is_dir() and (path / "data").is_dir():
        return path
    reason = f"no shared data and tokenizers at {path} (set RALLY_SHARED)"
    if os.environ.get("RALLY_REQUIRE_SHARED"):
        pytest.fail(reason)
    pytest.skip(reason)
