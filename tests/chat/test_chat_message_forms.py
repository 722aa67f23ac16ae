"""Templates that refuse or leave out what others take: nothing of a conversation is lost, and turns end rightly."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rally.chat import ChatCodec
from rally.chat.format_choice import TOOL
from rally.chat.formats import get_format
from rally.chat.template_renderer import TemplateRenderer
from rally.chat.tiny_tokenizer import template_tokenizer
from rally.types import Message

QUESTION: Message = {"role": "user", "content": "a question"}
CALL = {"id": "call_0", "type": "function", "function": {"name": "rally_probe_7", "arguments": {"query": "x"}}}
ASKS: Message = {"role": "assistant", "content": "", "tool_calls": [CALL]}
ANSWER: Message = {"role": "tool", "name": "rally_probe_7", "tool_call_id": "call_0", "content": "forty-two"}
HEAD = "{% for t in tools or [] %}{{ t | tojson }}{% endfor %}{% for m in messages %}"
TAIL = "{% endfor %}{% if add_generation_prompt %}<|role|>assistant\n{% endif %}"
WRITTEN = '<tool_call>{"name": "{{ c.function.name }}", "arguments": {{ c.function.arguments | tojson }}}</tool_call>'
CALLS = "{% for c in m.tool_calls or [] %}" + WRITTEN + "{% endfor %}"
PLAIN = "<|role|>{{ m.role }}\n{{ m.content }}<|end|>"


def codec_of(body: str, *, eos: str = "<|end|>", head: str = HEAD, tail: str = TAIL, stops: tuple[str, ...] = ()):
    tokenizer = template_tokenizer(head + body + tail, eos, stops=("<|role|>", *stops))
    return ChatCodec(tokenizer, tools=[TOOL])


def rendered(codec: ChatCodec, *messages: Message) -> str:
    return codec.decode(codec.render(messages, generation_prompt=True))


def roundtrip(codec: ChatCodec, message: Message):
    """The reply as the policy would write it, parsed."""
    return codec.parse(codec.encode_assistant(message))


def test_a_template_may_change_its_own_lists_and_counts_the_calls_of_a_conversation():
    body = (
        "<|role|>{{ m.role }}\n{% for c in m.tool_calls or [] %}{% set _ = ids.all.append(ids.all | length) %}"
        "<|tool_call_begin|>functions.{{ c.function.name }}:{{ ids.all[-1] }}<|tool_call_argument_begin|>"
        "{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
        "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}<|end|>"
    )
    codec = codec_of(body, head="{% set ids = namespace(all=[]) %}<|tool_calls_section_begin|>" + HEAD)
    assert codec.format.name == "kimi_k2" and not codec.format_problem()
    text = rendered(codec, QUESTION, ASKS, ANSWER, ASKS, ANSWER)
    assert re.findall(r"rally_probe_7:(\d)", text) == ["0", "0", "1", "1"]
    assert rendered(codec, QUESTION, ASKS, ANSWER, ASKS, ANSWER) == text, "no list of one rendering is left to the next"


def test_the_clock_of_a_template_stands_still():
    body = "{% if loop.first %}{{ strftime_now('%H:%M:%S.%f') }}{% endif %}" + PLAIN
    codec = codec_of(body)
    assert len({rendered(codec, QUESTION) for _ in range(3)}) == 1
    assert codec.with_tools([]).encode_prompt([QUESTION])[-5:] == codec.encode_prompt([QUESTION])[-5:]


@pytest.mark.parametrize("file", sorted(Path(__file__).with_name("templates").glob("*.jinja")), ids=lambda f: f.stem)
def test_our_sandbox_renders_as_transformers_does(file: Path):
    source = file.read_text(encoding="utf-8")
    renderer = TemplateRenderer(template_tokenizer(source, "</s>"), None, [TOOL], {"date_string": "today"})
    call = {**CALL, "id": "abcdefgh1", "function": {**CALL["function"], "arguments": {"query": "é <b>", "n": 1.5}}}
    thinking: Message = {"role": "assistant", "content": "text", "reasoning_content": "a thought"}
    messages = [QUESTION, {**ASKS, "tool_calls": [call]}, {**ANSWER, "tool_call_id": "abcdefgh1"}, thinking, QUESTION]
    for some in (messages[:1], messages[3:], messages):
        texts = []
        for own in (False, True):
            renderer._own_sandbox = own
            try:
                texts.append(renderer.text(some, True))
            except Exception as error:  # noqa: BLE001 - the template's own refusal, which must be the same
                texts.append(str(error))
        assert texts[0] == texts[1]


@pytest.mark.parametrize(
    ("head", "shown"),
    [
        ("{% for t in tools %}{{ t['name'] + ': ' + t['description'] }}{% endfor %}", "rally_probe_7: Looks"),
        ("{{ functions + datetime }}", '"name": "rally_probe_7"'),
        ("{{ tools | map(attribute='function') | tojson }}", '"name": "rally_probe_7"'),
        (
            "{% for p in tools[0].function.parameters.properties.values() %}"
            "{% if p.type == 'object' %}{{ p.additionalProperties.type ~ 'rest' }}{% endif %}{% endfor %}",
            "rest",
        ),
    ],
)
def test_tools_are_passed_in_the_form_that_the_template_takes(head: str, shown: str):
    codec = codec_of(PLAIN, head=head + "{% for m in messages %}")
    assert shown in rendered(codec, QUESTION)


def test_calls_are_kept_by_a_template_that_prints_them_only_without_content():
    body = (
        "<|role|>{{ m.role }}\n{% if m.tool_calls and m.content is none %}" + CALLS + "{% else %}{{ m.content }}"
        "{% endif %}<|end|>"
    )
    codec = codec_of(body)
    assert codec.format.name == "hermes" and not codec.format_problem()
    for message in (ASKS, {**ASKS, "content": "I look it up."}):
        assert rendered(codec, QUESTION, message, ANSWER).count("<tool_call>") == 1
        parsed = roundtrip(codec, message)
        assert [call.arguments for call in parsed.tool_calls] == [{"query": "x"}]
        assert parsed.content == message["content"]


def test_the_answer_to_a_call_that_could_not_be_read_is_shown():
    stray = "m.role == 'tool' and messages[1:2] and not messages[1].tool_calls"
    refusal = "{% if " + stray + " %}{{ raise_exception('no') }}{% endif %}"
    codec = codec_of(refusal + "<|role|>{{ m.role }}\n{{ m.content }}" + CALLS + "<|end|>")
    broken: Message = {"role": "assistant", "content": "<tool_call>{half"}
    text = rendered(codec, QUESTION, broken, ANSWER, {**ANSWER, "content": "and more"})
    assert text.endswith("<|role|>user\nforty-two\nand more<|end|><|role|>assistant\n")
    assert "<|role|>tool\nforty-two" in rendered(codec, QUESTION, ASKS, ANSWER)
    assert not codec.probe().refusal("rerender", tools=True, users=False)


def test_a_template_without_tool_messages_shows_answers_as_user_messages():
    body = "{% if m.role in ('user', 'assistant') %}" + PLAIN + "{% endif %}"
    codec = codec_of(body, head="Write <tool_call></tool_call>. " + HEAD)
    assert codec.decode(codec.encode_delta([ANSWER])) == "<|role|>user\nforty-two<|end|><|role|>assistant\n"
    text = rendered(codec, QUESTION, ASKS, ANSWER)
    assert "rally_probe_7" in text.rpartition("assistant\n<tool_call>")[2] and "user\nforty-two" in text
    assert codec.probe().append_only


def test_a_second_call_is_refused_in_words_if_the_template_prints_one():
    one = CALLS.replace("m.tool_calls or []", "(m.tool_calls or [])[:1]")
    codec = codec_of("<|role|>{{ m.role }}\n{{ m.content }}" + one + "<|end|>")
    text = get_format("hermes").render(roundtrip(codec, ASKS).tool_calls * 2)
    first, second = codec.parse(codec.tokenizer.encode(text + "<|end|>")).tool_calls
    assert first.error is None and "Only one tool call per turn" in str(second.error)
    message = codec.message(codec.parse(codec.tokenizer.encode(text + "<|end|>")))
    assert rendered(codec, QUESTION, message, ANSWER).count("rally_probe_7") >= 3, "the tool list and both calls"


def test_thinking_is_not_written_twice():
    body = (
        "<|role|>{{ m.role }}\n{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}" + CALLS + "<|end|>"
    )
    codec = codec_of(body)
    reply: Message = {"role": "assistant", "content": "<think>\na thought\n</think>\n\nanswer"}
    assert rendered(codec, QUESTION, reply).count("think>") == 2
    assert "<think>a thought</think>answer" in rendered(codec, QUESTION, reply)
    again = codec.message(roundtrip(codec, reply))
    assert rendered(codec, QUESTION, again) == rendered(codec, QUESTION, reply)


def test_a_template_that_prints_no_end_is_exact_with_rerender():
    codec = codec_of(
        "{{ m.role }}: {{ m.content }}\n", tail=TAIL.replace("<|role|>assistant\n", "assistant: "), eos="</s>"
    )
    reply = codec.encode_assistant({"role": "assistant", "content": "yes"})
    assert codec.decode(reply).endswith("</s>") and codec.stop_ids == (codec.tokenizer.eos_token_id,)
    assert codec.parse(reply).closed and not codec.probe().append_only, "the end stays in a history that is appended to"
    delta = codec.encode_delta([QUESTION], last_id=reply[-1])
    assert codec.decode(delta) == "\nuser: a question\nassistant: "
    assert codec.decode(codec.encode_delta([QUESTION], closed=False)).startswith("</s>\nuser")


def test_a_mark_within_a_turn_does_not_end_it():
    body = (
        "<|role|>{{ m.role }}\n{% if m.thinking %}thought:{{ m.thinking }}<|end|><|role|>assistant\n{% endif %}"
        "{{ m.content }}<|end|>"
    )
    codec = codec_of(body, eos="<|flush|>")
    assert [codec.decode([i]) for i in codec.stop_ids] == ["<|flush|>"]
    reply: Message = {"role": "assistant", "content": "yes", "thinking": "hm"}
    text = codec.decode(codec.encode_assistant(reply))
    assert text == "thought:hm<|end|><|role|>assistant\nyes<|flush|>" and not codec.format_problem()
    assert codec_of(body, eos="<|end|>").format_problem(), "it would end there if the model stopped at the mark"


def test_text_after_every_conversation_is_no_part_of_a_reply():
    codec = codec_of(PLAIN, tail="{% endfor %}<|role|>system\nAct.<|end|>" + TAIL.removeprefix("{% endfor %}"))
    assert codec.decode(codec.encode_assistant({"role": "assistant", "content": "yes"})) == "yes<|end|>"
    codec = codec_of(PLAIN, tail=TAIL.replace("{% endif %}", "{% else %}{{ eos_token }}{% endif %}"), eos="<|text|>")
    assert codec.decode(codec.encode_assistant({"role": "assistant", "content": "yes"})) == "yes<|end|>"


def test_thinking_that_a_template_always_drops_is_part_of_the_sampled_reply():
    body = "<|role|>{{ m.role }}\n{{ m.content.split('</think>')[-1] }}" + CALLS + "<|end|>"
    codec = codec_of(body, tail=TAIL.replace("assistant\n", "assistant\n<think>\n"))
    for calls in ([], [CALL]):
        content = "<think>\na thought\n</think>\n\nyes"
        message: Message = {"role": "assistant", "content": content, **({"tool_calls": calls} if calls else {})}
        parsed = roundtrip(codec, message)
        assert parsed.text.startswith("a thought\n</think>\n\nyes") and len(parsed.tool_calls) == len(calls)
        assert "a thought" not in rendered(codec, QUESTION, codec.message(parsed))


VALUES = st.none() | st.booleans() | st.integers(-999, 999) | st.text(max_size=12) | st.lists(st.integers(), max_size=3)


@settings(max_examples=60, deadline=None)
@given(values=st.lists(VALUES, min_size=2, max_size=4))
def test_python_calls_without_commas_are_read(values: list[object]):
    names = ["query", "topk", "exact", "tags"][: len(values)]
    arguments = dict(zip(names, values, strict=True))
    text = "[rally_probe_7(" + "".join(f"{k}={json.dumps(v, ensure_ascii=False)}" for k, v in arguments.items()) + ")]"
    [call] = get_format("pythonic").parse(text, [TOOL]).calls
    assert call.error is None and call.arguments == arguments
