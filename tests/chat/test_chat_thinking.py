"""`reasoning_effort`, `thinking` and `chat_template_kwargs` become template variables, or are refused in a sentence."""

from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from rally.chat import ChatCodec, tiny_tokenizer
from rally.chat.thinking import ThinkingError, ThinkingRequest

TURNS = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SWITCH = TURNS + "{% if add_generation_prompt and enable_thinking is defined and not enable_thinking %}no {% endif %}"
DEGREES = "{{ 'Reasoning ' + (reasoning_effort or 'medium') }}" + TURNS
BUDGET = "{% if thinking_budget is defined %}{{ thinking_budget }}{% endif %}" + TURNS
MENTIONED = "{# enable_thinking is not read #}" + TURNS
QUESTION = [{"role": "user", "content": "hi"}]


def codec_of(template: str, **variables: Any) -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), chat_template=template, template_kwargs=variables)


@pytest.mark.parametrize(
    ("template", "asked", "variables"),
    [
        (SWITCH, {"effort": "none"}, {"enable_thinking": False}),
        (SWITCH, {"effort": "medium"}, {"enable_thinking": True}),
        (SWITCH, {"thinking": {"type": "disabled"}}, {"enable_thinking": False}),
        (SWITCH, {"thinking": {"type": "adaptive"}}, {"enable_thinking": True}),
        (SWITCH, {"variables": {"enable_thinking": False}}, {"enable_thinking": False}),
        (DEGREES, {"effort": "low"}, {"reasoning_effort": "low"}),
        (BUDGET, {"thinking": {"type": "enabled", "budget_tokens": 64}}, {"thinking_budget": 64}),
        (TURNS, {"thinking": {"type": "disabled"}}, {}),
        (TURNS, {"thinking": {"type": "adaptive"}}, {}),
        (TURNS, {}, {}),
    ],
)
def test_what_a_template_can_express_becomes_its_variables(
    template: str, asked: dict[str, Any], variables: dict[str, Any]
) -> None:
    codec = codec_of(template)
    found = ThinkingRequest(**asked).template_variables(codec)
    assert found == variables
    shown = codec.with_variables(found).encode_prompt(QUESTION)
    assert shown == codec_of(template, **variables).encode_prompt(QUESTION)


@pytest.mark.parametrize(
    ("template", "asked", "words"),
    [
        (TURNS, {"effort": "low"}, "reasoning_effort: the model's chat template has no variable for it"),
        (MENTIONED, {"effort": "none"}, "has no variable for it"),
        (SWITCH, {"effort": "high"}, "can only switch thinking on or off, so it has no 'high'; use none or medium"),
        (DEGREES, {"effort": "xhigh"}, "does not know 'xhigh'; use low, medium, high"),
        (SWITCH, {"thinking": {"type": "enabled", "budget_tokens": 64}}, "budget_tokens cannot be kept"),
        (TURNS, {"thinking": {"type": "enabled"}}, "no variable that switches thinking"),
        (SWITCH, {"thinking": {"type": "on"}}, "must have type enabled, adaptive or disabled"),
        (SWITCH, {"variables": {"show_tools": True}}, "show_tools is not supported; it may set enable_thinking"),
        (SWITCH, {"variables": {"enable_thinking": "no"}}, "enable_thinking must be of type bool"),
        (SWITCH, {"variables": {"thinking_budget": 5}}, "does not read thinking_budget"),
        (SWITCH, {"effort": "none", "thinking": {"type": "adaptive"}}, "another value than the other fields"),
    ],
)
def test_what_it_cannot_express_is_refused(template: str, asked: dict[str, Any], words: str) -> None:
    with pytest.raises(ThinkingError, match=words):
        ThinkingRequest(**asked).template_variables(codec_of(template))


def test_a_value_that_the_run_has_set_already_is_no_variable_of_its_own() -> None:
    codec = codec_of(SWITCH, enable_thinking=False)
    assert ThinkingRequest(effort="none").template_variables(codec) == {}
    assert ThinkingRequest(effort="medium").template_variables(codec) == {"enable_thinking": True}


def test_tools_and_variables_are_kept_together() -> None:
    codec = codec_of(SWITCH)
    tools = [{"type": "function", "function": {"name": "f", "parameters": {}}}]
    both = codec.with_variables({"enable_thinking": False}).with_tools(tools)
    assert both is codec.with_tools(tools).with_variables({"enable_thinking": False})
    assert both.tools == tools and both.variables["enable_thinking"] is False and codec.tools == []


def test_qwen3_s_own_template(shared: Path) -> None:
    codec = ChatCodec(AutoTokenizer.from_pretrained(shared / "tokenizers" / "qwen3"))
    off = codec.with_variables(ThinkingRequest(effort="none").template_variables(codec))
    assert codec.decode(off.encode_prompt(QUESTION)).endswith("<think>\n\n</think>\n\n")
    on = codec.with_variables(ThinkingRequest(thinking={"type": "adaptive"}).template_variables(codec))
    assert on.encode_prompt(QUESTION) == codec.encode_prompt(QUESTION)
