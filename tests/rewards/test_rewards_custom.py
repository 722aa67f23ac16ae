"""A user's reward function is loaded from a file or a module, or rejected with one clear sentence."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from rally.rewards import RewardError, compute_score, load_reward_function, registry

GOOD = """
    def compute_score(data_source, solution_str, ground_truth, extra_info=None, bonus=0.0):
        return float(solution_str == ground_truth) + bonus
"""


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry.registered()))
    monkeypatch.setattr("sys.path", list(sys.path))


def call(function: Any, text: str = "a", truth: str = "a", source: str = "my/task") -> Any:
    return function(data_source=source, solution_str=text, ground_truth=truth, extra_info={})


def test_a_file_with_keywords(write_reward: Any) -> None:
    assert call(load_reward_function(write_reward(GOOD), kwargs={"bonus": 0.5})) == 1.5


@pytest.mark.parametrize("form", ["{}", "pkg://{}"])
def test_a_module(form: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = tmp_path / "reward_package_of_test"
    package.mkdir(exist_ok=True)
    (package / "inner.py").write_text("def judge(data_source, solution_str, ground_truth, extra_info):\n    return 3\n")
    monkeypatch.syspath_prepend(tmp_path)
    function = load_reward_function(form.format("reward_package_of_test.inner"), "judge")
    assert call(function) == 3


def test_a_file_may_import_its_neighbour(write_reward: Any, tmp_path: Path) -> None:
    (tmp_path / "neighbour_of_test.py").write_text("POINTS = 4\n")
    source = """
    from neighbour_of_test import POINTS
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        return POINTS
    """
    assert call(load_reward_function(write_reward(source))) == 4


def test_a_file_that_only_registers_is_routed_by_data_source(write_reward: Any) -> None:
    source = """
    from rally.rewards import register_reward
    @register_reward("my/task")
    def anything(data_source, solution_str, ground_truth, extra_info=None, **kw):
        return 5
    """
    function = load_reward_function(write_reward(source))
    assert call(function) == 5
    assert call(function, "#### 1", "1", "openai/gsm8k") == 1.0
    with pytest.raises(RewardError, match="no reward function for data_source 'other'"):
        call(function, source="other")


def test_without_a_path_the_router_scores() -> None:
    function = load_reward_function(kwargs={"method": "flexible"})
    assert call(function, "is 72", "72", "openai/gsm8k") == 1.0
    assert compute_score("openai/gsm8k", "is 72", "72") == 0.0


@pytest.mark.parametrize(
    ("source", "kwargs", "sentence"),
    [
        ("def other(): ...", {}, "has no function compute_score; set custom_reward_function.name"),
        ("compute_score = 3", {}, "is not a function but int"),
        ("def compute_score(a, b): ...", {}, "cannot be called with data_source, solution_str"),
        ("def compute_score(data_source, solution_str, ground_truth): ...", {}, "extra_info"),
        (GOOD, {"bonsu": 1}, "bonsu"),
        (GOOD, {"solution_str": "x"}, "reward_kwargs.solution_str is always set from the episode"),
        ("def compute_score(:", {}, "cannot be imported (SyntaxError"),
        ("import no_such_module_at_all", {}, "cannot be imported (ModuleNotFoundError"),
        ("raise KeyError('API_KEY')", {}, "cannot be imported (KeyError: 'API_KEY')"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused(
    source: str, kwargs: dict[str, Any], sentence: str, write_reward: Any
) -> None:
    with pytest.raises(RewardError) as raised:
        load_reward_function(write_reward(source), kwargs=kwargs)
    assert sentence in str(raised.value)
    assert "\n" not in str(raised.value)


def test_a_missing_file_and_a_missing_module_are_named() -> None:
    with pytest.raises(RewardError, match=r"there is no file /nowhere/reward\.py"):
        load_reward_function("/nowhere/reward.py")
    with pytest.raises(RewardError, match=r"path=no_such_pkg\.reward cannot be imported"):
        load_reward_function("no_such_pkg.reward")


def test_a_keyword_that_would_change_nothing_is_refused() -> None:
    with pytest.raises(RewardError, match=r"takes reward_kwargs\.metod; known are .*method"):
        load_reward_function(kwargs={"metod": "flexible"})
