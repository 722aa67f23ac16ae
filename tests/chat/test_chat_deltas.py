"""A conversation that grows turn by turn has the ids of the template's own rendering of it."""

import re
from typing import Any

import pytest
from chat_cases import conversations, followers, replies, texts, without_text_beside_calls, words
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rally.chat import ChatCodec

LIGHT = settings(max_examples=20, deadline=None, suppress_health_check=list(HealthCheck))
APPEND_ONLY = [("tiny", 3), ("qwen2_5", 3), ("llama3_2", 1)]
ALL = ["tiny", "qwen2_5", "qwen3", "llama3_2"]


def merges(codec: ChatCodec, messages: list[dict[str, Any]]) -> bool:
    """Whether a reply begins with a newline, which a full rendering merges into one token with the prompt's."""
    return any(
        re.match(r"\s*[\r\n]", codec.decode(codec.encode_assistant(m))) for m in messages if m["role"] == "assistant"
    )


@pytest.mark.parametrize(("name", "max_calls"), APPEND_ONLY)
def test_turn_by_turn_is_the_full_rendering(codecs: dict[str, ChatCodec], name: str, max_calls: int) -> None:
    codec = codecs[name]

    @LIGHT
    @given(conversations(max_calls), followers())
    def check(messages: list[dict[str, Any]], after: list[dict[str, Any]]) -> None:
        messages = without_text_beside_calls(messages) if name == "llama3_2" else messages
        grown = codec.encode_conversation(messages)
        whole = codec.render(messages, generation_prompt=False)
        last_end = len(whole) - whole[::-1].index(codec.end_of_turn)
        onward = grown.ids + codec.encode_delta(after)
        whole_onward = codec.render(messages + after, generation_prompt=True)
        assert codec.decode(onward) == codec.decode(whole_onward)
        if not merges(codec, messages):
            assert grown.ids == whole[:last_end]
            assert onward == whole_onward

    check()


@pytest.mark.parametrize("name", ALL)
def test_mask_is_one_exactly_on_the_replies(codecs: dict[str, ChatCodec], name: str) -> None:
    codec = codecs[name]

    @LIGHT
    @given(conversations(1))
    def check(messages: list[dict[str, Any]]) -> None:
        messages = without_text_beside_calls(messages) if name == "llama3_2" else messages
        ids, mask, _ = codec.encode_conversation(messages)
        supervised = tuple(i for i, m in zip(ids, mask, strict=True) if m)
        expected = [codec.encode_assistant(m) for m in messages if m["role"] == "assistant"]
        assert supervised == sum(expected, ())
        assert all(reply[-1] == codec.end_of_turn for reply in expected)

    check()


@pytest.mark.parametrize("name", ALL)
def test_fast_delta_is_the_slow_delta(codecs: dict[str, ChatCodec], name: str) -> None:
    codec = codecs[name]

    @LIGHT
    @given(followers())
    def check(messages: list[dict[str, Any]]) -> None:
        assert codec._turns.delta(messages) == codec._turns.slow_delta(messages)

    check()


@pytest.mark.parametrize("name", ALL)
def test_what_is_encoded_is_parsed_back(codecs: dict[str, ChatCodec], name: str) -> None:
    codec = codecs[name]
    prose = words.filter(lambda s: "{" not in s and "<" not in s)

    @LIGHT
    @given(replies(1 if name == "llama3_2" else 3, prose))
    def check(message: dict[str, Any]) -> None:
        parsed = codec.parse(codec.encode_assistant(message))
        meant = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        if name == "tiny":  # its vocabulary is ASCII
            assert [c.name for c in parsed.tool_calls] == [n for n, _ in meant]
        else:
            assert [(c.name, c.arguments) for c in parsed.tool_calls] == meant
        assert parsed.errors == () and parsed.closed

    check()


@pytest.mark.parametrize("name", ALL)
def test_parse_never_raises_on_any_ids(codecs: dict[str, ChatCodec], name: str) -> None:
    codec = codecs[name]
    # Vocabularies are padded: models can sample ids that no tokenizer knows.
    beyond = len(codec.tokenizer) + 300

    @LIGHT
    @given(st.lists(st.integers(0, beyond), max_size=40), st.booleans())
    def check(ids: list[int], ended: bool) -> None:
        parsed = codec.parse([*ids, codec.end_of_turn] if ended else ids)
        assert len(parsed.errors) == sum(c.error is not None for c in parsed.tool_calls)

    check()


@pytest.mark.parametrize("name", ALL)
def test_a_parsed_turn_can_be_rendered_again(codecs: dict[str, ChatCodec], name: str) -> None:
    """Whatever was sampled, the `rerender` history policy gets a history that the template accepts."""
    codec = codecs[name]

    @LIGHT
    @given(texts, st.lists(st.sampled_from(PIECES), max_size=8).map("".join))
    def check(content: str, noise: str) -> None:
        ids = codec.encode_assistant({"role": "assistant", "content": content + noise})
        parsed = codec.parse(ids)
        message = codec.message(parsed)
        if len(message.get("tool_calls", [])) <= 1 or name != "llama3_2":
            assert codec.rerender([{"role": "user", "content": "q"}, message])
        if not parsed.tool_calls:
            assert message == {"role": "assistant", "content": parsed.text}

    check()


PIECES = [
    '<tool_call>{"name": "calculator", "arguments": {}}</tool_call>',
    "<tool_call>",
    "</tool_call>",
    '{"name": "a"',
]
PIECES += [
    '"\\ud800"',
    "}",
    '"arguments": ',
    "{'name': 'search', 'parameters': {'query': 'x',}}",
    "\n",
    "<think>",
    "</think>",
]
