"""Rows of environments: weights, disjoint seeds, order, and the configuration of a run with environments."""

import asyncio
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rally.config import load_config
from rally.config.errors import ConfigError
from rally.envs import EnvError, Environment, Environments, EnvSession, EnvSpec
from rally.envs.registry import ADAPTERS, find_environment
from rally.envs.rows import SeedPlan, divided, env_tasks, seed_ranges


class Plain(Environment):
    """Makes its tasks from seeds."""


class Ten(Environment):
    """Has ten tasks."""

    def tasks(self) -> Any:
        return [{"number": i} for i in range(10)]


def worlds(**kinds: type[Environment]) -> Environments:
    return Environments([EnvSpec(label=label, make=make) for label, make in kinds.items()])


class HangsAtTheEnd(Environment):
    def close(self) -> None:
        threading.Event().wait(600)


class FailsAtTheEnd(Environment):
    def close(self) -> None:
        raise OSError("gone")


class HasNoSeats(Environment):
    def seats(self) -> int:
        raise TimeoutError("no answer")


closed: list[str] = []


class OpensSlowly(Environment):
    def __init__(self, seconds: float = 0.0) -> None:
        time.sleep(seconds)

    async def close(self) -> None:
        await asyncio.sleep(0)
        closed.append("closed")


async def test_what_is_made_too_late_is_closed_although_its_close_is_async() -> None:
    closed.clear()
    session = EnvSession(EnvSpec(label="slow", make=OpensSlowly, args={"seconds": 0.5}), {"env": "slow"}, 1, 0.1)
    with pytest.raises(EnvError, match=r"__init__ of the environment slow did not return within 0\.1 seconds"):
        await session.reset()
    session._timeout = 60.0
    assert await session.close() == [] and closed == ["closed"]


def test_an_environment_that_fails_before_any_episode_is_named() -> None:
    made = [EnvSpec(label=kind.__name__, make=kind) for kind in (HangsAtTheEnd, FailsAtTheEnd, HasNoSeats, Plain)]
    found = Environments(made, timeout=0.2)
    with pytest.raises(EnvError, match=r"close of the environment HangsAtTheEnd did not return within 0\.2 seconds"):
        found.seats("HangsAtTheEnd")
    with pytest.raises(EnvError, match="close of the environment FailsAtTheEnd failed: OSError: gone"):
        found.seats("FailsAtTheEnd")
    with pytest.raises(EnvError, match="seats of the environment HasNoSeats failed: TimeoutError: no answer"):
        found.seats("HasNoSeats")
    assert found.seats("Plain") == 1


@given(st.dictionaries(st.text(min_size=1), st.integers(1, 9), min_size=1, max_size=6), st.integers(60, 500))
def test_rows_are_divided_by_weight(weights: dict[str, int], size: int) -> None:
    counts = divided(weights, size)
    assert sum(counts.values()) == size
    assert all(abs(counts[k] - size * w / sum(weights.values())) < 1 for k, w in weights.items())


def test_a_mixture_has_disjoint_seeds_and_an_even_order() -> None:
    plan = SeedPlan(weights={"a": 3, "b": 1, "c": 0}, train_size=40, val_size=5)
    environments = worlds(a=Plain, b=Plain, c=Plain)
    train, val = env_tasks(environments, plan), env_tasks(environments, plan, validate=True)
    assert Counter(task.data_source for task in train) == {"a": 30, "b": 10}
    assert Counter(task.data_source for task in val) == {"a": 5, "b": 5, "c": 5}
    assert not {(t.row["env"], t.row["seed"]) for t in train} & {(t.row["env"], t.row["seed"]) for t in val}
    assert Counter(task.data_source for task in train[:8]) == {"a": 6, "b": 2}, "in order, every part has both"
    assert train[0].row == {"env": "a", "id": "a:0", "seed": 0} and train[0].prompt == ()


def test_tasks_of_an_environment_are_divided_into_first_and_last() -> None:
    train, val = seed_ranges(worlds(ten=Ten), SeedPlan(weights={"ten": 1}, train_size=7, val_size=3))
    assert (train["ten"], val["ten"]) == (range(7), range(7, 10))
    with pytest.raises(EnvError, match="overlap"):
        seed_ranges(worlds(ten=Ten), SeedPlan(weights={"ten": 1}, train_size=8, val_size=3))
    with pytest.raises(EnvError, match="has 10 tasks, but rows 0 to 10 for training"):
        seed_ranges(worlds(ten=Ten), SeedPlan(weights={"ten": 1}, train_size=11))
    with pytest.raises(EnvError, match="seeds 5 to 9 of training and 9 to 9 of validation of a overlap"):
        seed_ranges(worlds(a=Plain), SeedPlan(weights={"a": 1}, train_size=5, train_seed=5, val_size=1, val_seed=9))
    named = SeedPlan(weights={"a": 1, "b": 0}, train_size=8, val_sizes={"a": 0, "b": 3})
    with pytest.raises(EnvError, match="a and b are the same tasks, and rows 0 to 7 for training overlap rows 7 to 9"):
        seed_ranges(worlds(a=Ten, b=Ten), named)
    assert seed_ranges(worlds(a=Plain, b=Plain), named)[0]["a"] == range(8), "these make their tasks from seeds"
    with pytest.raises(EnvError, match="leaves no row for b"):
        divided({"a": 100, "b": 0.1}, 10)


@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["env.train_size=5"], "env.train_size=5 has no effect without env.name"),
        (["env.name=a.B", "env.mixture=[{name: a.C}]"], "keep one of them"),
        (["env.mixture=[{name: a.C}, {name: a.C}]"], "label of its own"),
        (["env.mixture=[{name: a.C, weight: 0}]"], "nothing to train on"),
        (["env.name=a.B", "custom_reward_function.path=r.py"], "the environment gives the reward"),
        (["env.name=a.B", "data.train_files=rows.parquet"], "the rows are made from env"),
        (["env.name=a.B", "data.tool_config_path=t.yaml"], "are those of its environment"),
        (["env.name=a.B", "data.train_max_samples=3"], "set env.train_size instead"),
        (["env.name=a.B", "env.val_size=0", "trainer.test_freq=1"], "set env.val_size"),
        (
            ["env.name=a.B", "actor_rollout_ref.rollout.agent.default_agent_loop=tool_agent"],
            "does not play environments",
        ),
        (["env.mixture=[{weight: 1}]"], "name"),
    ],
)
def test_keys_that_do_not_fit_are_refused(overrides: list[str], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        load_config(overrides=overrides)


def test_environments_are_found_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    code = "from rally.envs import Environment\nclass Mine(Environment):\n    pass\nclass Other:\n    pass\n"
    Path("my_maze_env.py").write_text(code, encoding="utf-8")
    assert find_environment("my_maze_env.Mine").__name__ == "Mine"
    for name, words in {
        "my_maze_env.Other": "no class Other that is a rally.envs.Environment",
        "my_maze_env2.Mine": "cannot be imported",
        "nothing": "there is no environment 'nothing'",
        "gym/x": "there is no environment 'gym/x'",
    }.items():
        with pytest.raises(EnvError, match=words):
            find_environment(name)


def test_a_missing_package_names_the_command(monkeypatch: pytest.MonkeyPatch) -> None:
    missing = ADAPTERS["gymnasium"]._replace(package="no_such_package")
    monkeypatch.setitem(ADAPTERS, "gymnasium", missing)
    with pytest.raises(EnvError, match=r"need the package no_such_package; run: pip install 'rally-rl\[gymnasium\]'"):
        find_environment("gymnasium/Taxi-v3")


def test_an_entry_of_a_mixture_may_have_a_validation_size_of_its_own() -> None:
    entries = "[{name: a.B, val_size: 3}, {name: c.D, weight: 0}, {name: e.F, label: f, val_size: 0}]"
    config = load_config(overrides=[f"env.mixture={entries}", "env.val_size=5"])
    assert config.env.val_sizes == {"a.B": 3, "c.D": 5, "f": 0}
    plan = SeedPlan(weights={"a": 1, "ten": 0}, train_size=4, val_size=5, val_sizes={"ten": 2})
    train, val = seed_ranges(worlds(a=Plain, ten=Ten), plan)
    assert (len(val["a"]), val["ten"], len(train["a"])) == (5, range(8, 10), 4), "the last two of its tasks"
    load_config(overrides=["env.mixture=[{name: a.B, val_size: 3}]", "env.val_size=0", "trainer.test_freq=1"])
