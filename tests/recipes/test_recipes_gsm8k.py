"""GSM8K rows from the real files are complete, with the right ground truths."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from rally.data import DataError, load_conversations, load_tasks, write_rows
from rally.recipes.gsm8k_tool import data as gsm8k
from rally.recipes.gsm8k_tool.data import write_gsm8k, write_gsm8k_sft
from rally.tools import load_tools

QUESTION = {"question": "How many?", "answer": "It is 48/2 = <<48/2=24>>24.\nThen <<24*50=1200>>1,200.\n#### 1,200"}


def passing(rows, total, label):  # type: ignore[no-untyped-def]
    return rows


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for split in ("train", "test"):
        write_rows([QUESTION], tmp_path / "source" / f"{split}.jsonl")
    return tmp_path / "source"


def test_the_real_set_is_complete_and_right(shared: Path, tmp_path: Path) -> None:
    source = shared / "data" / "gsm8k"
    train, test = write_gsm8k(tmp_path, source, "agent_loop", passing)
    assert (train.rows, test.rows) == (7473, 1319)
    for written in (train, test):
        raw = [json.loads(line) for line in (source / f"{written.path.stem}.jsonl").open()]
        for task, original in zip(load_tasks(written.path), raw, strict=True):
            truth = original["answer"].rsplit("####", 1)[1].strip().replace(",", "")
            assert task.ground_truth == truth
            assert task.tools_kwargs == {"calc_gsm8k_reward": {"create_kwargs": {"ground_truth": truth}}}
            assert task.prompt[-1] == {"role": "user", "content": original["question"]}
            assert task.agent_name == "tool_agent"


def test_the_real_solutions_become_tool_conversations(shared: Path) -> None:
    conversations = [row["messages"] for row in gsm8k.sft_rows(shared / "data" / "gsm8k")]
    assert 7000 < len(conversations) < 7473
    for messages in conversations:
        calls = [m for m in messages if m.get("tool_calls")]
        replies = [m for m in messages if m["role"] == "tool"]
        assert len(calls) == len(replies) > 0
        assert "<<" not in "".join(m["content"] for m in messages)
        last = messages[-1]
        assert last["role"] == "assistant"
        assert last["content"].splitlines()[-1].startswith("#### ")


def test_a_solution_is_told_with_the_calculator(folder: Path) -> None:
    [row] = gsm8k.sft_rows(folder)
    assert [tool["function"]["name"] for tool in row["tools"]] == ["calculator"]
    said = [(m["role"], m["content"], *_expressions(m)) for m in row["messages"][1:]]
    assert said == [
        ("user", "How many?"),
        ("assistant", "It is 48/2 =", "48/2"),
        ("tool", "24"),
        ("assistant", "24.\nThen", "24*50"),
        ("tool", "1200"),
        ("assistant", "1,200.\n#### 1200"),
    ]


def test_what_is_taught_shows_the_tool_as_a_rollout_does() -> None:
    [tool] = load_tools({"tools": [{"name": "calculator"}]})
    assert tool.tool_schema == gsm8k.CALCULATOR_SCHEMA


def _expressions(message: dict[str, Any]) -> list[str]:
    return [call["function"]["arguments"]["expression"] for call in message.get("tool_calls", [])]


def test_the_command_writes_conversations_that_load(folder: Path, tmp_path: Path) -> None:
    [written] = write_gsm8k_sft(tmp_path, folder, passing)
    [conversation] = load_conversations(written.path)
    [row] = gsm8k.sft_rows(folder)
    assert [list(conversation.messages), list(conversation.tools or ())] == [row["messages"], row["tools"]]


def test_solutions_that_the_tool_would_contradict_are_left_out(tmp_path: Path) -> None:
    answers = ["<<1/3=.33>>.33\n#### 1", "no notes\n#### 1", "<<2x=4>>\n#### 4", "<<1/4=.25>>.25\n#### 1"]
    write_rows([{"question": "?", "answer": a} for a in answers], tmp_path / "train.jsonl")
    [row] = gsm8k.sft_rows(tmp_path)
    assert row["messages"][3]["content"] == "0.25"


def test_flavors_differ_in_tools_and_interaction(folder: Path) -> None:
    [tool] = gsm8k.build(folder, "tool", "test")
    [loop] = gsm8k.build(folder, "agent_loop", "test")
    [chat] = gsm8k.build(folder, "interaction", "test")
    [calc] = gsm8k.build(folder, "agent_loop", "test", "calculator")
    assert {**tool, "agent_name": "tool_agent"} == loop
    assert tool["reward_model"] == {"style": "rule", "ground_truth": "1200"}
    assert tool["extra_info"]["need_tools_kwargs"] is True
    assert chat["extra_info"]["interaction_kwargs"] == {"name": "gsm8k", "query": "How many?", "ground_truth": "1200"}
    assert "tools_kwargs" not in chat["extra_info"]
    systems = [row["prompt"][0]["content"] for row in (tool, chat, calc)]
    assert ["calc_gsm8k_reward" in s for s in systems] == [True, False, False]
    assert ["`calculator`" in s for s in systems] == [False, False, True]
    assert all("#### <answer>" in s for s in systems)


@pytest.mark.parametrize("name", ["train.parquet", "main/train-00000-of-00001.parquet"])
def test_parquet_sources_are_read_too(tmp_path: Path, name: str) -> None:
    write_rows([QUESTION], tmp_path / name)
    [row] = gsm8k.build(tmp_path, "tool", "train")
    assert row["reward_model"]["ground_truth"] == "1200"


def test_bad_sources_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="unknown flavor 'tols'; choose one of tool, interaction, agent_loop"):
        gsm8k.build(tmp_path, "tols", "train")  # type: ignore[arg-type]
    with pytest.raises(DataError, match=r"has no GSM8K; it must have one of train\.jsonl"):
        next(gsm8k.build(tmp_path, "tool", "train"))
    write_rows([QUESTION, {"question": "?", "answer": "24"}], tmp_path / "train.jsonl")
    with pytest.raises(DataError, match=r"GSM8K train, row 1: .* '#### <number>'"):
        list(gsm8k.build(tmp_path, "tool", "train"))


def test_without_the_package_the_install_command_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(DataError, match=r'pip install "rally-rl\[hub\]"'):
        next(gsm8k.build(None, "tool", "train"))


def hub(monkeypatch: pytest.MonkeyPatch, load: Any) -> None:
    module = types.ModuleType("datasets")
    module.load_dataset = load  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "datasets", module)


def test_the_hub_is_asked_by_its_public_name(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    hub(monkeypatch, lambda *names, split: asked.append((*names, split)) or [QUESTION])
    [row] = gsm8k.build(None, "tool", "test")
    assert asked == [("openai/gsm8k", "main", "test")]
    assert row["extra_info"]["split"] == "test"


def test_a_failed_download_says_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(*names: str, split: str) -> None:
        raise ConnectionError("no route")

    hub(monkeypatch, load)
    with pytest.raises(DataError, match=r"could not be downloaded \(ConnectionError: no route\); check the network"):
        next(gsm8k.build(None, "tool", "train"))
