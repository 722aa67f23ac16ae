"""The tiny tokenizer is lossless for ASCII, splits numbers into digits, and lists tools only if there are any."""

import string

from chat_cases import TOOLS
from hypothesis import given
from hypothesis import strategies as st

from rally.chat import ChatCodec, tiny_tokenizer

TOKENIZER = tiny_tokenizer()
ASCII = "".join(c for c in string.printable if c.isprintable()) + "\n\t\r"


@given(st.text(ASCII, max_size=60))
def test_ascii_survives_a_round_trip(text: str) -> None:
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text


def test_hermes_words_are_single_pieces_and_digits_are_single() -> None:
    pieces = TOKENIZER.tokenize('{"name": "calculator", "arguments": {"expression": "12*345"}}')
    assert pieces[:9] == ['{"', "name", '": "', "calculator", '", "', "arguments", '": {"', "expression", '": "']
    assert pieces[9:] == [*"12*345", '"}}']
    assert TOKENIZER.tokenize("é") == ["<unk>"]


def test_control_tokens_have_the_places_a_model_expects() -> None:
    assert TOKENIZER.pad_token_id == 0 and TOKENIZER.eos_token == "<|im_end|>"
    assert TOKENIZER.tokenize("<tool_call></tool_call><tool_response></tool_response>") == [
        "<tool_call>",
        "</tool_call>",
        "<tool_response>",
        "</tool_response>",
    ]
    assert len(TOKENIZER) < 130


def test_there_is_no_default_system_prompt_and_the_tool_list_is_shown_when_asked() -> None:
    ask = [{"role": "user", "content": "What is 2+3?"}]
    quiet, shown = (
        ChatCodec(TOKENIZER, tools=TOOLS),
        ChatCodec(TOKENIZER, tools=TOOLS, template_kwargs={"show_tools": True}),
    )
    assert quiet.decode(quiet.encode_prompt(ask)) == "<|im_start|>user\nWhat is 2+3?<|im_end|>\n<|im_start|>assistant\n"
    with_system = shown.decode(shown.encode_prompt([{"role": "system", "content": "Be brief."}, *ask]))
    assert with_system.startswith('<|im_start|>system\nBe brief.\n\nTools:\n{"type": "function"')
    assert with_system.count("Be brief.") == 1 and with_system.count("<|im_start|>system") == 1
    assert shown.probe().append_only
