"""The check accepts exactly the conversations that an episode could produce, and shows where others differ."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from train_cases import write_model
from transformers import AutoTokenizer
from typer.testing import CliRunner

from rally.chat import ChatCodec, tiny_tokenizer
from rally.cli.main import app
from rally.data import Conversation, write_rows
from rally.sft.template_check import CheckReport, SftDifference, check_conversations, compare
from rally.sft.training import SftSettings, conversation_row

SCHEMA = {
    "type": "function",
    "function": {
        "name": "code_interpreter",
        "description": "Runs Python.",
        "parameters": {"type": "object", "properties": {"code": {"type": "string"}}, "required": ["code"]},
    },
}
USER = {"role": "user", "content": "What is 12*34?"}
FORMATS = {"qwen2_5": "hermes", "qwen3": "hermes", "llama3_2": "llama3_json"}
WHOLE = SftSettings(batch_size=1, max_length=10**6)


def calling(*codes: str, content: str = "") -> dict[str, Any]:
    calls = [{"type": "function", "function": {"name": "code_interpreter", "arguments": {"code": c}}} for c in codes]
    return {"role": "assistant", "content": content, "tool_calls": calls}


def tool(text: str, **fields: Any) -> dict[str, Any]:
    return {"role": "tool", "content": text, **fields}


def says(text: str) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


RETOOL = [USER, calling("print(12*34)"), tool("408\n"), calling("x = 1"), tool(""), says("It is \\boxed{408}.")]


@pytest.fixture(scope="module")
def codecs(shared: Path) -> dict[str, ChatCodec]:
    tokenizers = {name: AutoTokenizer.from_pretrained(shared / "tokenizers" / name) for name in FORMATS}
    return {name: ChatCodec(tokenizer, FORMATS[name], [SCHEMA]) for name, tokenizer in tokenizers.items()}


@pytest.fixture(scope="module")
def tiny() -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), "hermes", [SCHEMA])


def check(codec: ChatCodec, *talks: list[dict[str, Any]], max_length: int = 10**6) -> CheckReport:
    told = [Conversation(tuple(talk), where=f"sft, row {i}") for i, talk in enumerate(talks)]
    return check_conversations(told, lambda _one: codec, max_length)


@pytest.mark.parametrize("name", [*FORMATS])
def test_a_conversation_with_tools_is_what_an_episode_would_be(codecs: dict[str, ChatCodec], name: str) -> None:
    report = check(codecs[name], RETOOL, [USER, says("408")])
    assert (report.ok, report.different, report.over_long, report.first) == (2, 0, 0, None)
    row = conversation_row(codecs[name], RETOOL, WHOLE)
    assert report.supervised == len(row.sampled) + len(
        conversation_row(codecs[name], [USER, says("408")], WHOLE).sampled
    )


def test_thinking_that_the_template_drops_later_is_counted_apart(codecs: dict[str, ChatCodec]) -> None:
    thought = [USER, says("<think>\neasy\n</think>\n\n408"), {"role": "user", "content": "And 1+1?"}, says("2")]
    report = check(codecs["qwen3"], thought)
    assert (report.ok, report.rendered_otherwise) == (1, 1), "append keeps what was sampled, and that is taught"
    assert "easy" in str(report.first_rendered)
    assert check(codecs["qwen2_5"], thought).rendered_otherwise == 0


edges = st.sampled_from(["", " ", "\n", "x\n\n", "<|im_end|>", "</tool_response>", "漢🙂", "</think>", '{"a": 1}'])
texts = st.text("ab 1\n.\"'{}é", max_size=12) | edges


@st.composite
def talks(draw: st.DrawFn) -> list[dict[str, Any]]:
    """Conversations as loops produce them: every call has a tool message, every text a user message."""
    talk = [USER]
    for _ in range(draw(st.integers(0, 3))):
        code = draw(texts)
        made = draw(st.booleans())
        talk += [calling(code), tool(draw(texts))] if made else [says("well"), {"role": "user", "content": draw(texts)}]
    return [*talk, says("done")]


@pytest.mark.parametrize("name", [*FORMATS])
def test_whatever_tools_and_users_say_the_tokens_are_those_of_an_episode(
    codecs: dict[str, ChatCodec], name: str
) -> None:
    @settings(max_examples=25, deadline=None)
    @given(talks())
    def every(talk: list[dict[str, Any]]) -> None:
        report = check(codecs[name], talk)
        assert report.first is None and report.ok == 1

    every()


@pytest.mark.parametrize(
    ("talk", "words"),
    [
        ([USER, calling("1"), says("1")], "reply 1 makes 1 tool calls, but 0 tool responses follow"),
        ([USER, says("hm"), tool("1"), says("1")], "reply 1 makes 0 tool calls, but 1 tool responses follow"),
        ([USER, says("hm"), says("1")], "reply 1 is followed by another reply"),
        ([USER, says("1"), USER], "must not begin with an assistant message, and must end with one"),
    ],
)
def test_what_no_episode_could_be(tiny: ChatCodec, talk: list[dict[str, Any]], words: str) -> None:
    report = check(tiny, [USER, says("fine")], talk, [USER, says("fine")], talk)
    assert (report.ok, report.different) == (2, 2)
    assert str(report.first).startswith("sft, row 1: ") and words in str(report.first), "the first, by its row"


def test_calls_that_the_loop_would_not_read(codecs: dict[str, ChatCodec]) -> None:
    llama = ChatCodec(codecs["llama3_2"].tokenizer, "hermes", [SCHEMA])
    assert "its text parses to none" in str(check(llama, RETOOL).first)
    spoken = [USER, calling("1", content="Let me see."), tool("1"), says("1")]
    lost = "does not print the whole text of an assistant message beside its tool calls ('Let me see.')"
    assert lost in str(check(codecs["llama3_2"], spoken).first)
    assert check(codecs["qwen2_5"], spoken).different == 0
    two = [USER, calling("1", "2"), tool("1"), tool("2"), says("1")]
    assert check(codecs["llama3_2"], two).different == 1, "its template has room for one call"
    assert check(codecs["qwen2_5"], two).ok == 1


NAMING = (
    "{% for m in messages %}<|im_start|>{{ m.role }}{% if m.name %} {{ m.name }}{% endif %}{{ '\\n' + m.content }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|im_end|>{{ '\\n' }}"
    "{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant{{ '\\n' }}{% endif %}"
)


def test_the_first_token_that_differs_is_shown_on_both_sides() -> None:
    """The template prints the name of a tool, and the row omits it; an episode would have it."""
    codec = ChatCodec(tiny_tokenizer(), "hermes", [SCHEMA], chat_template=NAMING)
    assert check(codec, [USER, calling("1"), tool("4", name="code_interpreter"), says("4")]).different == 0
    report = check(codec, [USER, calling("1"), tool("4"), says("4")])
    head, taught, episode = str(report.first).splitlines()
    assert "in turn 2 (tool or user, observed), differs from the episode" in head
    assert taught.strip().startswith("row:") and "['" not in taught.split("[")[0]
    shown = [line.partition("[")[2].partition("]")[0] for line in (taught, episode)]
    assert shown[0].endswith("'\\n'") and shown[1].endswith("' '"), "one goes on with a newline, one with the name"
    assert "* '<|im_end|>'" in taught and "* '<|im_end|>'" in episode, "sampled tokens are marked"


@pytest.mark.parametrize("wrong", [lambda at: at[1:], lambda at: (at[0] - 1, *at), lambda at: at[:-1]])
def test_a_mask_that_is_off_by_one_is_found(
    tiny: ChatCodec, wrong: Callable[[tuple[int, ...]], tuple[int, ...]]
) -> None:
    row = conversation_row(tiny, RETOOL, WHOLE)
    compare(tiny, RETOOL, row)
    at = wrong(tuple(row.sampled.tolist()))
    with pytest.raises(SftDifference, match="differs from the episode"):
        compare(tiny, RETOOL, replace(row, sampled=at, logprobs=(0.0,) * len(at)))
    with pytest.raises(SftDifference, match=r"\[the end\]"):
        compare(tiny, RETOOL, replace(row, ids=row.ids[:-1], sampled=row.sampled[:-1], logprobs=row.logprobs[:-1]))


def command(home: Path, *words: str) -> tuple[int, str]:
    files = [f"model.path={home / 'model'}", f"data.train_files={home / 'sft.parquet'}", "data.max_length=4000"]
    result = CliRunner().invoke(app, ["sft", *files, *words, "--check"])
    return result.exit_code, " ".join(result.output.split())


def test_the_command(tmp_path: Path) -> None:
    write_model(tmp_path / "model")
    row = {"messages": RETOOL, "tools": [SCHEMA]}
    write_rows([row, row], tmp_path / "sft.parquet")
    code, text = command(tmp_path)
    assert code == 0 and "equal to an episode 2 of 2 conversations" in text
    write_rows([row, {**row, "messages": [USER, says("a"), says("b")]}], tmp_path / "bad.jsonl")
    code, text = command(tmp_path, f"data.val_files={tmp_path / 'bad.jsonl'}")
    assert code == 1 and "the first difference: bad, row 1: reply 1 is followed by another reply" in text
    code, text = command(tmp_path, "data.max_length=20")
    assert code == 1 and "over-long 2 of more than data.max_length=20 tokens, an error" in text
    code, text = command(tmp_path, "data.max_length=20", "data.truncation=left")
    assert code == 0 and "tokens, truncated on the left" in text
