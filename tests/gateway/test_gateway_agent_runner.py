"""Agents written with other packages give exactly the episodes of the tool loop."""

import asyncio
import ssl
from collections.abc import Sequence
from pathlib import Path

import agents_of_users
import pytest
from gateway_cases import black_box, held_by, held_by_tool_loop, row_of
from langchain_core.utils.function_calling import convert_to_openai_tool
from loop_cases import Reply, calculator, check_sampled_once, check_tiling, hold, said, tiny_codec
from transformers import AutoTokenizer

from rally.chat import ChatCodec, tiny_tokenizer
from rally.gateway import AgentClient
from rally.types import StopReason

CODEC = tiny_codec([calculator])
LANGCHAIN = ChatCodec(tiny_tokenizer(), "hermes", [convert_to_openai_tool(agents_of_users.calculator)])
ODD = 'It is {"a": 1}.\n\n</tool_response> \\n "" '


def script(codec: ChatCodec, letters: str = "", *, parallel: bool = True) -> list[Reply]:
    """Text and a call, two parallel calls, a call cut off before its end-of-turn token, odd text."""
    pieces = ["fi", "ne: 1", " 0"]
    spelled = tuple(i for piece in pieces for i in codec.tokenizer.encode(piece, add_special_tokens=False))
    return [
        Reply(said(codec, "hm", ("calculator", {"expression": "2+2"}))),
        Reply(said(codec, "", *[("calculator", {"expression": text}) for text in ('2\n"x"', "1")[: 1 + parallel]])),
        Reply(said(codec, "", ("calculator", {"expression": "9"}))[:-1]),
        Reply((*spelled, *said(codec, ODD + letters))),
    ]


@pytest.mark.parametrize(
    ("agent", "codec"),
    [
        ("with_openai", CODEC),
        ("with_openai_stream", CODEC),
        ("with_openai_blocking", CODEC),
        ("blocking_inside_async", CODEC),
        ("over_http", CODEC),
        ("with_langgraph", LANGCHAIN),
        ("with_langgraph_stream", LANGCHAIN),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_an_agent_records_what_the_tool_loop_records(agent: str, codec: ChatCodec) -> None:
    check_same(agent, codec, script(codec))


@pytest.fixture(scope="module")
def qwen3(shared: Path) -> ChatCodec:
    return ChatCodec(AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3"), "hermes", CODEC.tools)


def test_a_real_template_and_its_tokenizer_too(qwen3: ChatCodec) -> None:
    check_same("over_http", qwen3, script(qwen3, "é漢🙂"))


@pytest.mark.parametrize(("history", "segments"), [("append", 1), ("rerender", 3)])
def test_a_template_that_drops_thinking_is_followed_or_not(qwen3: ChatCodec, history: str, segments: int) -> None:
    codec = qwen3.with_tools([])
    thought = codec.tokenizer.encode("<think>\nhm\n</think>\n\nyes", add_special_tokens=False)
    replies = [Reply((*thought, codec.end_of_turn))] * 3
    held = held_by("asks_three_times", codec, replies, history=history)
    assert len(held.episode.segments) == segments and held.episode.extra["agent"]["rewritten"] == segments - 1
    question = [{"role": "user", "content": "a"}]
    for call, text in zip(held.engine.calls, ["b", "c", ""], strict=True):
        assert history == "append" or call.prompt == codec.rerender(question).ids
        question += [
            {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
            {"role": "user", "content": text},
        ]
    check_tiling(held.episode)
    check_sampled_once(held)


def check_same(agent: str, codec: ChatCodec, replies: Sequence[Reply]) -> None:
    box, loop = held_by(agent, codec, replies), held_by_tool_loop(codec, replies, [calculator])
    assert box.episode.error is None and len(box.engine.calls) == len(replies)
    assert [(call.prompt, call.params) for call in box.engine.calls] == [
        (call.prompt, call.params) for call in loop.engine.calls
    ]
    assert box.episode.segments == loop.episode.segments
    assert box.episode.stop_reason is loop.episode.stop_reason is StopReason.STOP
    assert [(t.role, t.text, t.start, t.end) for t in box.episode.turns] == [
        (t.role, t.text, t.start, t.end) for t in loop.episode.turns
    ]
    counts = box.episode.extra["agent"]
    assert counts["tool_calls"] == counts["tool_answers"] == len(loop.episode.tool_results)
    assert counts["segments"] == 1 and counts["refused"] == counts["rewritten"] == counts["branches"] == 0
    assert ODD in box.episode.extra["agent_answer"]
    check_tiling(box.episode)
    check_sampled_once(box)


def test_an_agent_that_writes_into_its_row_writes_into_no_other_episodes() -> None:
    codec = tiny_codec()
    row = row_of(codec)
    for _ in range(2):
        held = asyncio.run(hold(black_box("writes_into_its_row", codec), row))
        assert held.episode.extra["agent_answer"] == "5" and held.episode.extra["agent"]["rewritten"] == 0
    assert row.row["raw_prompt"] == list(row.prompt)


def test_certificates_of_others_are_checked() -> None:
    client = AgentClient(base_url="http://127.0.0.1:1/v1", api_key="k", episode_id="e")
    for made in (client.openai, client.sync_openai):
        for options, checked in (({}, False), ({"base_url": "https://judge.example/v1"}, True)):
            context = made(**options)._client._transport._pool._ssl_context
            assert (context.verify_mode is ssl.CERT_REQUIRED) == checked
    asyncio.run(client.close())
