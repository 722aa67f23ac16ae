"""Chat templates of many families, written for these tests: the format is found, turns end with the right token, and
histories grow as the template renders them. Each template is in tests/chat/templates."""

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
from chat_cases import TOOLS, call

from rally.chat import FORMATS, ChatCodec, MessageLost, register_format, tiny_tokenizer
from rally.chat.formats import FoundCall, Schemas, ToolFormat, load_formats
from rally.chat.tiny_tokenizer import template_tokenizer
from rally.types import RallyError, ToolCall

FOLDER = Path(__file__).parent / "templates"
ROOT = FOLDER.parents[2]
MODELS = ROOT / "docs" / "models.md"
# The format, then the end of a turn of text and of a turn with calls.
FAMILIES = {
    "apertus": ("apertus", "<|assistant_end|>", "<|tools_suffix|>"),
    "calls_in_content": ("granite", "<|end_of_text|>", "<|end_of_text|>"),
    "deepseek_v31": ("deepseek_v31", "<｜end▁of▁sentence｜>", "<｜end▁of▁sentence｜>"),
    "gemma": ("gemma4", "<turn|>", "<|tool_response>"),
    "glm": ("glm45", "<|user|>", "<|observation|>"),
    "harmony": ("harmony", "<|return|>", "<|call|>"),
    "json_text_arguments": ("functionary_v31", "<|im_end|>", "<|im_end|>"),
    "kimi": ("kimi_k2", "<|im_end|>", "<|im_end|>"),
    "llama4_pythonic": ("pythonic", "<|eot|>", "<|eot|>"),
    "mistral_v11": ("mistral_v11", "</s>", "</s>"),
    "mistral_v7": ("mistral", "</s>", "</s>"),
    "thinking_prefilled": ("qwen3_coder", "<|im_end|>", "<|im_end|>"),
}
APPEND_ONLY = sorted(set(FAMILIES) - {"harmony", "mistral_v7"})


def benchmark() -> Any:
    spec = importlib.util.spec_from_file_location("chat_templates", ROOT / "benchmarks" / "chat_templates.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def codec_of(family: str, tool_format: str = "auto", stops: bool = True) -> ChatCodec:
    source = (FOLDER / f"{family}.jinja").read_text(encoding="utf-8")
    ends = {"glm": ["<|endoftext|>"], "gemma": ["<turn|>"], "apertus": ["<|assistant_end|>"]}
    eos = ends.get(family, [FAMILIES[family][1]])[0]
    tokenizer = template_tokenizer(source, eos, stops=FAMILIES[family][1:])
    more = [tokenizer.convert_tokens_to_ids(end) for end in FAMILIES[family][1:]] if stops else []
    return ChatCodec(tokenizer, tool_format, TOOLS, stop_ids=more)


@pytest.mark.parametrize("stops", [True, False], ids=["generation config", "template alone"])
@pytest.mark.parametrize("family", FAMILIES)
def test_the_format_and_the_ends_of_turns_are_found(family: str, stops: bool) -> None:
    codec = codec_of(family, stops=stops)
    name, content, calls = FAMILIES[family]
    assert codec.format.name == name and codec.format_problem() == ""
    assert codec.decode([codec.end_of_turn]) == content
    ends = codec._turns.ends
    assert (ends["content"].text, ends["call"].text) == (content, calls)
    assert {ends["content"].id, ends["call"].id, codec.tokenizer.eos_token_id} == set(codec.stop_ids)
    report = codec.probe()
    assert report.append_only == (family in APPEND_ONLY), report.words
    assert report.tool_delta_exact and report.calls_shown, report.words


def conversation(family: str) -> list[dict[str, Any]]:
    """Two rounds of tools, several calls at once where the template shows them, and another question."""
    thought = {"reasoning_content": "a thought"} if family == "thinking_prefilled" else {}
    arguments = {"query": 'it\'s "é" <b>', "topk": 3, "exact": True, "tags": ["a", 2]}
    first = [call("search", arguments), {**call("calculator", {"expression": "1+1"}), "id": "call_1"}]
    first = first[:1] if family == "harmony" else first
    answers = [{"role": "tool", "name": c["function"]["name"], "tool_call_id": c["id"], "content": "42"} for c in first]
    again = {**call("calculator", {"expression": "2+2"}), "id": "call_2"}
    return [
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "", **thought, "tool_calls": first},
        *answers,
        {"role": "assistant", "content": "", **thought, "tool_calls": [again]},
        {"role": "tool", "name": "calculator", "tool_call_id": "call_2", "content": "4"},
        {"role": "assistant", "content": "the answer", **thought},
        {"role": "user", "content": "and then?"},
    ]


@pytest.mark.parametrize("family", APPEND_ONLY)
def test_a_history_that_grows_is_the_template_s_rendering(family: str) -> None:
    codec, messages = codec_of(family), conversation(family)
    grown = codec.encode_conversation(messages[:-1])
    onward = grown.ids + codec.encode_delta(messages[-1:], last_id=grown.ids[-1])
    assert codec.decode(onward) == codec.decode(codec.render(messages, generation_prompt=True))
    assert onward == codec.render(messages, generation_prompt=True)
    sampled = [i for i, m in zip(grown.ids, grown.mask, strict=True) if m]
    assert sum(i in codec.stop_ids for i in sampled) == 3, "each reply ends with its stop token, trained on"


@pytest.mark.parametrize("family", FAMILIES)
def test_a_sampled_turn_is_read_and_rendered_again(family: str) -> None:
    codec = codec_of(family)
    messages = conversation(family)
    for message in (m for m in messages if m["role"] == "assistant"):
        parsed = codec.parse(codec.encode_assistant(message))
        meant = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls", [])]
        assert [(c.name, c.arguments) for c in parsed.tool_calls] == meant
        assert parsed.errors == () and parsed.closed
        again = codec.message(parsed)
        assert again["content"].split("</think>")[-1].strip() == message["content"]
        shown = [codec.decode(codec.render([messages[0], m], False)) for m in (message, again)]
        assert "".join(shown[0].split()) == "".join(shown[1].split())


def test_the_stop_token_is_not_doubled_when_the_next_message_begins_with_it() -> None:
    codec = codec_of("glm")
    user, observation = codec.stop_ids[:2]
    for messages, first in (
        ([{"role": "user", "content": "next"}], user),
        ([{"role": "tool", "content": "42"}], observation),
    ):
        whole = codec.encode_delta(messages, closed=False)
        assert whole[0] == first
        assert codec.encode_delta(messages, last_id=first) == whole[1:]
        assert codec.encode_delta(messages, last_id=codec.tokenizer.eos_token_id) == whole, "another token stays"
        assert codec.encode_delta(messages, last_id=ord("a")) == whole
    # a turn that ended as if a tool followed, and the user answers
    assert codec.encode_delta([{"role": "user", "content": "next"}], last_id=observation)[0] == user


def test_gpt_oss_keeps_the_token_that_was_sampled() -> None:
    """A last answer ends with return. In a longer history the template prints end there; return stays."""
    codec = codec_of("harmony")
    following = [{"role": "user", "content": "next"}]
    after_return = codec.encode_delta(following, last_id=codec.end_of_turn)
    assert codec.decode(after_return).startswith("<|start|>user")
    assert codec.decode(codec.encode_delta(following, closed=False)).startswith("<|end|><|start|>user")
    assert codec.tokenizer.convert_tokens_to_ids("<|end|>") not in codec.stop_ids, "thinking ends with it"
    assert "<|return|>" in codec.probe().words


def test_thinking_is_a_field_where_the_template_takes_it_as_one() -> None:
    codec = codec_of("harmony")
    text = (
        "<|channel|>analysis<|message|>I look.<|end|><|start|>assistant"
        '<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{"expression": "1+1"}<|call|>'
    )
    parsed = codec.parse(codec.tokenizer.encode(text, add_special_tokens=False))
    message = codec.message(parsed)
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("calculator", {"expression": "1+1"})]
    assert (message["thinking"], message["content"]) == ("I look.", "")
    shown = codec.decode(codec.render([{"role": "user", "content": "q"}, message], False))
    assert shown.endswith("<|start|>assistant" + text)


def test_calls_inside_thinking_are_not_run_whatever_its_marks() -> None:
    marks = {"mistral_v11": ("[THINK]", "[/THINK]"), "gemma": ("<|channel>thought\n", "<channel|>")}
    for family, (opening, closing) in marks.items():
        codec = codec_of(family)
        written = codec.format.render([ToolCall(name="calculator", arguments={"expression": "1+1"}, id="call00001")])
        ids = codec.tokenizer.encode(opening + written + closing + "done", add_special_tokens=False)
        assert codec.parse(ids).tool_calls == ()
        ids = codec.tokenizer.encode(opening + "hm" + closing + written, add_special_tokens=False)
        assert [c.name for c in codec.parse(ids).tool_calls] == ["calculator"]


def test_ids_are_those_that_the_family_accepts() -> None:
    mistral, kimi = codec_of("mistral_v7"), codec_of("kimi")
    sent = conversation("mistral_v7")  # with ids such as call_0
    shown = mistral.decode(mistral.render(sent, generation_prompt=True))
    assert re.findall(r'"id": "(\w{9})"', shown) == ["call00000", "call00001", "call00002"]
    assert re.findall(r'"call_id": "(\w{9})"', shown) == ["call00000", "call00001", "call00002"]
    shown = kimi.decode(kimi.render(sent, generation_prompt=True))
    numbered = ["functions.search:0", "functions.calculator:1", "functions.calculator:2"]
    assert re.findall(r"Return of (\S+)", shown) == numbered, "counted over the conversation"
    own = '[TOOL_CALLS][{"name": "search", "arguments": {}, "id": "a1B2c3D4e"}]'
    [parsed] = mistral.parse(mistral.tokenizer.encode(own, add_special_tokens=False)).tool_calls
    assert parsed.id == "a1B2c3D4e", "the id that the model wrote"
    answer = {"role": "tool", "name": "search", "tool_call_id": parsed.id, "content": "42"}
    assert '"call_id": "a1B2c3D4e"' in mistral.decode(mistral.encode_delta([answer]))


def test_another_format_is_refused_with_the_one_that_fits() -> None:
    problem = codec_of("glm", "hermes").format_problem()
    assert problem == (
        "multi_turn.format=hermes does not parse calls as the chat template renders them; set it to glm45"
    )
    assert codec_of("glm", "glm47").format_problem() == "", "it reads them too"
    odd = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}{% for c in m.tool_calls or [] %}"
    odd += "CALL {{ c.function.name }} WITH {{ c.function.arguments | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    odd += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    codec = ChatCodec(template_tokenizer(odd, "<|im_end|>"))
    assert "no tool-call format reads calls" in codec.format_problem() and "CALL rally_probe" in codec.format_problem()


def test_a_call_that_the_template_leaves_out_is_not_trained_without() -> None:
    """Some templates print one of several calls; a row with such a reply is refused. Others print none beside text; the
    format writes them there."""
    one_call = "{% set c = m.tool_calls[0].function %}<tool_call>{{ c | tojson }}</tool_call>"
    source = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    source += f"{{% if m.tool_calls and not m.content %}}{one_call}{{% endif %}}<|im_end|>\n{{% endfor %}}"
    source += "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    codec = ChatCodec(template_tokenizer(source, "<|im_end|>"), "auto", TOOLS)
    asked = {"role": "user", "content": "q"}
    calls = [call("search", {"query": "x"}), call("search", {"query": "y"})]
    assert codec.encode_conversation([asked, {"role": "assistant", "content": "", "tool_calls": calls[:1]}])
    with pytest.raises(MessageLost, match="does not print every call of search"):
        codec.encode_conversation([asked, {"role": "assistant", "content": "", "tool_calls": calls}])
    spoken = {"role": "assistant", "content": "I look.", "tool_calls": calls[:1]}
    assert '"arguments": {"query": "x"}' in codec.decode(codec.encode_conversation([asked, spoken]).ids)


@pytest.mark.drill("reliability", "A chat template prints the end of a turn before a call", "Refused at the start")
def test_a_turn_that_would_end_before_its_call_is_refused() -> None:
    source = (FOLDER / "end_before_call.jinja").read_text(encoding="utf-8")
    codec = ChatCodec(template_tokenizer(source, "<|message_sep|>"), "auto", TOOLS)
    assert codec.format.name == "gigachat3"
    assert "prints <|message_sep|> before a call, and turns end with it" in codec.format_problem()
    codec = ChatCodec(template_tokenizer(source, "</s>"), "auto", TOOLS)  # a model that does not stop at the mark
    assert codec.format_problem() == "" and [codec.decode([i]) for i in codec.stop_ids] == ["</s>"]


def test_the_choice_for_qwen_llama_and_the_demo_is_that_of_before(codecs: dict[str, ChatCodec]) -> None:
    expected = {"tiny": "hermes", "qwen2_5": "hermes", "qwen3": "hermes", "llama3_2": "llama3_json"}
    for name, codec in codecs.items():
        assert ChatCodec(codec.tokenizer, "auto", TOOLS).format.name == expected[name]
        assert codec.format_problem() == ""


def test_ids_of_ordinary_tokens_in_a_generation_config_are_no_stops() -> None:
    """A random model's generation config has the default id 2, whatever that token is."""
    tokenizer = template_tokenizer((FOLDER / "kimi.jinja").read_text(encoding="utf-8"), "<|im_end|>")
    codec = ChatCodec(tokenizer, stop_ids=[2, 10**9])
    assert codec.stop_ids == (tokenizer.eos_token_id,)


PLAIN = """\
{%- if tools %}{{ tools | tojson }}{% endif %}
{%- for m in messages %}<|im_start|>{{ m.role }}
{{ m.content }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.mark.parametrize("name", sorted(FORMATS))
def test_every_format_by_name_writes_reads_and_stops(name: str) -> None:
    """Over a template that prints contents only, the format itself writes the calls."""
    codec = ChatCodec(template_tokenizer(PLAIN, "<|im_end|>"), name, TOOLS)
    message = {"role": "assistant", "content": "", "tool_calls": [call("search", {"query": "a, b", "topk": 3})]}
    ids = codec.encode_assistant(message)
    parsed = codec.parse(ids)
    assert [(c.name, c.arguments) for c in parsed.tool_calls] == [("search", {"query": "a, b", "topk": 3})]
    assert parsed.closed and ids[-1] in codec.stop_ids and codec.format_problem() == ""
    assert codec.probe().append_only
    assert codec.rerender([{"role": "user", "content": "q"}, codec.message(parsed)]).ids


MY_FORMAT = '''
import re
from rally.chat import ToolFormat, register_format
from rally.chat.formats import FoundCall
from rally.types import ToolCall


@register_format("shouted")
class Shouted(ToolFormat):
    """CALL name!"""

    marks = ("CALL ",)

    def find(self, text, schemas):
        found = re.finditer(r"CALL (\\w+)!", text)
        return [FoundCall(m.start(), m.end(), ToolCall(name=m[1])) for m in found]

    def render(self, calls):
        return "".join(f"CALL {call.name}!" for call in calls)
'''


def test_a_user_s_format_by_name_and_by_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_formats.py").write_text(MY_FORMAT)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("rally.chat.formats.registry.FORMATS", FORMATS)
    try:
        load_formats(str(tmp_path / "my_formats.py"))
        for name in ("shouted", "my_formats.Shouted"):
            codec = ChatCodec(tiny_tokenizer(), name, TOOLS)
            [found] = codec.parse(codec.tokenizer.encode("CALL calculator!", add_special_tokens=False)).tool_calls
            assert (found.name, found.id, found.raw) == ("calculator", "call_0", "CALL calculator!")
    finally:
        FORMATS.pop("shouted", None)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("x = 1", 'registers no tool-call format; decorate a class in it with @register_format\\("name"\\)'),
        ("import nothing_there", "cannot be imported .*nothing_there"),
        (MY_FORMAT.replace("shouted", "hermes"), "'hermes' exists already"),
        (MY_FORMAT.replace("def render", "def rendered"), "has no method render"),
    ],
)
def test_a_user_s_file_that_registers_nothing_usable_is_refused(tmp_path: Path, text: str, words: str) -> None:
    file = tmp_path / "formats.py"
    file.write_text(text)
    with pytest.raises(RallyError, match=words):
        load_formats(str(file))


def test_a_class_that_is_no_format_is_refused() -> None:
    with pytest.raises(RallyError, match="is not a subclass"):
        register_format("mine")(dict)  # type: ignore[type-var]
    with pytest.raises(RallyError, match=r"there is no class Nothing in rally\.chat"):
        ChatCodec(tiny_tokenizer(), "rally.chat.Nothing")

    class Raising(ToolFormat):
        def __init__(self) -> None:
            raise OSError("no")

        def find(self, text: str, schemas: Schemas) -> list[FoundCall]:
            return []

        def render(self, calls: Any) -> str:
            return ""

    with pytest.raises(RallyError, match="cannot be made"):
        register_format("mine")(Raising)


def test_the_document_has_these_templates_and_formats() -> None:
    """docs/models.md is what the code says about the templates of this folder and about every format."""
    module, text = benchmark(), MODELS.read_text(encoding="utf-8")
    for name, tokenizer in module.tokenizers(FOLDER):
        assert module.line_of(module.row_of(name, tokenizer)) in text, (
            "run benchmarks/chat_templates.py (docs/models.md)"
        )
    assert module.format_table() in text, "run benchmarks/chat_templates.py (docs/models.md)"
