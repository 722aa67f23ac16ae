"""Conversations load the same from every file format; errors name file, row and field."""

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from rally.data import Conversation, DataError, QuestionAnswer, load_conversations, write_rows

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello"}


def calling(name: str, arguments: Any, **fields: Any) -> dict[str, Any]:
    call = {"type": "function", "function": {"name": name, "arguments": arguments}, **fields}
    return {"role": "assistant", "content": "", "tool_calls": [call]}


def schema(name: str, *parameters: str) -> dict[str, Any]:
    properties = {p: {"type": "string"} for p in parameters}
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}


ROWS = [
    {"messages": [USER, calling("calc", {"expression": "1+1"}), {"role": "tool", "content": "2"}, ANSWER]},
    {"messages": [USER, calling("search", {"query": "x", "top": 3}, id="c1"), ANSWER], "tools": [schema("calc", "a")]},
    {"messages": [USER, ANSWER], "tools": [schema("search", "query", "top")], "enable_thinking": False},
]


def test_parquet_and_jsonl_give_equal_conversations(tmp_path: Path) -> None:
    write_rows(ROWS, tmp_path / "a.jsonl")
    columns = {name: [row.get(name) for row in ROWS] for name in ("messages", "tools", "enable_thinking")}
    pq.write_table(pa.table(columns), tmp_path / "a.parquet")
    from_parquet = list(load_conversations(tmp_path / "a.parquet"))
    assert from_parquet == list(load_conversations(tmp_path / "a.jsonl"))
    assert from_parquet[0] == Conversation(tuple(ROWS[0]["messages"]), None, None)  # type: ignore[arg-type]
    assert from_parquet[1].messages[1]["tool_calls"][0]["function"]["arguments"] == {"query": "x", "top": 3}
    assert from_parquet[2].tools == (schema("search", "query", "top"),)
    assert from_parquet[2].enable_thinking is False


def test_argument_and_tool_texts_are_parsed(tmp_path: Path) -> None:
    row = {"messages": [USER, calling("calc", '{"a": null}')], "tools": json.dumps([schema("calc", "a")])}
    write_rows([row], tmp_path / "a.parquet")
    [conversation] = load_conversations(tmp_path / "a.parquet")
    function = conversation.messages[1]["tool_calls"][0]["function"]
    assert function["arguments"] == {"a": None}, "a null in JSON text was written on purpose"
    assert conversation.tools == (schema("calc", "a"),)


def test_tools_may_be_a_list_of_texts(tmp_path: Path) -> None:
    write_rows([{"messages": [USER, ANSWER], "tools": [json.dumps(schema("calc", "a"))]}], tmp_path / "a.parquet")
    [conversation] = load_conversations(tmp_path / "a.parquet")
    assert conversation.tools == (schema("calc", "a"),) and conversation.where == "a, row 0"


def test_a_question_and_an_answer_are_a_conversation(tmp_path: Path) -> None:
    plain = {"question": "Hi", "answer": "Hello"}
    nested = {"extra_info": {"asked": {"text": "Hi"}, "reply": "Hello"}}
    talk = {"prompt": [{"role": "system", "content": "Be kind."}, USER], "answer": "Hello"}
    for row, pair, expected in (
        (plain, QuestionAnswer(("question",), ("answer",)), (USER, ANSWER)),
        (nested, QuestionAnswer(("extra_info", "asked", "text"), ("extra_info", "reply")), (USER, ANSWER)),
        (talk, QuestionAnswer(("prompt",), ("answer",)), ({"role": "system", "content": "Be kind."}, USER, ANSWER)),
    ):
        write_rows([row], tmp_path / "a.parquet")
        [conversation] = load_conversations(tmp_path / "a.parquet", pair=pair)
        assert conversation.messages == expected


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"asked": "Hi"}, "info is missing (the row has asked); name the columns of question and answer"),
        ({"info": {"q": "Hi", "b": "x"}}, "info.a is missing (info has q, b)"),
        ({"info": "Hi"}, "info.q is missing; name the columns"),
        ({"info": {"q": "Hi", "a": [1]}}, "info.a is [1]; it must be a string, the answer to train on"),
        ({"info": {"q": 3, "a": "x"}}, "info.q is 3; it must be a list of messages"),
    ],
)
def test_a_pair_that_is_not_there_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    write_rows([row], tmp_path / "a.jsonl")
    with pytest.raises(DataError) as raised:
        load_conversations(tmp_path / "a.jsonl", pair=QuestionAnswer(("info", "q"), ("info", "a")))
    assert sentence in str(raised.value)


def test_other_keys_may_be_named(tmp_path: Path) -> None:
    write_rows([{"chat": [USER, ANSWER], "fns": [schema("f")], "think": True}], tmp_path / "a.jsonl")
    [conversation] = load_conversations(tmp_path / "a.jsonl", "chat", "fns", "think")
    assert conversation == Conversation((USER, ANSWER), (schema("f"),), True)


CALL = "messages[1].tool_calls[0]"


@pytest.mark.parametrize(
    ("row", "sentence"),
    [
        ({"chat": []}, "messages is missing (the row has chat)"),
        ({"messages": [USER]}, "messages has no assistant message"),
        ({"messages": [USER, {"role": "assistant"}]}, "messages[1].content is missing; it must be a string"),
        ({"messages": [USER, calling("calc", "{oops")]}, f"{CALL}.function.arguments is '{{oops', which is not valid"),
        ({"messages": [USER, calling("calc", [1])]}, f"{CALL}.function.arguments is [1]; it must be a mapping"),
        ({"messages": [USER, {**ANSWER, "tool_calls": [{"id": "x"}]}]}, f"{CALL}.name is missing"),
        ({"messages": [USER, {**ANSWER, "tool_calls": ["calc"]}]}, f"{CALL} is 'calc'; it must be a mapping"),
        ({"messages": [USER, {**ANSWER, "tool_calls": "calc"}]}, "messages[1].tool_calls is 'calc'; it must be a list"),
        ({"messages": [USER, ANSWER], "tools": {"a": 1}}, "tools is {'a': 1}; it must be a list of tool schemas"),
        ({"messages": [USER, ANSWER], "tools": ["calc"]}, "tools[0] is 'calc'; it must be a schema"),
        ({"messages": [USER, ANSWER], "enable_thinking": "no"}, "enable_thinking is 'no'; it must be true, false"),
    ],
)
def test_a_bad_row_is_named(tmp_path: Path, row: dict[str, Any], sentence: str) -> None:
    file = tmp_path / "sft.jsonl"
    write_rows([ROWS[0], row], file)
    with pytest.raises(DataError) as raised:
        load_conversations(file)
    assert f"{file}, row 1: {sentence}" in str(raised.value)
