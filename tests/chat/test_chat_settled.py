"""The text of an unfinished turn that may be sent is the beginning of its message, in every tool-call format."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rally.chat import FORMATS, ChatCodec, Parsed, get_format, tiny_tokenizer
from rally.types import ToolCall

TOOLS = [{"type": "function", "function": {"name": "lookup", "parameters": {"properties": {"query": {}}}}}]
TOKENIZER = tiny_tokenizer()
TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)  # without calls, so that the format writes them
STREAMED = [name for name in FORMATS if get_format(name).begins]


def content(codec: ChatCodec, text: str) -> str:
    """The content of the message that the whole text becomes."""
    found = codec.format.parse(text, codec.tools, start=codec._calls_start(text))
    message = codec.message(Parsed(text=text, content=found.content, tool_calls=found.calls))
    return str(message["content"]) if "tool_calls" in message else text


@pytest.mark.parametrize("name", STREAMED)
def test_what_is_sent_early_is_never_taken_back(name: str) -> None:
    codec = ChatCodec(TOKENIZER, name, TOOLS, chat_template=TURNS)
    call = codec.format.render([ToolCall(name="lookup", arguments={"query": "x < y"}, id=codec.format.call_id("", 0))])
    bits = ["a word", " ", "\n", "<", "<think>", "</think>", "[", "{", "so", call, call[: len(call) // 2]]
    bits += [*codec.format.begins, *(word[:-1] for word in codec.format.begins), *codec.format.marks]

    @settings(max_examples=30)
    @given(text=st.lists(st.sampled_from(bits), max_size=7).map("".join))
    def check(text: str) -> None:
        whole, sent = content(codec, text), ""
        for end in range(len(text) + 1):
            settled = codec.settled(text[:end])
            assert whole.startswith(settled), (text[:end], settled, whole)
            sent = max(sent, settled, key=len)
        if not any(word in text for word in bits[3:]) and text[:1].strip():
            assert sent == text.rstrip(), "plain text is not held back"

    check()


def test_most_formats_can_be_streamed_with_tools() -> None:
    assert len(STREAMED) >= 37 and {"hermes", "mistral", "qwen3_coder", "deepseek_v31", "kimi_k2"} <= set(STREAMED)
    for name in FORMATS.keys() - set(STREAMED):
        assert ChatCodec(TOKENIZER, name, TOOLS, chat_template=TURNS).settled("a word and more") == ""
