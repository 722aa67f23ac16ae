"""Rows that would fail in every episode stop a run before weights are loaded; a batch larger than the data is
reported."""

from pathlib import Path

import pytest
from train_cases import Paper, run_config

from rally.data import load_tasks, write_rows
from rally.interactions import Interactions
from rally.recipes.repair import repositories
from rally.recipes.repair.hidden_tests import check_row
from rally.runs.build.run_inputs import read_inputs
from rally.runs.row_checks import RowError, check_rows, warn_of_repeats
from rally.tools import ToolBox
from rally.types import RallyError

BUILT_IN_REWARD = "custom_reward_function={path: null}"
R = "actor_rollout_ref.rollout"


def odd(home: Path, folder: Path, **fields: object) -> str:
    """A file with one invalid row."""
    write_rows([load_tasks(home / "test.parquet")[0].row | fields], folder / "odd.jsonl")
    return f"data.train_files={folder}/odd.jsonl"


@pytest.mark.parametrize(
    ("fields", "sentence"),
    [
        ({"data_source": "my/task"}, "row odd:0: no reward function for data_source 'my/task'"),
        ({"agent_name": "my_agnt"}, "row odd:0: there is no agent loop called 'my_agnt'; known are black_box,"),
        (
            {"extra_info": {"tool_selection": "calculator"}},
            "row odd:0: extra_info.tool_selection is 'calculator'; make it",
        ),
        ({"extra_info": {"tool_selection": [["a"]]}}, "row odd:0: extra_info.tool_selection is [['a']]; make it"),
        (
            {"reward_model": {"ground_truth": "many"}},
            "row odd:0: the ground_truth of a rally/arithmetic row must be a number, not 'many'; fix the row",
        ),
        (
            {"agent_name": "rally.recipes.triage.loop.TwoRounds"},
            "row odd:0: the ground_truth of a triage row must hold service and incident_type, not ",
        ),
        ({"tools": ["calc"]}, "row odd:0: there is no tool 'calc'; the tools are calculator"),
    ],
)
def test_rows_whose_episodes_would_all_fail_are_told_before_weights_are_loaded(
    fields: dict[str, object], sentence: str, home: Path, tmp_path: Path
) -> None:
    config = run_config(home, tmp_path / "out", odd(home, tmp_path, **fields), BUILT_IN_REWARD)
    with pytest.raises(RowError) as told:
        read_inputs(config, Paper().console)
    assert str(told.value).startswith(sentence)


@pytest.mark.parametrize("more", [[], [BUILT_IN_REWARD, f"{R}.agent_loop_class=rally.loops.SingleTurnAgentLoop"]])
def test_a_function_or_a_loop_of_ones_own_may_score_anything(home: Path, tmp_path: Path, more: list[str]) -> None:
    config = run_config(home, tmp_path / "out", odd(home, tmp_path, data_source="my/task"), *more)
    check_rows(config, load_tasks(config.data.train_files), Interactions([]), ToolBox([]))


CHECK = """
def run(row, client): ...
def check_row(row):
    assert row["extra_info"]["depth"] > 2
def check_both(row, client): ...
"""


@pytest.mark.parametrize(
    ("check", "sentence"),
    [
        (
            "rally.recipes.repair.hidden_tests:check_row",
            "row odd:0: extra_info.files and extra_info.test are not",
        ),
        ("rows_agent.py:check_row", "row odd:0: rows_agent.py:check_row raised KeyError: 'depth'"),
        (
            "rows_agent.py:check_none",
            "row odd:0: rows_agent.py has no function check_none; correct agent_loop",
        ),
        ("rows_agent.py:check_both", "row odd:0: the function rows_agent.py:check_both must take a row, as in"),
    ],
)
def test_an_agent_refuses_rows_before_weights_are_loaded(
    check: str, sentence: str, home: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "rows_agent.py").write_text(CHECK, encoding="utf-8")
    options = [f"{R}.agent_loop_config.{name}" for name in ("agent=rows_agent.py:run", f"check_row={check}")]
    rows = odd(home, tmp_path, agent_name="black_box")
    for loop in (f"{R}.agent_loop_class=black_box", f"{R}.agent.default_agent_loop=black_box"):
        options.append(f"{R}.agent_loop_config.tools=[]")
        with pytest.raises(RowError) as told:
            read_inputs(run_config(home, tmp_path / "out", rows, loop, *options), Paper().console)
        assert str(told.value).startswith(sentence)


def test_rows_of_another_version_of_repair_are_told() -> None:
    (row,) = repositories.train_rows(1)
    check_row(row)
    info = row["extra_info"]
    for name, value in (("test", "assert total([1]) == 1"), ("test", "[1]"), ("files", "{}"), ("files", '{"a": 1}')):
        with pytest.raises(RallyError, match="make the rows again with: rally data repair"):
            check_row({**row, "extra_info": {**info, name: value}})
    with pytest.raises(RallyError, match="make the rows again"):
        check_row({"prompt": row["prompt"]})


def test_rows_that_were_made_for_another_tool_are_told(home: Path, tmp_path: Path) -> None:
    keywords = {"tools_kwargs": {"peek": {"create_kwargs": {"ground_truth": "72"}}}}
    asking = [{"role": "user", "content": "Use `peek`."}]
    told = Paper()
    odd_rows = odd(home, tmp_path, prompt=asking, extra_info=keywords)
    read_inputs(run_config(home, tmp_path / "out", odd_rows), told.console)
    assert "the prompt of row odd:0 speaks of the tool peek, for which the row has tools_kwargs, but the" in told.text
    assert "tools of the run are calculator; offer that tool, or make rows for these" in told.text
    silent = Paper()
    read_inputs(run_config(home, tmp_path / "out", odd(home, tmp_path, extra_info=keywords)), silent.console)
    assert "speaks of the tool" not in silent.text, "keywords alone may be for another run of the same rows"


def test_a_batch_larger_than_the_data_is_told(paper: Paper) -> None:
    warn_of_repeats(40, 32, paper.console)
    assert not paper.text
    warn_of_repeats(40, 800, paper.console)
    assert "data.train_batch_size=800 is more than the 40 training rows" in paper.text


def test_prompts_are_measured_on_a_system_that_tells_no_affinity(
    home: Path, tmp_path: Path, paper: Paper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr("os.sched_getaffinity")
    inputs = read_inputs(run_config(home, tmp_path), paper.console)
    assert inputs.train_tasks is not None and len(inputs.train_tasks) == 12
