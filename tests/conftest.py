"""Fixtures for all tests. The folder of shared data and tokenizers is found by RALLY_SHARED."""

import functools
import gc
import os
import signal
import ssl
import sys
from contextlib import suppress
from pathlib import Path

# Set before anything reads them: no test uses the network, and every test process uses one torch thread.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("OMP_NUM_THREADS", "1")
# With it, the workers and each of hundreds of child processes would compile all modules again.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
if "PYTEST_XDIST_WORKER" in os.environ:
    gc.disable()  # while all is imported, which leaves no garbage; `pytest_collection_finish` ends it

from collections.abc import Iterator
from typing import TYPE_CHECKING

import pytest
from forked import Template
from hypothesis import HealthCheck, settings

if TYPE_CHECKING:
    from train_cases import Paper

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
ssl.create_default_context = functools.cache(ssl.create_default_context)  # every client of httpx reads all certificates


# Files of few and long tests. They begin first, so that no worker is left with one of them at the end.
LONGEST = (
    *("distributed/test_distributed_update", "distributed/test_distributed_launch", "train/test_train_learns"),
    *("examples/test_examples_agents", "recipes/test_recipes_pipeline", "recipes/test_recipes_shipped"),
    *(
        "train/checkpoint/test_checkpoint_kill_drill",
        "train/checkpoint/test_checkpoint_kill",
        "models/test_models_load",
    ),
    *("test_docs_snippets", "sandbox/test_sandbox_hostile", "view/test_view_browser", "train/test_train_drills"),
    *("train/test_train_async", "train/rollout/test_rollout_outages", "train/test_train_trainer", "envs/test_envs_run"),
    *(
        "replay/test_replay",
        "train/test_train_startup_check",
        "runs/test_runs_damaged_files",
        "rewards/test_rewards_judge",
    ),
    *("engines/test_engines_core", "engines/test_engines_model_families", "services/test_services_fuzz"),
)


def pytest_xdist_auto_num_workers() -> int:
    """Two more than there are processors, because many tests wait for a process or a server."""
    return (os.cpu_count() or 1) + 2


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    place = {f"tests/{name}.py": number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: place.get(item.nodeid.partition("::")[0], len(place)))


def pytest_collection_finish() -> None:
    """Exclude what is imported by now from garbage collection: a full collection takes a second otherwise, and every
    training run makes one. `frozen_gc` of a run would include it again."""
    gc.collect()
    gc.freeze()
    gc.freeze = gc.unfreeze = lambda: None
    gc.enable()


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


@pytest.fixture(scope="session")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny model, rows and a reward function, made once."""
    from train_cases import write_model, write_reward, write_tasks  # the process that starts the others needs no torch

    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model")
    write_tasks(folder)
    write_reward(folder)
    return folder


@pytest.fixture
def paper() -> "Paper":
    from train_cases import Paper

    return Paper()


@pytest.fixture(scope="session")
def template() -> Iterator[Template]:
    """A process with torch and transformers, to fork programs from."""
    process = Template()
    yield process
    process.close()
