"""Persistent slow failures give a warning, and healthy runs give none."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from train_cases import Paper, run_config

from rally.runs.train import train
from rally.track import RunFolder
from rally.train.health_checks import (
    CALLS,
    CLIPPED,
    ENTROPY,
    HIGHEST,
    LIVE,
    LOWEST,
    RETRIES,
    HealthSettings,
    findings,
    watched,
)

HEALTHY = {ENTROPY: 0.5, CALLS: 1.0, CLIPPED: 0.02, LIVE: 0.5, HIGHEST: 1.0, LOWEST: 0.0}
SETTINGS = HealthSettings(patience=3)


def steps(count: int, **series: Any) -> list[dict[str, float]]:
    """Healthy steps, except for the metrics given as lists or as functions of the step."""
    return [HEALTHY | {name: values[i] for name, values in series.items()} for i in range(count)]


def told(history: list[dict[str, float]], settings: HealthSettings = SETTINGS) -> dict[str, str]:
    return dict(findings(history, settings))


def test_a_healthy_run_hears_nothing() -> None:
    assert told(steps(30)) == {} and told([]) == {}


def test_the_demos_own_fall_of_entropy_is_no_collapse() -> None:
    """Entropy falls as a policy learns: the demo ends at a tenth of its start and is healthy."""
    entropy = [0.698, 0.372, 0.241, 0.19, 0.16] + [0.05] * 10
    assert told(steps(15, **{ENTROPY: entropy}), HealthSettings()) == {}


def test_entropy_that_falls_under_its_share() -> None:
    fallen = steps(9, **{ENTROPY: [0.6, 0.6, 0.6, 0.3, 0.1, 0.03, 0.02, 0.02, 0.02]})
    assert told(fallen[:7]) == {}, "the mean of the last three is still above 0.03"
    text = told(fallen)["entropy_collapse"]
    assert "fell from 0.6 to 0.02, under trainer.guards.entropy_share=0.05" in text and "entropy_coeff" in text
    assert told(fallen, HealthSettings(patience=3, entropy_share=0.0)) == {}


def test_tools_that_are_no_longer_called() -> None:
    calls = [0.4, 0.8, 0.9, 1.0, 0.5, 0.1, 0.05, 0.0]
    assert told(steps(7, **{CALLS: calls})) == {}
    assert "0.90 calls an episode at its best, 0.05 now" in told(steps(8, **{CALLS: calls}))["tool_collapse"]
    never = [0.1, 0.1, 0.1, 0.0, 0.0, 0.0, 0.0]
    assert told(steps(7, **{CALLS: never})) == {}, "a policy that never used tools has not stopped"
    assert told([{k: v for k, v in s.items() if k != CALLS} for s in steps(9)]) == {}


def test_memory_that_is_full_in_every_step() -> None:
    full = [0, 0, 2, 5, 9]
    assert told(steps(4, **{RETRIES: full})) == {}
    assert "9 times in all" in told(steps(5, **{RETRIES: full}))["crowded_memory"]
    for now_and_then in ([0, 2, 2, 5, 9], [4, 9, 1, 3, 5]):  # the second was resumed, which resets the count
        assert told(steps(5, **{RETRIES: now_and_then})) == {}


@pytest.mark.parametrize(("lowest", "words"), [(1.0, "harder rows, or stop"), (0.0, "data.curriculum.by=success")])
def test_groups_that_teach_nothing_for_several_steps(lowest: float, words: str) -> None:
    live = [0.5, 0.5, 0.0, 0.0, 0.0]
    low = [0.0, 0.0, lowest, lowest, lowest]
    history = steps(5, **{LIVE: live, LOWEST: low, HIGHEST: [1.0, 1.0, lowest, lowest, lowest]})
    assert told(history[:4]) == {}
    assert set(told(history)) == {"flat_groups"} and words in told(history)["flat_groups"]


@pytest.mark.parametrize(("value", "words"), [(0.0, "rally sft"), (-1.0, "too hard"), (0.7, "may ignore the answer")])
def test_a_reward_that_never_varied(value: float, words: str) -> None:
    flat = steps(3, **{LIVE: [0.0] * 3, HIGHEST: [value] * 3, LOWEST: [value] * 3})
    assert told(flat[:2]) == {}
    assert set(told(flat)) == {"constant_reward"}, "its groups are flat for the same reason: said once"
    assert f"every reward of the first 3 steps was {value:g}" in told(flat)["constant_reward"]
    assert words in told(flat)["constant_reward"]
    assert "constant_reward" not in told([HEALTHY, *flat])


def test_answers_that_are_cut_off() -> None:
    text = told(steps(4, **{CLIPPED: [0.0, 0.4, 0.8, 0.9]}))["clipped_responses"]
    assert "70% of the episodes of the last 3 steps" in text and "data.max_response_length" in text
    assert told(steps(4, **{CLIPPED: [1.0] * 4}), HealthSettings(patience=3, clipped_share=1.0)) == {}


numbers = st.floats(0, 1) | st.just(float("nan"))


@given(st.lists(st.fixed_dictionaries({}, optional=dict.fromkeys([*HEALTHY, "x"], numbers)), max_size=12))
def test_whatever_the_metrics_are_it_answers_and_nothing_is_said_before_its_time(
    history: list[dict[str, float]],
) -> None:
    clean = [watched(step) for step in history]
    findings(clean, SETTINGS)
    assert findings(clean[: SETTINGS.patience - 1], SETTINGS) == []


def test_a_resumed_run_remembers_what_it_saw(home: Path, tmp_path: Path, paper: Paper) -> None:
    """Three steps in two runs, of two and one: the warning needs all three."""
    flat = tmp_path / "flat.py"
    flat.write_text("def compute_score(**kwargs):\n    return 0.0\n", encoding="utf-8")
    keys = [f"custom_reward_function.path={flat}", "trainer.guards.patience=3", "data.val_files=null"]
    train(run_config(home, tmp_path / "run", *keys, "trainer.total_training_steps=2"), paper.console)
    assert "every reward" not in paper.text
    again = Paper()
    train(run_config(home, tmp_path / "run", *keys, "trainer.total_training_steps=3"), again.console)
    assert again.text.count("every reward of the first 3 steps was 0") == 1
    assert [row.step for row in RunFolder(tmp_path / "run").read_metrics()] == [1, 2, 3]
