"""Fixtures for all tests. The folder of shared data and tokenizers is found by RALLY_SHARED."""

import functools
import gc
import os
import shlex
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
from typing import TYPE_CHECKING, Any

import pytest
from forked import Template, forked_children, forked_command
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadFileScheduling

if TYPE_CHECKING:
    from train_cases import Paper

# Machines are shared and sometimes slow, so examples have no deadline. `gate` tries the same examples every
# time, so that a merge does not depend on luck; `fuzz` looks for new ones.
settings.register_profile("rally", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.register_profile("gate", settings.get_profile("rally"), derandomize=True)
settings.register_profile("fuzz", settings.get_profile("rally"), max_examples=2000)
settings.load_profile(os.environ.get("RALLY_EXAMPLES", "rally"))

# A parent such as nohup, or a shell's `&`, may have set the signals to be ignored, and runs leave them so; the tests
# are about the rest.
with suppress(ValueError):  # not in the main thread
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN:
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)

ROOT = Path(__file__).resolve().parents[1]
ssl.create_default_context = functools.cache(ssl.create_default_context)  # every client of httpx reads all certificates


# Files of few and long tests. They begin first, so that no worker is left with one of them at the end.
LONGEST = (
    *("train/test_train_separate_async", "view/test_view_browser", "distributed/test_distributed_engines"),
    *("distributed/test_distributed_update", "distributed/test_distributed_launch", "train/test_train_learns"),
    *("examples/test_examples_agents", "recipes/test_recipes_pipeline", "recipes/test_recipes_shipped"),
    *(
        "train/checkpoint/test_checkpoint_kill_drill",
        "train/checkpoint/test_checkpoint_kill",
        "models/test_models_load",
    ),
    *("test_docs_snippets", "sandbox/test_sandbox_hostile", "train/test_train_drills"),
    *("train/test_train_async", "train/rollout/test_rollout_outages", "train/test_train_trainer", "envs/test_envs_run"),
    *(
        "replay/test_replay",
        "train/test_train_startup_check",
        "runs/test_runs_damaged_files",
        "rewards/test_rewards_judge",
    ),
    *("engines/test_engines_core", "engines/test_engines_model_families", "services/test_services_fuzz"),
)


def pytest_configure(config: pytest.Config) -> None:
    if not hasattr(config, "workerinput"):  # one for all workers
        config.add_cleanup(Template().close)
        config.option.tx = [f"popen//python={shlex.join(forked_command([]))}" for _ in config.option.tx]


BROWSER = tuple(f"tests/view/test_view_{name}.py" for name in ("agents", "browser", "narrow", "pictures", "rewards"))


class OneBrowser(LoadFileScheduling):
    """One worker runs each file, and one of them all files that need a browser."""

    def _split_scope(self, nodeid: str) -> str:
        file = super()._split_scope(nodeid)
        return "tests/view" if file in BROWSER else file


def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> OneBrowser | None:
    return OneBrowser(config, log) if config.getvalue("dist") == "loadfile" else None


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


@pytest.fixture
def forked() -> Iterator[None]:
    """Programs of Rally that the test starts are forked from a process that has imported torch."""
    with forked_children():
        yield


@pytest.fixture
def own_objectives() -> Iterator[None]:
    """What the test registers is forgotten after it."""
    from rally.algos.advantages import ESTIMATORS
    from rally.algos.credit_assignment import TOKEN_ESTIMATORS
    from rally.algos.losses import SURROGATES

    registries: tuple[dict[str, Any], ...] = (SURROGATES, ESTIMATORS, TOKEN_ESTIMATORS)
    kept = [dict(registry) for registry in registries]
    yield
    for registry, before in zip(registries, kept, strict=True):
        registry.clear()
        registry.update(before)
