"""ChatCodec: end-of-turn tokens, deltas, escaping, the probe, sanity modes, caches."""

from datetime import datetime
from typing import Any

import pytest
from chat_cases import CALCULATOR, TOOLS, call
from tokenizers import AddedToken

from rally.chat import ChatCodec, TemplateError, tiny_tokenizer
from rally.types import RallyError

ASK = {"role": "user", "content": "What is 12*3?"}
CALL = {"role": "assistant", "content": "", "tool_calls": [call("calculator", {"expression": "12*3"})]}
ANSWER = {"role": "tool", "content": "36"}
DONE = {"role": "assistant", "content": "#### 36"}
ALL = ["tiny", "qwen2_5", "qwen3", "llama3_2"]


def ids_of(codec: ChatCodec, text: str) -> list[int]:
    return list(codec.tokenizer.encode(text, add_special_tokens=False))


def test_end_of_turn_is_found_in_the_template(codecs: dict[str, ChatCodec]) -> None:
    assert [codecs[name].decode([codecs[name].end_of_turn]) for name in ALL] == ["<|im_end|>"] * 3 + ["<|eot_id|>"]


def test_generation_stops_on_the_end_of_turn_and_on_the_tokenizers_own_eos() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = "<|endoftext|>"
    codec = ChatCodec(tokenizer)
    assert codec.stop_ids == (codec.end_of_turn, tokenizer.eos_token_id)
    assert codec.parse([*ids_of(codec, "hi"), tokenizer.eos_token_id]).text == "hi"
    assert not codec.parse([*ids_of(codec, "hi"), tokenizer.eos_token_id]).closed


def test_delta_holds_the_newline_after_the_end_of_turn_and_the_generation_prompt(codecs: dict[str, ChatCodec]) -> None:
    delta = codecs["qwen2_5"].encode_delta([ANSWER, {"role": "tool", "content": "37"}])
    assert codecs["qwen2_5"].decode(delta) == (
        "\n<|im_start|>user\n<tool_response>\n36\n</tool_response>\n<tool_response>\n37\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )


@pytest.mark.parametrize("name", ALL)
def test_a_turn_that_was_cut_is_closed_by_its_delta(codecs: dict[str, ChatCodec], name: str) -> None:
    codec = codecs[name]
    assert codec.encode_delta([ANSWER], closed=False) == (codec.end_of_turn, *codec.encode_delta([ANSWER]))


def test_delta_refuses_what_the_assistant_said(tiny: ChatCodec) -> None:
    with pytest.raises(RallyError, match="in the history already"):
        tiny.encode_delta([DONE])


def test_deltas_of_one_shape_render_the_template_once(monkeypatch: pytest.MonkeyPatch, tiny: ChatCodec) -> None:
    tiny.encode_delta([ANSWER])
    monkeypatch.setattr(tiny.tokenizer, "apply_chat_template", None)
    assert "99" in tiny.decode(tiny.encode_delta([{"role": "tool", "content": "99"}]))


def test_prompts_are_kept_by_content(monkeypatch: pytest.MonkeyPatch, tiny: ChatCodec) -> None:
    first = tiny.encode_prompt([ASK])
    monkeypatch.setattr(tiny.tokenizer, "apply_chat_template", None)
    assert tiny.encode_prompt([dict(ASK)]) == first


def test_text_after_an_end_token_that_swallows_space_is_what_the_full_rendering_has() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.add_special_tokens([AddedToken("<|im_end|>", special=True, rstrip=True)])
    codec = ChatCodec(tokenizer)
    grown = codec.encode_conversation([ASK, CALL]).ids + codec.encode_delta([ANSWER])
    assert grown == codec.render([ASK, CALL, ANSWER], generation_prompt=True)
    assert not codec.decode(codec.encode_delta([ANSWER])).startswith("\n")


@pytest.mark.parametrize("name", ALL)
def test_tool_text_can_hold_no_control_token(codecs: dict[str, ChatCodec], name: str) -> None:
    codec = codecs[name]
    tokens = [str(t) for t in codec.tokenizer.added_tokens_decoder.values()]
    control = set(codec.tokenizer.added_tokens_decoder)
    evil = "a" + "".join(tokens) + "b" + " ".join(tokens)

    def count(ids: tuple[int, ...]) -> int:
        return sum(i in control for i in ids)

    for message in (ANSWER, {**ANSWER, "name": "x", "tool_call_id": "call_1"}):
        assert count(codec.encode_delta([{**message, "content": evil}])) == count(codec.encode_delta([message]))
    assert codec.escape(evil).count == 2 * len(tokens)
    assert codec.escape("a < b and [1] <b>") == type(codec.escape(""))("a < b and [1] <b>", 0)


def test_user_text_keeps_the_tags_it_asks_for_and_loses_control_tokens(codecs: dict[str, ChatCodec]) -> None:
    codec = codecs["qwen3"]
    asked = codec.encode_prompt([{"role": "user", "content": "think in <think> tags<|im_end|>"}])
    assert codec.tokenizer.convert_tokens_to_ids("<think>") in asked
    assert asked.count(codec.end_of_turn) == codec.encode_prompt([ASK]).count(codec.end_of_turn)


def test_text_that_is_no_unicode_is_still_encoded(codecs: dict[str, ChatCodec]) -> None:
    assert "a?b" in codecs["qwen2_5"].decode(codecs["qwen2_5"].encode_delta([{"role": "tool", "content": "a\ud800b"}]))


def test_probe_finds_the_append_only_templates(codecs: dict[str, ChatCodec]) -> None:
    reports = {name: codecs[name].probe() for name in ALL}
    assert {n: r.append_only for n, r in reports.items()} == {name: name != "qwen3" for name in ALL}
    assert all(r.tool_delta_exact for r in reports.values())
    assert reports["qwen2_5"].thinking_kept and reports["qwen2_5"].differences == ()


def test_probe_says_in_words_that_qwen3_drops_its_thinking(codecs: dict[str, ChatCodec]) -> None:
    report = codecs["qwen3"].probe()
    assert not report.thinking_kept
    assert "is not append-only, drops the thinking of earlier turns" in report.words
    assert "[''] 'answer<|im_end|>" in report.words
    assert "['<think>\\na first thought\\n</think>\\n\\n'] 'answer<|im_end|>" in report.words
    (after,) = [d for d in report.differences if d.case == "a user turn after thinking"]
    assert "first thought" in after.got_text and "first thought" not in after.expected_text


NO_TOOL_ROLE = """{% for m in messages %}{% if m.role == 'tool' %}{{ raise_exception('no tools here') }}{% endif %}\
<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


def test_a_template_that_refuses_tools_says_so() -> None:
    codec = ChatCodec(tiny_tokenizer(), chat_template=NO_TOOL_ROLE)
    report = codec.probe()
    assert not report.tool_delta_exact and "no tools here" in report.words
    assert codec.encode_delta([ASK])
    with pytest.raises(TemplateError, match="no tools here"):
        codec.encode_delta([ANSWER])


def test_what_a_template_leaves_out_is_said(codecs: dict[str, ChatCodec]) -> None:
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {}}}
    assert all(codec.with_tools([tool]).probe().hidden == "" for codec in codecs.values())
    unaware = NO_TOOL_ROLE.replace("m.role == 'tool'", "false").replace("no tools here", "")
    plain = ChatCodec(tiny_tokenizer(), tools=[tool], chat_template=unaware)
    assert "omits the list of tools" in plain.probe().words
    assert "the assistant's tool calls, so they cannot be trained" in plain.probe().words


def test_a_template_that_shows_calls_with_doubled_braces_is_told(codecs: dict[str, ChatCodec]) -> None:
    tool = {"type": "function", "function": {"name": "lookup", "parameters": {"type": "object", "properties": {}}}}
    codec = codecs["qwen2_5"].with_tools([tool])
    shown = r"{\"name\": <function-name>, \"arguments\": <args-json-object>}"
    template = codec.tokenizer.chat_template
    assert isinstance(template, str) and shown in template
    doubled = ChatCodec(codec.tokenizer, tools=[tool], chat_template=template.replace(shown, "{" + shown + "}"))
    assert codec.probe().problems == ""
    assert "doubled braces" in doubled.probe().problems and "doubled braces" in doubled.probe().words


def test_a_template_that_prints_no_calls_still_appends_tool_answers() -> None:
    codec = ChatCodec(tiny_tokenizer(), chat_template=NO_TOOL_ROLE.replace("m.role == 'tool'", "false"))
    assert "tool\n36" in codec.decode(codec.encode_delta([ANSWER]))


@pytest.mark.parametrize(
    ("template", "sentence"),
    [
        ("{% for m in messages %}<|im_start|>{{ m.role }}<|im_end|>{% endfor %}", "does not render assistant messages"),
    ],
)
def test_a_template_that_cannot_serve_is_refused_in_a_sentence(template: str, sentence: str) -> None:
    with pytest.raises(TemplateError, match=sentence):
        ChatCodec(tiny_tokenizer(), chat_template=template)


def test_no_template_and_no_messages_are_user_mistakes(tiny: ChatCodec) -> None:
    bare = tiny_tokenizer()
    bare.chat_template = None
    with pytest.raises(TemplateError, match="chat_template="):
        ChatCodec(bare)
    with pytest.raises(TemplateError, match="at least one"):
        tiny.encode_prompt([])
    with pytest.raises(RallyError, match="must end with one"):
        tiny.encode_conversation([ASK, CALL, ANSWER])


def test_sanity_modes(tiny: ChatCodec) -> None:
    messages = [ASK, CALL, ANSWER, DONE]
    grown = tiny.encode_conversation(messages).ids
    spaced = [*messages[:-1], {**DONE, "content": "####  36"}]
    other = [*messages[:-1], {**DONE, "content": "#### 37"}]
    assert tiny.sanity(grown, messages, "strict") is None
    assert tiny.sanity(grown[:-1], messages, "strict") is None  # cut before its end-of-turn token
    assert tiny.sanity(grown + tiny.encode_delta([ASK]), [*messages, ASK], "strict") is None
    assert "36" in str(tiny.sanity(grown, spaced, "strict"))
    assert tiny.sanity(grown, spaced, "ignore_strippable") is None
    assert "'36'] " in str(tiny.sanity(grown, other, "ignore_strippable"))
    assert tiny.sanity(grown, other, "disable") is None
    with pytest.raises(RallyError, match="strict, ignore_strippable, disable"):
        tiny.sanity(grown, messages, "lenient")  # type: ignore[arg-type]


def test_llama_dates_do_not_change_over_midnight(codecs: dict[str, ChatCodec], monkeypatch: pytest.MonkeyPatch) -> None:
    codec = ChatCodec(codecs["llama3_2"].tokenizer, "llama3_json")
    monkeypatch.setattr("transformers.utils.chat_template_utils.datetime", Tomorrow)
    today = datetime.now().strftime("%d %b %Y")
    for each in (codec, codec.with_tools(TOOLS)):
        assert f"Today Date: {today}" in each.decode(each.encode_prompt([ASK]))
        assert each.encode_prompt([ASK]) == each.rerender([ASK]).ids
    assert codec.encode_prompt([ASK]).count(codec.tokenizer.bos_token_id) == 1


class Tomorrow(datetime):
    @classmethod
    def now(cls, tz: Any = None) -> "Tomorrow":
        return cls(2099, 1, 1)


def test_tool_lists_are_rendered_and_codecs_kept_per_list(codecs: dict[str, ChatCodec]) -> None:
    none = codecs["qwen2_5"].with_tools([])
    one = none.with_tools([CALCULATOR["function"]])
    text = one.decode(one.encode_prompt([ASK]))
    assert "calculator" in text and "search" not in text
    assert "calculator" not in none.decode(none.encode_prompt([ASK]))
    assert none.with_tools([CALCULATOR]) is one and codecs["qwen2_5"].with_tools(TOOLS) is codecs["qwen2_5"]
    assert one.end_of_turn == none.end_of_turn


@pytest.mark.parametrize("name", ALL)
def test_messages_of_every_shape_render_alike(codecs: dict[str, ChatCodec], name: str) -> None:
    """OpenAI clients send content null and arguments as text; parquet rows carry null fields; parts are a list."""
    codec = codecs[name]
    strange = {
        "role": "assistant",
        "content": None,
        "name": None,
        "tool_calls": [call("calculator", '{"expression": "12*3"}')],
    }
    parts = {"role": "user", "content": [{"type": "text", "text": ASK["content"]}], "tool_calls": None}
    empty = {**DONE, "tool_calls": []}
    assert codec.render([parts, strange, ANSWER, empty], False) == codec.render([ASK, CALL, ANSWER, DONE], False)


def test_a_call_inside_the_thinking_is_only_a_thought(codecs: dict[str, ChatCodec]) -> None:
    codec = codecs["qwen3"]
    thought = '<think>\nmaybe <tool_call>{"name": "search", "arguments": {}}</tool_call>?\n</think>\n\n'
    real = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "</think>"}}\n</tool_call>'
    parsed = codec.parse(ids_of(codec, thought + real))
    assert [c.name for c in parsed.tool_calls] == ["calculator"]
    assert parsed.content == thought.strip()
    assert [c.name for c in codec.parse(ids_of(codec, real)).tool_calls] == ["calculator"]
    assert [c.name for c in codec.parse(ids_of(codec, "<think>\nhm " + real.replace("</think>", ""))).tool_calls] == [
        "calculator"
    ]


def test_a_broken_call_stays_in_the_history_as_it_was_written(codecs: dict[str, ChatCodec]) -> None:
    codec = codecs["qwen2_5"]
    text = "Let me use <tool_call>calc(2+3 to solve"
    sampled = (*ids_of(codec, text), codec.end_of_turn)
    parsed = codec.parse(sampled)
    assert codec.message(parsed) == {"role": "assistant", "content": text}
    history = codec.encode_prompt([ASK]) + sampled + codec.encode_delta([ANSWER])
    assert codec.sanity(history, [ASK, codec.message(parsed), ANSWER], "strict") is None

    mixed = codec.parse(ids_of(codec, 'a <tool_call>{"name": "x"}</tool_call> b <tool_call>calc(</tool_call>'))
    message = codec.message(mixed)
    assert message["content"] == "a\nb\n<tool_call>calc(</tool_call>"
    assert [c["function"]["name"] for c in message["tool_calls"]] == ["x"]


def test_the_plain_format_is_read_through_the_codec(codecs: dict[str, ChatCodec]) -> None:
    codec = ChatCodec(codecs["qwen2_5"].tokenizer, "plain", TOOLS)
    parsed = codec.parse(ids_of(codec, "Let me calculate: calculator(123 + 456)"))
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("calculator", {"expression": "123 + 456"})]


def test_unknown_format_lists_the_known_ones(tiny: ChatCodec) -> None:
    with pytest.raises(RallyError, match=r"choose one of auto, .*hermes, .*llama3_json, .*plain, .*qwen3_coder"):
        ChatCodec(tiny.tokenizer, "nope")
