"""Every tool-call format reads the calls that it writes, whatever text stands in the arguments; no text raises, no
opened call is lost, and no text takes long."""

import time
from typing import Any

import pytest
from chat_cases import LETTERS, names
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rally.chat.formats import ALIASES, FORMATS, ToolFormat, get_format
from rally.types import ToolCall

ALL = sorted(FORMATS)
MARKS = sorted({mark for one in FORMATS.values() for mark in one.marks})
TYPES: dict[str, st.SearchStrategy[Any]] = {
    "string": st.text(LETTERS, max_size=30) | st.sampled_from(["", "3", "null", "true", "{", "</x>", "a\n\nb", " x "]),
    "integer": st.integers(-(10**12), 10**12),
    "number": st.floats(allow_nan=False, allow_infinity=False),
    "boolean": st.booleans(),
    "null": st.none(),
}
inner = st.one_of(*TYPES.values())
TYPES["array"] = st.lists(inner | st.lists(inner, max_size=2), max_size=3)
TYPES["object"] = st.dictionaries(st.text(LETTERS, max_size=8), inner | st.lists(inner, max_size=2), max_size=3)


@st.composite
def typed_calls(draw: st.DrawFn) -> tuple[list[dict[str, Any]], list[ToolCall]]:
    """Calls, and the tools whose schemas say the types of their arguments."""
    tools, calls = [], []
    for name in draw(st.lists(names, min_size=1, max_size=3, unique=True)):
        kinds = draw(st.dictionaries(names, st.sampled_from(sorted(TYPES)), max_size=3))
        properties = {key: {"type": kind} for key, kind in kinds.items()}
        tools.append({"name": name, "parameters": {"type": "object", "properties": properties}})
        arguments = {key: draw(TYPES[kind]) for key, kind in kinds.items()}
        calls.append(ToolCall(name=name, arguments=arguments))
    return tools, calls


def pairs(calls: Any) -> list[tuple[str, dict[str, Any]]]:
    return [(call.name, call.arguments) for call in calls]


def own_marks(one: ToolFormat) -> list[str]:
    """Texts that a string argument of this format cannot hold, since the format cannot quote them."""
    return [one.quote] if hasattr(one, "quote") else []


@pytest.mark.parametrize("name", ALL)
def test_what_a_format_writes_it_reads(name: str) -> None:
    one = get_format(name)

    @settings(max_examples=10, deadline=None, suppress_health_check=list(HealthCheck))
    @given(typed_calls(), st.sampled_from(["", "I will look it up.\n", "I look.\n\n"]))
    def check(case: tuple[list[dict[str, Any]], list[ToolCall]], before: str) -> None:
        tools, calls = case
        if name == "functionary_v32":
            calls = [call for call in calls if call.name != "all"]
        written = one.render(calls)
        result = one.parse(before + written, tools)
        assert [call.error for call in result.calls if call.error] == [], written
        assert pairs(result.calls) == pairs(calls), written
        assert result.content.strip() == (before.strip() if calls else (before + written).strip())
        assert one.parse(written, tools, 0).calls == tuple(
            ToolCall(name=c.name, arguments=c.arguments, id=c.id, raw=c.raw) for c in one.parse(written, tools).calls
        )

    check()


@pytest.mark.parametrize("name", ALL)
def test_marks_inside_a_text_argument_are_text(name: str) -> None:
    one = get_format(name)
    tools = [{"name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}]
    for mark in MARKS:
        if any(own in mark or mark in own for own in own_marks(one)):
            continue
        call = ToolCall(name="note", arguments={"text": f"a {mark} b"})
        result = one.parse(one.render([call]), tools)
        assert pairs(result.calls) == pairs([call]), (name, mark)


@pytest.mark.parametrize("name", [name for name in ALL if FORMATS[name].marks])
def test_an_opening_mark_without_a_call_is_a_malformed_call(name: str) -> None:
    """The mark alone, before other text, cut off inside the arguments, and twice."""
    one = get_format(name)
    tools = [{"name": "note", "parameters": {"type": "object", "properties": {"text": {"type": "string"}}}}]
    whole = one.render([ToolCall(name="note", arguments={"text": "some words"})])
    middle = whole.index("some words") + 4
    for text in (whole[:middle], f"Then {whole[:middle]}"):
        calls = one.parse(text, tools).calls
        assert len(calls) == 1 and calls[0].error, text
        assert calls[0].raw and calls[0].arguments == {}
        assert calls[0].error.startswith("Failed to decode tool call: ") and "Write it as" in calls[0].error
    good_after = one.parse(whole[:middle] + "\n" + whole, tools).calls
    assert good_after and (good_after[-1].error or good_after[-1].arguments["text"].endswith("some words"))


FRAGMENTS = [
    *MARKS,
    *("calculator", "(", ")", "{", "}", "[", "]", '"', "'", '"""', "\\", ",", ":", "=", "\n", " ", "```json", "```"),
    *('{"name": "f"', ', "arguments": ', '{"q": "x"}', "query=", "call:f{", "<arg_key>k</arg_key>", "functions.f:0"),
    *("<parameter=q>", "</parameter>", '<parameter name="q">', "[ARGS]", "[CALL_ID]", "<|message|>", "True", "1e", "é"),
    *("</tool_call>", "<tool_call|>", "<end_function_call>", "<|call|>", "<｜tool▁sep｜>", "<|tool_call_end|>", "\x00"),
]


@pytest.mark.parametrize("name", ALL)
@settings(max_examples=15, deadline=None)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=25))
def test_no_text_raises_in_any_format(name: str, pieces: list[str]) -> None:
    one, text = get_format(name), "".join(pieces)
    calls = one.parse(text, [{"name": "calculator", "parameters": {"properties": {"q": {"type": "string"}}}}]).calls
    assert all(call.raw or not call.error for call in calls)
    assert len({call.id for call in calls}) == len(calls)
    if one.marks and one.marks[0] in text and name not in ("functionary_v32", "harmony", "phi4_mini_json"):
        assert calls


@pytest.mark.parametrize("name", ALL)
def test_a_turn_of_30k_repeated_characters_is_read_at_once(name: str) -> None:
    one = get_format(name)
    call = one.render([ToolCall(name="calculator", arguments={"q": "x"})])
    cut = call[: max(1, call.index("x"))] if "x" in call else call
    for piece in (*one.marks[:1], cut, f"{cut}\\", "\n[f('\\'", "{", "\n"):
        start = time.process_time()
        one.parse(piece * (30_000 // len(piece)), [{"name": "calculator", "parameters": {}}])
        assert time.process_time() - start < 2, piece  # in proportion to the length, 0.1; to its square, many


def test_the_names_of_vllms_parsers_are_known() -> None:
    parsers = (
        "deepseek_v3 deepseek_v31 deepseek_v32 deepseek_v4 cohere_command3 cohere_command4 ernie45 glm45 glm47 ling3 "
        "granite-20b-fc granite granite4 hermes poolside_v1 hunyuan_a13b hy_v3 internlm jamba lfm2 kimi_k2 kimi_k3 "
        "llama3_json llama4_json llama4_pythonic longcat mimo minimax_m2 minimax_m3 minicpm5 mistral olmo3 dots "
        "muse_glimmer openai phi4_mini_json pythonic qwen3_coder qwen3_xml seed_oss step3 step3p5 xlam gigachat3 "
        "functiongemma gemma4 apertus"
    )
    for name in parsers.split():
        assert get_format(name).name
    assert not set(ALIASES) & set(FORMATS) and set(ALIASES.values()) <= set(FORMATS)
