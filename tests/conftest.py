"""Fixtures for all tests. The folder of shared data and tokenizers is found by RALLY_SHARED."""

import os
import signal
from contextlib import suppress
from pathlib import Path

# Set before anything reads them: no test uses the network, and every test process uses one torch thread.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
from hypothesis import HealthCheck, settings
from train_cases import home, paper  # a folder with a tiny model, rows and a reward function, made once

__all__ = ["home", "paper"]

# Machines are shared and sometimes slow, so examples have no deadline. `gate` tries the same examples every
# time, so that a merge does not depend on luck; `fuzz` looks for new ones.
settings.register_profile("rally", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("rally"), derandomize=True)
settings.register_profile("fuzz", settings.get_profile("rally"), max_examples=2000)
settings.load_profile(os.environ.get("RALLY_EXAMPLES", "rally"))

# A parent such as nohup may have set the signal to be ignored, and runs leave it so; the tests are about the rest.
with suppress(ValueError):  # not in the main thread
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="session")
def shared() -> Path:
    """The folder with real data and tokenizers. A clone without it skips these tests; CI fails."""
    path = Path(os.environ.get("RALLY_SHARED", ROOT.parent / "shared")).resolve()
    if (path / "tokenizers").is_dir() and (path / "data").is_dir():
        return path
    reason = f"no shared data and tokenizers at {path} (set RALLY_SHARED)"
    if os.environ.get("RALLY_REQUIRE_SHARED"):
        pytest.fail(reason)
    pytest.skip(reason)
