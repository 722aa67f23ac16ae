"""Which function scores which data source."""

from __future__ import annotations

from typing import Any

import pytest

from rally.rewards import RewardError, compute_score, register_reward, registry


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_registry", dict(registry.registered()))


def test_gsm8k_is_strict_unless_asked_otherwise() -> None:
    assert compute_score("openai/gsm8k", "it is #### 72", "72") == 1.0
    assert compute_score("openai/gsm8k", "it is 72", "72") == 0.0
    assert compute_score("openai/gsm8k", "it is 72", "72", method="flexible") == 1.0


def test_arithmetic_ignores_the_keyword_that_only_gsm8k_takes() -> None:
    assert compute_score("rally/arithmetic", "#### 464", 464, method="flexible") == 1.0
    assert compute_score("rally/arithmetic", "#### 465", 464) == 0.0


@pytest.mark.parametrize("truth", [None, "", "the answer", float("nan")])
def test_a_truth_no_answer_can_equal_is_an_error(truth: Any) -> None:
    with pytest.raises(RewardError, match="ground_truth of a rally/arithmetic row must be a number"):
        compute_score("rally/arithmetic", "#### 1", truth)


def test_an_unknown_data_source_names_the_known_ones_and_the_way_out() -> None:
    with pytest.raises(RewardError) as raised:
        compute_score("my/task", "", "")
    for words in ("'my/task'", "openai/gsm8k", "rally/arithmetic", "register_reward", "custom_reward_function.path"):
        assert words in str(raised.value)


def _constant(value: float) -> Any:
    def function(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> float:
        return value

    return function


def test_exact_names_go_first_then_the_longest_pattern() -> None:
    register_reward("aime*")(_constant(1.0))
    register_reward("aime_2025*")(_constant(2.0))
    register_reward("aime_2025_hard")(_constant(3.0))
    scores = [compute_score(name, "", "") for name in ("aime_2024", "aime_2025_easy", "aime_2025_hard")]
    assert scores == [1.0, 2.0, 3.0]


def test_a_later_registration_replaces_a_built_in_one() -> None:
    register_reward("openai/gsm8k")(_constant(-1.0))
    assert compute_score("openai/gsm8k", "#### 72", "72") == -1.0


def test_a_function_is_given_the_row_and_the_keywords_it_takes() -> None:
    @register_reward("my/task")
    def mine(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None, *, bonus: int = 0) -> Any:
        return {"score": bonus, "seen": [data_source, solution_str, ground_truth, extra_info]}

    result = compute_score("my/task", "text", 7, {"a": 1}, bonus=2, other=3)
    assert result == {"score": 2, "seen": ["my/task", "text", 7, {"a": 1}]}


def test_a_function_that_cannot_be_called_is_refused_when_registered() -> None:
    with pytest.raises(RewardError, match="registered for my/task cannot be called with data_source"):

        @register_reward("my/task")
        def mine(prompt: str, answer: str) -> float:
            return 0.0


def test_the_bare_decorator_is_refused_with_the_right_spelling() -> None:
    with pytest.raises(RewardError, match=r'write @register_reward\("my_task"\)'):
        register_reward(_constant(1.0))  # type: ignore[arg-type]
