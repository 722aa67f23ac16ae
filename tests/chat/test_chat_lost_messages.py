"""A chat template that leaves a message out, or prints a part of it, is refused wherever it renders."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import httpx
import pytest
from chat_cases import TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st
from loop_cases import Reply, calculator, hold, make_runner, written
from small_models import make_model
from train_cases import Paper, run_config

from rally.chat import ChatCodec, MessageLost, TemplateError, tiny_tokenizer
from rally.engines import EmbeddedEngine, EngineSettings
from rally.gateway.transcript import ChatHistory, Transcript
from rally.runs.build.run_inputs import RunError, read_inputs
from rally.services.admission import Served
from rally.services.engine import create_app
from rally.tools import ToolBox
from rally.types import StopReason

FRAME = (
    "{%- set last = namespace(calls=[]) %}{%- for m in messages %}{%- set before = loop.previtem %}"
    "{%- if m.role == 'assistant' %}{%- set last.calls = m.tool_calls or [] %}<|im_start|>assistant\n{{ m.content }}"
    "{%- for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{%- endfor %}@END@"
    "{%- elif m.role == 'tool' %}@TOOL@"
    "{%- else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{%- endif %}{%- endfor %}"
    "{%- if add_generation_prompt %}<|im_start|>assistant\n{%- endif %}"
)
TURN_END = "<|im_end|>\n"
ANSWER = "<|im_start|>tool\n{{ m.content }}<|im_end|>\n"


def template(tool: str = ANSWER, end: str = TURN_END) -> str:
    return FRAME.replace("@TOOL@", tool).replace("@END@", end)


AFTER_A_CALL = "{%- if last.calls %}" + ANSWER + "{%- endif %}"
# The answer of a tool is a part of the turn that called it, which therefore does not end, as in Gemma 4.
INSIDE_THE_TURN = template(
    "{%- if last.calls %}<tool_response>{{ m.content }}</tool_response>{%- endif %}",
    "{%- if not m.tool_calls %}<|im_end|>\n{%- endif %}",
)
# A turn with a call ends with another token, so the first end-of-turn token is that of the answer.
OTHER_END = template(end="{{ '<|endoftext|>' if m.tool_calls else '<|im_end|>' }}\n")
ONLY_FIRST = template("{%- if before.role != 'tool' %}" + ANSWER + "{%- endif %}")
ONLY_LAST = template("{%- if not loop.nextitem or loop.nextitem.role != 'tool' %}" + ANSWER + "{%- endif %}")
CUT = template(ANSWER.replace("m.content", "m.content[:200]"))
CUT_LATE = template(ANSWER.replace("m.content", "m.content[:20000]"))
LOUD = template(ANSWER.replace("m.content", "m.content | upper"))
BY_ID = template("{%- for c in last.calls if c.id == m.tool_call_id %}" + ANSWER + "{%- endfor %}")
LOSES = {
    "never": template(""),
    "first": ONLY_FIRST,
    "last": ONLY_LAST,
    "cut": CUT,
    "cut late": CUT_LATE,
    "loud": LOUD,
}
QUOTED = template(ANSWER.replace("m.content", "m.content | tojson"))
STRIPPED = template(ANSWER.replace("m.content", "m.content | trim"))

QUESTION = {"role": "user", "content": "What is 2+2?"}


def codec_of(source: str) -> ChatCodec:
    return ChatCodec(tiny_tokenizer(), "hermes", TOOLS, chat_template=source)


def answer(text: str, number: int = 0) -> dict[str, Any]:
    return {"role": "tool", "name": "calculator", "tool_call_id": f"call_{number}", "content": text}


def calling(text: str = "") -> dict[str, Any]:
    function = {"name": "calculator", "arguments": {"expression": "1"}}
    return {"role": "assistant", "content": text, "tool_calls": [{"type": "function", "function": function}]}


LONG = " ".join(f"line {i}" for i in range(3000))
TURNS = [[answer("42")], [answer("42"), answer("42", 1)], [answer(LONG)], [answer("7", 0), answer("17", 1)]]


@pytest.mark.drill(
    "reliability",
    "The chat template prints nothing for a tool answer",
    "The rendering is an error; no episode goes on without it",
)
@pytest.mark.parametrize("name", LOSES)
def test_a_lost_tool_answer_is_an_error_in_every_rendering(name: str) -> None:
    codec = codec_of(LOSES[name])
    refused = 0
    for answers in TURNS:
        for render in (
            lambda answers=answers: codec.encode_delta(answers),
            lambda answers=answers: codec.rerender([QUESTION, calling(), *answers]),
            lambda answers=answers: codec.encode_prompt([QUESTION, {"role": "assistant", "content": "x"}, *answers]),
        ):
            try:
                ids = getattr(rendered := render(), "ids", rendered)
            except TemplateError:
                refused += 1
                continue
            text = codec.decode(ids)
            assert all(text.count(m["content"]) >= 1 for m in answers), (name, answers)
    assert refused
    report = codec.probe()
    assert "an episode cannot continue" in report.refusal("append", tools=True, users=False)
    assert "an episode cannot continue" in report.refusal("rerender", tools=True, users=False)
    assert report.refusal("append", tools=False, users=True) == ""


@pytest.mark.parametrize("source", [template(), QUOTED, STRIPPED, OTHER_END, INSIDE_THE_TURN])
def test_a_template_that_quotes_or_strips_is_not_refused(source: str) -> None:
    codec = codec_of(source)

    @settings(max_examples=60, deadline=None)
    @given(st.lists(st.text(max_size=40), min_size=1, max_size=3))
    def check(texts: list[str]) -> None:
        answers = [answer(text, number) for number, text in enumerate(texts)]
        assert codec.encode_delta(answers) and codec.rerender([QUESTION, calling(), *answers])

    check()
    report = codec.probe()
    assert report.refusal("append", tools=True, users=True) == report.refusal("rerender", tools=True, users=True) == ""


def test_an_answer_after_a_broken_call_is_shown_as_a_user_message_when_it_is_rendered_again() -> None:
    """The delta is taken after a call. The whole rendering has the broken call as plain text."""
    for source in (template(AFTER_A_CALL), BY_ID):
        assert codec_of(source).probe().refusal("append", tools=True, users=False) == ""
    report = codec_of(template(AFTER_A_CALL)).probe()
    assert report.refusal("append", tools=True, users=False) == ""
    assert report.refusal("rerender", tools=True, users=False) == ""
    codec = codec_of(template(AFTER_A_CALL))
    text = codec.decode(codec.render([QUESTION, {"role": "assistant", "content": "x"}, answer("4")], True))
    assert "<|im_start|>user\n4<|im_end|>" in text


def test_system_and_user_messages_that_vanish() -> None:
    system = {"role": "system", "content": "Be brief."}
    dropped = codec_of(template().replace("{%- else %}", "{%- elif m.role == 'user' %}"))
    with pytest.raises(MessageLost, match=r"does not print the whole text of message 1 \(system\)"):
        dropped.encode_prompt([system, QUESTION])
    assert dropped.encode_prompt([QUESTION])
    once = codec_of(template().replace("{%- else %}", "{%- elif m.role == 'user' and loop.index <= 2 %}"))
    with pytest.raises(MessageLost, match=r"\(user\)"):
        once.encode_delta([{"role": "user", "content": "and 3+3?"}])
    assert "(user)" in once.probe().refusal("append", tools=False, users=True)


def test_switches_that_a_template_acts_on_are_not_missed() -> None:
    source = template().replace(
        "<|im_start|>{{ m.role }}\n{{ m.content }}", "{{ m.content | replace('/no_think', '') }}"
    )
    assert codec_of(source).encode_prompt([{"role": "system", "content": "Be brief. /no_think"}, QUESTION])


def test_the_text_of_a_reply_beside_its_call_is_not_lost_in_training() -> None:
    silent = codec_of(template().replace("{{ m.content }}{%- for", "{{ '' if m.tool_calls else m.content }}{%- for"))
    conversation = [QUESTION, calling("I compute."), answer("4"), {"role": "assistant", "content": "4"}]
    with pytest.raises(MessageLost, match=r"beside its tool calls \('I compute.'\); remove the text, or use a"):
        silent.encode_conversation(conversation)
    assert codec_of(template()).encode_conversation(conversation)


def test_a_tool_of_the_list_that_is_not_shown_is_reported() -> None:
    first = "{%- if tools %}<|im_start|>system\n{{ tools[0] | tojson }}<|im_end|>\n{%- endif %}"
    names = "{%- for t in tools or [] %}{{ t.function.name }}\n{%- endfor %}"
    for shown in (first, names):
        assert "omits the list of tools" in codec_of(shown + template()).probe().hidden
    assert "list of tools" not in codec_of(first.replace("tools[0]", "tools") + template()).probe().hidden


@pytest.mark.parametrize("history", ["append", "rerender"])
def test_an_episode_does_not_go_on_without_its_answer(history: str) -> None:
    codec = ChatCodec(tiny_tokenizer(), "hermes", ToolBox([calculator]).schemas(), chat_template=template(""))
    call = codec.tokenizer.encode(written("calculator", {"expression": "2+2"}) + "<|im_end|>")
    held = asyncio.run(hold(make_runner(codec, [Reply(tuple(call))], [calculator], history=history)))
    assert held.episode.stop_reason is StopReason.ERROR and "does not print the whole text" in str(held.episode.error)
    assert len(held.engine.calls) == 1


def test_the_gateway_refuses_a_conversation_with_a_lost_answer() -> None:
    codec = codec_of(template(AFTER_A_CALL))
    transcript = Transcript(codec, "append", 0.0)
    whole = ChatHistory.of([QUESTION, calling(), answer("4")], TOOLS)
    assert "<|im_start|>tool\n4" in codec.decode(transcript.draft(whole).ids)
    transcript = Transcript(codec_of(template("")), "append", 0.0)
    with pytest.raises(MessageLost):
        transcript.draft(ChatHistory.of([QUESTION, {"role": "assistant", "content": "x"}, answer("4")], TOOLS))


async def test_the_chat_endpoint_refuses_a_conversation_with_a_lost_answer() -> None:
    engine = EmbeddedEngine(make_model(), EngineSettings(max_model_len=128), num_pages=100)
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = template("")
    app = create_app(Served(engine=engine, tokenizer=tokenizer, name="tiny"), None)
    messages = [QUESTION, {"role": "assistant", "content": "x"}, answer("4")]
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://engine") as http:
        refused = await http.post("/v1/chat/completions", json={"model": "tiny", "messages": messages, "max_tokens": 1})
    await engine.close()
    assert refused.status_code == 400 and "message 3 (tool)" in refused.json()["error"]["message"]


@pytest.mark.drill(
    "reliability",
    "A run with tools starts with a template that loses tool answers",
    "It stops before weights are loaded, with the reason",
)
@pytest.mark.parametrize("name", LOSES)
def test_a_run_stops_before_it_costs_anything(name: str, home: Path, tmp_path: Path) -> None:
    config = run_config(home, tmp_path)
    model = config.model.model_copy(update={"custom_chat_template": LOSES[name]})
    rollout = config.actor_rollout_ref.model_copy(update={"model": model})
    with pytest.raises(RunError, match="an episode cannot continue: the chat template"):
        read_inputs(config.model_copy(update={"actor_rollout_ref": rollout}), Paper().console)


@pytest.mark.drill(
    "reliability",
    "The configured tool-call format does not read what the chat template shows",
    "Training, fine-tuning and serving refuse to start and name the format that fits",
)
def test_a_run_refuses_a_format_that_does_not_fit(home: Path, tmp_path: Path) -> None:
    wrong = run_config(home, tmp_path, "actor_rollout_ref.rollout.multi_turn.format=mistral")
    with pytest.raises(RunError, match=r"multi_turn\.format=mistral does not parse calls .* set it to hermes"):
        read_inputs(wrong, Paper().console)
    with pytest.raises(RunError, match="set it to hermes"):
        read_inputs(wrong, Paper().console, train=False)  # an evaluation
    assert read_inputs(run_config(home, tmp_path), Paper().console).codec.format.name == "hermes"


async def test_the_chat_endpoint_refuses_tools_whose_calls_it_could_not_read() -> None:
    engine = EmbeddedEngine(make_model(), EngineSettings(max_model_len=512), num_pages=200)
    served = Served(engine=engine, tokenizer=tiny_tokenizer(), name="tiny", tool_format="mistral", hidden_tools=True)
    asked = {"model": "tiny", "messages": [QUESTION], "max_tokens": 1}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "properties": {}}}}
    async with httpx.AsyncClient(transport=httpx.ASGITransport(create_app(served, None)), base_url="http://e") as http:
        refused = await http.post("/v1/chat/completions", json={**asked, "tools": [tool]})
        plain = await http.post("/v1/chat/completions", json=asked)
    await engine.close()
    assert refused.status_code == 400
    assert "--tool-format=mistral does not parse calls" in refused.json()["error"]["message"]
    assert "tool-format" not in plain.text, "a chat without tools needs no format"
