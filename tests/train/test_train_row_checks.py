"""Rows that would fail in every episode stop a run before weights are loaded; those that repeat are told."""

from pathlib import Path

import pytest
from train_cases import Paper, run_config

from rally.data import load_tasks, write_rows
from rally.interactions import Interactions
from rally.rewards import RewardError
from rally.train.row_checks import check_rows, warn_of_repeats
from rally.train.run import read_inputs

BUILT_IN_REWARD = "custom_reward_function={path: null}"
R = "actor_rollout_ref.rollout"


@pytest.fixture
def odd(home: Path, tmp_path: Path) -> str:
    row = load_tasks(home / "test.parquet")[0].row | {"data_source": "my/task"}
    write_rows([row], tmp_path / "odd.jsonl")
    return f"data.train_files={tmp_path}/odd.jsonl"


def test_rows_that_no_function_scores_are_told_before_weights_are_loaded(home: Path, tmp_path: Path, odd: str) -> None:
    with pytest.raises(
        RewardError, match=r"no reward function for data_source 'my/task' .*custom_reward_function\.path"
    ):
        read_inputs(run_config(home, tmp_path / "out", odd, BUILT_IN_REWARD), Paper().console)


@pytest.mark.parametrize("more", [[], [BUILT_IN_REWARD, f"{R}.agent_loop_class=my_loop.Own"]])
def test_a_function_or_a_loop_of_ones_own_may_score_anything(
    home: Path, tmp_path: Path, odd: str, more: list[str]
) -> None:
    config = run_config(home, tmp_path / "out", odd, *more)
    check_rows(config, load_tasks(config.data.train_files), Interactions([]))


def test_a_batch_larger_than_the_data_is_told(paper: Paper) -> None:
    warn_of_repeats(40, 32, paper.console)
    assert not paper.text
    warn_of_repeats(40, 800, paper.console)
    assert "data.train_batch_size=800 is more than the 40 training rows" in paper.text
