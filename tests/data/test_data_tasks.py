"""Rows become the same Tasks from every file format; errors name file, row and field."""

import copy
import json
import time
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rally.data import DataError, load_tasks, write_rows
from rally.types import RallyError

Row = dict[str, Any]


def row(number: int = 0, **changes: Any) -> Row:
    base = {
        "data_source": "rally/test",
        "prompt": [{"role": "system", "content": "Be brief."}, {"role": "user", "content": f"Question {number}?"}],
        "reward_model": {"style": "rule", "ground_truth": str(number)},
        "extra_info": {"split": "train", "index": 100 + number},
        "agent_name": "tool_agent",
    }
    merged = {**base, **changes}
    return {key: value for key, value in merged.items() if value is not ...}


def mixed_rows() -> list[Row]:
    """Rows with different keys, as in a file with several tasks."""
    search = {"search": {"create_kwargs": {"question": "who?", "top": 3}}}
    calc = {"calc": {"create_kwargs": {"ground_truth": "7"}, "execute_kwargs": {}}}
    chat = {"name": "gsm8k", "query": "q", "ground_truth": "7"}
    return [
        row(0, extra_info={"tools_kwargs": search}, difficulty=3),
        row(1, extra_info={"tools_kwargs": calc, "index": 9}, agent_name=...),
        row(2, extra_info={"interaction_kwargs": chat}, notes=["a", "b"]),
        row(3, reward_model={"style": "model"}),
        row(4, reward_model={"style": "rule", "ground_truth": {"target": ["x", "y"]}}, extra_info=...),
        row(5, prompt=[{"role": "user", "content": "é\n中"}, {"role": "tool", "content": "48", "name": "calc"}]),
    ]


def load_in(folder: Path, suffix: str, rows: list[Row]) -> list[Any]:
    write_rows(rows, folder / f"train.{suffix}")
    return list(load_tasks(folder / f"train.{suffix}"))


def test_parquet_and_jsonl_give_equal_tasks(tmp_path: Path) -> None:
    assert load_in(tmp_path, "parquet", mixed_rows()) == load_in(tmp_path, "jsonl", mixed_rows())


def test_a_json_list_gives_the_same_tasks_as_jsonl(tmp_path: Path) -> None:
    (tmp_path / "list").mkdir()
    (tmp_path / "list" / "train.json").write_text(json.dumps(mixed_rows(), indent=1))
    assert list(load_tasks(tmp_path / "list" / "train.json")) == load_in(tmp_path, "jsonl", mixed_rows())


def test_a_task_carries_the_fields_of_its_row(tmp_path: Path) -> None:
    first, second, third, *_ = load_in(tmp_path, "parquet", mixed_rows())
    assert (first.id, first.data_source, first.agent_name) == ("train:0", "rally/test", "tool_agent")
    assert first.prompt[1] == {"role": "user", "content": "Question 0?"}
    assert first.row["difficulty"] == 3
    assert first.row["raw_prompt"] == list(first.prompt)
    assert first.row["index"] == 0, "without extra_info.index the row's own number"
    assert second.row["index"] == second.extra_info["index"] == 9
    assert second.agent_name is None
    assert third.interaction_kwargs == third.row["interaction_kwargs"]
    assert third.interaction_kwargs == {"name": "gsm8k", "query": "q", "ground_truth": "7"}


@pytest.mark.parametrize("suffix", ["parquet", "jsonl"])
def test_entries_that_parquet_invents_are_dropped(tmp_path: Path, suffix: str) -> None:
    first, second, *_ = load_in(tmp_path, suffix, mixed_rows())
    assert first.tools_kwargs == {"search": {"create_kwargs": {"question": "who?", "top": 3}}}
    assert second.tools_kwargs == {"calc": {"create_kwargs": {"ground_truth": "7"}, "execute_kwargs": {}}}
    assert "tools_kwargs" not in load_in(tmp_path, suffix, mixed_rows())[2].extra_info
    assert all("name" not in message for message in first.prompt)


def test_json_text_in_columns_is_accepted(tmp_path: Path) -> None:
    plain = row(0, extra_info={"tools_kwargs": {"calc": {"create_kwargs": {"x": 1}}}})
    encoded = {
        key: json.dumps(value) if key in ("prompt", "reward_model", "extra_info") else value
        for key, value in plain.items()
    }
    pq.write_table(pa.Table.from_pylist([encoded]), tmp_path / "train.parquet")
    [task] = load_tasks(tmp_path / "train.parquet")
    assert [task] == load_in(tmp_path, "jsonl", [plain])


def test_other_keys_may_name_the_prompt_and_the_reward(tmp_path: Path) -> None:
    odd = row(0, question=row()["prompt"], prompt=..., source="math", data_source=...)
    write_rows([odd], tmp_path / "odd.jsonl")
    [task] = load_tasks(tmp_path / "odd.jsonl", prompt_key="question", reward_fn_key="source")
    assert task.data_source == "math"
    assert task.row["question"] == task.row["raw_prompt"]


def test_assistant_tool_calls_in_a_prompt_are_put_in_shape(tmp_path: Path) -> None:
    call = {"name": "calc", "arguments": '{"expression": "1+1"}'}
    prompt = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2"},
    ]
    [task] = load_in(tmp_path, "parquet", [row(0, prompt=prompt)])
    function = {"name": "calc", "arguments": {"expression": "1+1"}}
    assert task.prompt[1] == {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"type": "function", "function": function}],
    }


LONG = "What is 12*34? " * 20
BAD_ROWS: list[tuple[Row, str]] = [
    (row(data_source=...), "data_source is missing (the row has prompt, reward_model, extra_info, agent_name)"),
    (row(data_source=3), "data_source is 3; it must be a string"),
    (row(prompt=...), "prompt is missing"),
    (row(prompt="Hi?"), "prompt is a string; it must be a list of messages, here [{'role': 'user', 'content': 'Hi?'}]"),
    (row(prompt=LONG), "'What is 12*34? "),
    (row(prompt="[not json"), "prompt is a string"),
    (row(prompt=[]), "prompt is []; it must be a list of messages with at least one in it"),
    (row(prompt=["Hi?"]), "prompt[0] is 'Hi?'; it must be a mapping with role and content"),
    (
        row(prompt=[{"role": "user", "content": "a"}, {"role": "bot", "content": "b"}]),
        "prompt[1].role is 'bot'; it must be one of system, user, assistant, tool",
    ),
    (row(prompt=[{"content": "a"}]), "prompt[0].role is None; it must be one of"),
    (row(prompt=[{"role": "user"}]), "prompt[0].content is missing; it must be a string"),
    (row(prompt=[{"role": "user", "content": 7}]), "prompt[0].content is 7; it must be one string"),
    (
        row(prompt=[{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]),
        "prompt ends with the assistant; its last message must be from user, tool or system",
    ),
    (row(prompt=[{"role": "user", "content": "a", "tool_calls": [{"name": "x"}]}]), "only the assistant may have one"),
    (row(reward_model=...), "reward_model.ground_truth is missing"),
    (row(reward_model={"style": "rule", "ground_truth": None}), "reward_model.ground_truth is missing"),
    (row(reward_model="42"), "reward_model is '42'; it must be a mapping"),
    (row(extra_info=[1]), "extra_info is [1]; it must be a mapping"),
    (row(extra_info={"tools_kwargs": ["calc"]}), "extra_info.tools_kwargs is ['calc']; it must be a mapping"),
    (row(extra_info={"tools_kwargs": {"calc": 1}}), "extra_info.tools_kwargs.calc is 1; it must be a mapping"),
    (row(extra_info={"interaction_kwargs": "x"}), "extra_info.interaction_kwargs is 'x'; it must be a mapping"),
    (row(agent_name=3), "agent_name is 3; it must be a string, or absent"),
]


@pytest.mark.parametrize(("bad", "sentence"), BAD_ROWS)
def test_a_bad_row_is_named(tmp_path: Path, bad: Row, sentence: str) -> None:
    file = tmp_path / "train.jsonl"
    write_rows([row(0), row(1), bad], file)
    with pytest.raises(DataError) as raised:
        load_tasks(file)
    head, line = str(raised.value).splitlines()
    assert head == "1 of 3 rows are invalid (rows are counted from 0):"
    assert line.strip().startswith(f"{file}, row 2: ")
    assert sentence in line
    assert isinstance(raised.value, RallyError)


def test_many_bad_rows_are_counted_and_the_first_shown(tmp_path: Path) -> None:
    rows = [row(i, data_source=... if i % 2 else "x") for i in range(40)]
    write_rows(rows, tmp_path / "train.parquet")
    with pytest.raises(DataError) as raised:
        load_tasks(tmp_path / "train.parquet")
    lines = str(raised.value).splitlines()
    assert lines[0].startswith("20 of 40 rows")
    assert [line.split(":")[0].split()[-1] for line in lines[1:6]] == ["1", "3", "5", "7", "9"]
    assert lines[6].strip() == "... and 15 more"


@pytest.mark.parametrize(
    ("name", "content", "sentence"),
    [
        ("train.jsonl", b'{"a": 1}\n\n{"a": \n', "row 1 (counted from 0): this is not valid JSON"),
        ("train.jsonl", b"[1]\n", "row 0 (counted from 0): this is not a JSON object"),
        ("train.json", b"[1]", "row 0 (counted from 0): this is not a JSON object"),
        ("train.jsonl", b"\n", "there are no rows in"),
        ("train.parquet", b"PAR1 not at all", "cannot be read as Parquet"),
        ("train.csv", b"a,b", "its name must end in .parquet, .jsonl, .json"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes, sentence: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError) as raised:
        load_tasks(tmp_path / name)
    assert sentence in str(raised.value)
    assert str(tmp_path / name) in str(raised.value)


def test_missing_empty_and_repeated_files_are_errors(tmp_path: Path) -> None:
    write_rows([row()], tmp_path / "a.jsonl")
    with pytest.raises(DataError, match="there is no file"):
        load_tasks(tmp_path / "b.jsonl")
    with pytest.raises(DataError, match="name at least one"):
        load_tasks([])
    with pytest.raises(DataError, match="listed twice"):
        load_tasks([tmp_path / "a.jsonl", tmp_path / "a.jsonl"])


def test_several_files_keep_their_order_and_have_unique_ids(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        write_rows([row(i, data_source=folder) for i in range(3)], tmp_path / folder / "train.parquet")
    files = [str(tmp_path / "x" / "train.parquet"), tmp_path / "y" / "train.parquet"]
    tasks = load_tasks(files)
    assert [task.id for task in tasks] == [f"{f}/train:{i}" for f in "xy" for i in range(3)]
    assert [task.data_source for task in tasks] == ["x"] * 3 + ["y"] * 3
    assert tasks.files == tuple(map(Path, files))
    assert tasks[-1] == tasks[5] == tasks[5:][0]
    with pytest.raises(IndexError):
        tasks[6]


def test_max_samples_takes_the_head_or_a_seeded_choice(tmp_path: Path) -> None:
    file = tmp_path / "train.parquet"
    write_rows([row(i) for i in range(50)], file)
    assert [t.id for t in load_tasks(file, max_samples=3)] == ["train:0", "train:1", "train:2"]
    chosen = [t.id for t in load_tasks(file, max_samples=10, shuffle=True, seed=1)]
    assert chosen == [t.id for t in load_tasks(file, max_samples=10, shuffle=True, seed=1)]
    assert chosen != [t.id for t in load_tasks(file, max_samples=10, shuffle=True, seed=2)]
    assert len(set(chosen)) == 10
    assert len(load_tasks(file, max_samples=99)) == 50
    with pytest.raises(DataError, match="max_samples is 0"):
        load_tasks(file, max_samples=0)


def test_rows_that_are_not_taken_are_not_complained_about(tmp_path: Path) -> None:
    write_rows([row(0), row(1, data_source=...)], tmp_path / "train.jsonl")
    assert len(load_tasks(tmp_path / "train.jsonl", max_samples=1)) == 1


def test_select_keeps_ids_and_order(tmp_path: Path) -> None:
    write_rows([row(i) for i in range(10)], tmp_path / "train.parquet")
    chosen = load_tasks(tmp_path / "train.parquet").select([7, 2, 5]).select([2, 0])
    assert [task.id for task in chosen] == ["train:5", "train:7"]


def test_changing_a_task_does_not_change_the_set(tmp_path: Path) -> None:
    write_rows([row(0)], tmp_path / "train.jsonl")
    tasks = load_tasks(tmp_path / "train.jsonl")
    before = copy.deepcopy(tasks[0])
    tasks[0].row["raw_prompt"].append({"role": "user", "content": "more"})
    tasks[0].extra_info["index"] = -1
    assert tasks[0] == before


def test_thirty_thousand_rows_are_validated_in_seconds(tmp_path: Path) -> None:
    table = pa.Table.from_pylist([row(i) for i in range(1000)])
    pq.write_table(pa.concat_tables([table] * 30), tmp_path / "big.parquet")
    start = time.process_time()
    tasks = load_tasks(tmp_path / "big.parquet")
    assert time.process_time() - start < 6, "processor seconds"
    assert len(tasks) == 30_000
    assert tasks[29_999].id == "big:29999"
    assert tasks[29_999].ground_truth == "999"
