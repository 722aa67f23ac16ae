"""Tool-call formats: for each text that a model writes, the parsed calls or the error, in one table."""

import re
import time
from typing import Any

import pytest
from chat_cases import TOOLS
from hypothesis import given, settings
from hypothesis import strategies as st

from rally.chat import get_format

CALC = ("calculator", {"expression": "2+3"})
Calls = list[tuple[str, dict[str, Any]]]


def read(name: str, text: str) -> Calls:
    result = get_format(name).parse(text, TOOLS)
    assert [c.id for c in result.calls] == [f"call_{i}" for i in range(len(result.calls))]
    assert [c.error for c in result.calls if c.error] == []
    return [(c.name, c.arguments) for c in result.calls]


def tagged(body: str) -> str:
    return f"<tool_call>{body}</tool_call>"


HERMES: dict[str, tuple[str, Calls]] = {
    "as the template writes it": (
        '<tool_call>\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n</tool_call>',
        [CALC],
    ),
    "single quotes": (tagged("{'name': 'calculator', 'arguments': {'expression': '2+3'}}"), [CALC]),
    "trailing commas": (tagged('{"name": "calculator", "arguments": {"expression": "2+3",},}'), [CALC]),
    "python words": (
        tagged('{"name": "x", "arguments": {"a": True, "b": None, "c": False}}'),
        [("x", {"a": True, "b": None, "c": False})],
    ),
    "mixed words and quotes": (tagged("{'name': 'x', 'arguments': {'a': true}}"), [("x", {"a": True})]),
    "bare keys": (tagged('{name: "calculator", arguments: {expression: "2+3"}}'), [CALC]),
    "no closing tag": ('<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}', [CALC]),
    "no closing tag before the next": (
        2 * '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}}\n',
        [CALC, CALC],
    ),
    "code fence": (tagged('\n```json\n{"name": "calculator", "arguments": {"expression": "2+3"}}\n```\n'), [CALC]),
    "arguments encoded twice": (tagged('{"name": "calculator", "arguments": "{\\"expression\\": \\"2+3\\"}"}'), [CALC]),
    "arguments a bare text": (tagged('{"name": "calculator", "arguments": "2+3"}'), [CALC]),
    "a number for the only text": (
        tagged('{"name": "calculator", "arguments": "5"}'),
        [("calculator", {"expression": "5"})],
    ),
    "parameters": (tagged('{"name": "calculator", "parameters": {"expression": "2+3"}}'), [CALC]),
    "flat": (tagged('{"name": "calculator", "expression": "2+3"}'), [CALC]),
    "openai wrapper": (
        tagged('{"type": "function", "function": {"name": "calculator", "arguments": {"expression": "2+3"}}}'),
        [CALC],
    ),
    "no arguments": (tagged('{"name": "now"}'), [("now", {})]),
    "null arguments": (tagged('{"name": "now", "arguments": null}'), [("now", {})]),
    "raw newline in a string": (
        tagged('{"name": "run", "arguments": {"code": "a\nb\tc"}}'),
        [("run", {"code": "a\nb\tc"})],
    ),
    "raw newline in single quotes": (
        tagged("{'name': 'run', 'arguments': {'code': 'it\\'s\nb'}}"),
        [("run", {"code": "it's\nb"})],
    ),
    "one brace too many": (tagged('{"name": "calculator", "arguments": {"expression": "2+3"}}}'), [CALC]),
    "text around": (
        'a <tool_call>{"name": "now"}</tool_call> b <tool_call>{"name": "then"}</tool_call> c',
        [("now", {}), ("then", {})],
    ),
    "several in one tag": (tagged('{"name": "now"}\n{"name": "then"}'), [("now", {}), ("then", {})]),
    "a list in one tag": (tagged('[{"name": "now"}, {"name": "then"}]'), [("now", {}), ("then", {})]),
    "a closing tag inside a string": (
        tagged('{"name": "x", "arguments": {"a": "</tool_call>"}}'),
        [("x", {"a": "</tool_call>"})],
    ),
    "half a surrogate": (
        tagged('{"name": "x", "arguments": {"a": "\\ud83d\\ude00\\ud83d"}}'),
        [("x", {"a": "\U0001f600\ufffd"})],
    ),
    "the plain form in tags": (tagged("calculator(2+3)"), [CALC]),
    "no call": ("just { text }", []),
}


@pytest.mark.parametrize("case", HERMES)
def test_hermes_reads(case: str) -> None:
    text, calls = HERMES[case]
    assert read("hermes", text) == calls


LLAMA: dict[str, tuple[str, Calls]] = {
    "as the template writes it": ('{"name": "calculator", "parameters": {"expression": "2+3"}}', [CALC]),
    "python tag": ('<|python_tag|>{"name": "calculator", "parameters": {"expression": "2+3"}}', [CALC]),
    "semicolons": (
        '{"name": "now", "parameters": {}}; {"name": "then", "parameters": {}}',
        [("now", {}), ("then", {})],
    ),
    "newlines": ('{"name": "now", "parameters": {}}\n{"name": "then", "parameters": {}}', [("now", {}), ("then", {})]),
    "a list": ('[{"name": "now"}, {"name": "then"}]', [("now", {}), ("then", {})]),
    "arguments, single quotes": ("{'name': 'calculator', 'arguments': {'expression': '2+3'}}", [CALC]),
    "name last": ('{"parameters": {"expression": "2+3"}, "name": "calculator"}', [CALC]),
    "code fence": ('Sure:\n```json\n{"name": "calculator", "parameters": {"expression": "2+3"}}\n```', [CALC]),
    "text around": ('I call {"name": "now", "parameters": {}} here', [("now", {})]),
    "an answer in JSON": ('The result is {"sum": 5, "parts": [2, 3]}', []),
    "braces in prose": ("the set {1, 2} and \\frac{1}{2}", []),
}


@pytest.mark.parametrize("case", LLAMA)
def test_llama3_json_reads(case: str) -> None:
    text, calls = LLAMA[case]
    assert read("llama3_json", text) == calls


def test_llama3_json_leaves_the_prose_and_nothing_of_the_call() -> None:
    fenced = 'Sure:\n```json\n{"name": "now", "parameters": {}}\n```'
    assert get_format("llama3_json").parse(fenced).content == "Sure:"
    listed = '[{"name": "now"}, {"name": "then"}]'
    assert get_format("llama3_json").parse(listed).content == ""


CODER: dict[str, tuple[str, Calls]] = {
    "as the template writes it": (
        tagged("\n<function=calculator>\n<parameter=expression>\n2+3\n</parameter>\n</function>\n"),
        [CALC],
    ),
    "types by schema": (
        tagged(
            "<function=search><parameter=query>5</parameter><parameter=topk>3</parameter>"
            "<parameter=exact>True</parameter><parameter=tags>['a', 1]</parameter><parameter=note>null</parameter>"
            "</function>"
        ),
        [("search", {"query": "5", "topk": 3, "exact": True, "tags": ["a", 1], "note": None})],
    ),
    "text that does not fit stays text": (
        "<function=search><parameter=query>x</parameter><parameter=topk>many</parameter></function>",
        [("search", {"query": "x", "topk": "many"})],
    ),
    "outer tags missing": ("I call <function=calculator><parameter=expression>2+3</parameter></function>", [CALC]),
    "closing tags missing": ("<tool_call><function=calculator><parameter=expression>2+3</parameter>", [CALC]),
    "parameter not closed before the function": (
        "<tool_call><function=calculator><parameter=expression>2+3</function></tool_call>",
        [CALC],
    ),
    "lines inside a value": (
        tagged("<function=run><parameter=code>\nif a < b:\n  f()\n</parameter></function>"),
        [("run", {"code": "if a < b:\n  f()"})],
    ),
    "several": (
        2 * "<tool_call><function=calculator><parameter=expression>2+3</parameter></function></tool_call>\n",
        [CALC, CALC],
    ),
    "two functions in one tag": (
        "<tool_call><function=now></function><function=then></function></tool_call>",
        [("now", {}), ("then", {})],
    ),
    "no call": ("a < b", []),
}


@pytest.mark.parametrize("case", CODER)
def test_qwen3_coder_reads(case: str) -> None:
    text, calls = CODER[case]
    assert read("qwen3_coder", text) == calls


PLAIN: dict[str, tuple[str, Calls]] = {
    "an expression": ("Let me calculate: calculator(123 + 456)", [("calculator", {"expression": "123 + 456"})]),
    "brackets inside": ("calculator((1 + 2) * 3).", [("calculator", {"expression": "(1 + 2) * 3"})]),
    "a comma inside the only parameter": ("calculator(1,234 + 5)", [("calculator", {"expression": "1,234 + 5"})]),
    "quoted": ("calculator('2+3')", [CALC]),
    "by name": ('calculator(expression="2+3")', [CALC]),
    "by name, unquoted": ("calculator(expression=2+3)", [CALC]),
    "several parameters": (
        'search(query="a, (b", topk=3, exact=True)',
        [("search", {"query": "a, (b", "topk": 3, "exact": True})],
    ),
    "by place": ('search("cats", 3)', [("search", {"query": "cats", "topk": 3})]),
    "one bare text": ("search(who's there)", [("search", {"query": "who's there"})]),
    "twice": ("calculator(2+3) and calculator(2+3)", [CALC, CALC]),
    "quotes over lines": ('search(query="a\nb")', [("search", {"query": "a\nb"})]),
    "another function": ("print(2+3) and my_calculator(2)", []),
    "a mention": ("I use the calculator (a tool).", []),
}


@pytest.mark.parametrize("case", PLAIN)
def test_plain_reads(case: str) -> None:
    text, calls = PLAIN[case]
    assert read("plain", text) == calls


OTHERS: list[tuple[str, str, Calls]] = [
    ("pythonic", "[calculator(expression='2+3')]", [CALC]),
    ("pythonic", '<|python_start|>[calculator(expression="2+3"), now()]<|python_end|>', [CALC, ("now", {})]),
    ("llama4_pythonic", "Sure: [calculator('2+3')] as asked", [CALC]),
    ("pythonic", "<|python_tag|>[now()]", [("now", {})]),
    (
        "pythonic",
        "[search(query='it''s', exact=true, note=null, tags=[1, 'a'])]",
        [("search", {"query": "its", "exact": True, "note": None, "tags": [1, "a"]})],
    ),
    ("pythonic", "[search(query='a\nb', from='x')]", [("search", {"query": "a\nb", "from": "x"})]),
    ("pythonic", "see [foo(x)] there, or x[calculator(1)]", []),
    ("lfm2", "<|tool_call_start|>[calculator(expression='2+3')]", [CALC]),
    ("lfm2", '<|tool_call_start|>[{"name": "now", "arguments": {}}]<|tool_call_end|>', [("now", {})]),
    ("olmo3", '<function_calls>\ncalculator(expression="2+3")\nnow()\n</function_calls>', [CALC, ("now", {})]),
    ("mistral", '[TOOL_CALLS] [{"name": "calculator", "arguments": {"expression": "2+3"}}]', [CALC]),
    ("mistral", 2 * '[TOOL_CALLS][{"name": "now", "arguments": {}}]', [("now", {}), ("now", {})]),
    ("mistral", '[TOOL_CALLS]calculator[CALL_ID]a1b2c3d4e[ARGS]{"expression": "2+3"}', [CALC]),
    ("mistral", '[TOOL_CALLS]calculator[ARGS]{"expression": "2+3"}[TOOL_CALLS]now{}', [CALC, ("now", {})]),
    ("kimi_k2", '<|tool_call_begin|>calculator:0<|tool_call_argument_begin|>{"expression": "2+3"}', [CALC]),
    ("deepseek_v3", '<｜tool▁call▁begin｜>function<｜tool▁sep｜>calculator\n```json\n{"expression": "2+3"}', [CALC]),
    ("deepseek_v31", '<｜tool▁call▁begin｜>calculator<｜tool▁sep｜>{"expression": "2+3",}', [CALC]),
    (
        "deepseek_v32",
        '<｜DSML｜invoke name="search">\n<｜DSML｜parameter name="topk" string="false">3</｜DSML｜parameter>\n'
        "</｜DSML｜invoke>",
        [("search", {"topk": 3})],
    ),
    ("glm47", "<tool_call>calculator\n<arg_key>expression</arg_key>\n<arg_value>2+3</arg_value>\n</tool_call>", [CALC]),
    ("glm45", "<tool_call>now</tool_call>", [("now", {})]),
    ("minimax_m2", '<invoke name="calculator"><parameter name="expression">2+3</parameter></invoke>', [CALC]),
    (
        "harmony",
        '<|channel|>commentary to=functions.calculator <|constrain|>json<|message|>{"expression": "2+3"}',
        [CALC],
    ),
    ("harmony", ' to=functions.calculator<|channel|>commentary json<|message|>{"expression": "2+3"}', [CALC]),
    ("gemma4", '<|tool_call>call:calculator{expression:<|"|>2+3<|"|>}<tool_call|>', [CALC]),
    ("gemma4", '<|tool_call>call:calculator{"expression": "2+3"}', [CALC]),
    (
        "functiongemma",
        "<start_function_call>call:calculator{expression:<escape>2+3<escape>}<end_function_call>",
        [CALC],
    ),
    (
        "cohere_command3",
        '<|START_ACTION|>[{"tool_call_id": "0", "tool_name": "calculator", "parameters": '
        '{"expression": "2+3"}}]<|END_ACTION|>',
        [CALC],
    ),
    ("command_r", 'Action: ```json\n[{"tool_name": "calculator", "parameters": {"expression": "2+3"}}]\n```', [CALC]),
    ("command_r", "```python\nprint(1)\n```", []),
    ("phi4_mini_json", 'functools[{"name": "calculator", "arguments": {"expression": "2+3"}}]', [CALC]),
    ("phi4_mini_json", "import functools\nfunctools.reduce(f, x)", []),
    ("functionary_v32", 'calculator\n{"expression": "2+3"}', [CALC]),
    ("functionary_v32", '>>>all\nI look.>>>calculator\n{"expression": "2+3"}', [CALC]),
    ("functionary_v32", ">>> print(1)\n1", []),
    ("minicpm5", '<function name="calculator"><param name="expression"><![CDATA[2+3]]></param></function>', [CALC]),
    ("apertus", '<|tools_prefix|>[{"calculator": {"expression": "2+3"}}]<|tools_suffix|>', [CALC]),
    (
        "internlm",
        '<|action_start|><|plugin|>\n{"name": "calculator", "parameters": {"expression": "2+3"}}' + "<|action_end|>",
        [CALC],
    ),
    (
        "step3",
        '<｜tool_calls_begin｜><｜tool_call_begin｜>function<｜tool_sep｜><steptml:invoke name="calculator">'
        '<steptml:parameter name="expression">2+3</steptml:parameter></steptml:invoke><｜tool_call_end｜>'
        "<｜tool_calls_end｜>",
        [CALC],
    ),
    (
        "seed_oss",
        "<seed:tool_call>\n<function=calculator>\n<parameter=expression>2+3</parameter>\n</function>\n"
        "</seed:tool_call>",
        [CALC],
    ),
    ("nemotron", '<TOOLCALL>[{"name": "calculator", "arguments": {"expression": "2+3"}}]</TOOLCALL>', [CALC]),
    ("granite", '<|tool_call|>[{"name": "calculator", "arguments": {"expression": "2+3"}}]', [CALC]),
]


@pytest.mark.parametrize(("name", "text", "calls"), OTHERS)
def test_other_families_are_read_as_their_models_write(name: str, text: str, calls: Calls) -> None:
    result = get_format(name).parse(text, TOOLS)
    assert [c.error for c in result.calls if c.error] == []
    assert [(c.name, c.arguments) for c in result.calls] == calls


BROKEN = [
    ("hermes", "Let me use <tool_call>calc(2+3 to solve", "<tool_call>calc(2+3 to solve", "expected a value"),
    ("hermes", tagged(""), tagged(""), "nothing between the tags"),
    ("hermes", tagged('{"name": "calculator", "arguments": {"expression": "2+'), None, "not closed"),
    ("hermes", tagged('{"name": "calculator", "arguments": {"expression": "2+3"}'), None, "expected ','"),
    ("hermes", '<tool_call>{"name": "calculator", "arguments": {"expression": "2+3"}', None, "before its brackets"),
    ("hermes", tagged('{"arguments": {"expression": "2+3"}}'), None, 'no "name"'),
    ("hermes", tagged('{"name": "calculator", "arguments": [1]}'), None, "not a list"),
    ("hermes", tagged('{"name": "search2", "arguments": "x y"}'), None, "not a string"),
    ("hermes", tagged('{"name": "x", "arguments": "{\\"a\\": "}'), None, "no JSON object"),
    ("hermes", tagged('"calculator"'), None, "not a string"),
    ("hermes", tagged("[" * 5000), None, "nested deeper"),
    ("hermes", tagged('{"name": "x", "a": ' + "9" * 5000 + "}"), None, "limit"),
    ("hermes", '{"name": "x"}</tool_call>', "</tool_call>", "without <tool_call>"),
    ("llama3_json", '{"name": "calculator", "parameters": {"expression": "2+', None, "not closed"),
    ("llama3_json", "<|python_tag|>calculator.call(2+3)", "calculator.call(2+3)", "expected a value"),
    ("qwen3_coder", "<tool_call><function=calculator><parameter=expression>2+", None, "is not closed"),
    ("qwen3_coder", "<tool_call>calculator</tool_call>", None, "no <function=tool name>"),
    ("qwen3_coder", "<tool_call><function=calculator>2+3</function></tool_call>", None, "expected <parameter=name>"),
    ("qwen3_coder", "x</tool_call>", "</tool_call>", "without <tool_call>"),
    ("plain", "calculator(2+3 to solve\nit", "calculator(2+3 to solve", "not closed"),
    ("plain", "calculator()", None, "lacks expression"),
    ("plain", "search(query='a', 1, 2, 3, 4, 5)", None, "no parameter for '5'"),
]


@pytest.mark.parametrize(("name", "text", "raw", "reason"), BROKEN)
def test_what_cannot_be_understood_is_kept_with_a_reason(name: str, text: str, raw: str | None, reason: str) -> None:
    (call,) = get_format(name).parse(text, TOOLS).calls
    assert call.error is not None and reason in call.error
    assert call.error.startswith("Failed to decode tool call: ") and "Write it as" in call.error
    assert call.arguments == {} and call.raw == (text if raw is None else raw)


def test_a_broken_call_beside_good_ones_costs_only_itself() -> None:
    text = (
        tagged('{"name": "now"}') + tagged("{oops}") + tagged('{"name": "a"}{"nme": "b"}') + tagged('{"name": "then"}')
    )
    calls = get_format("hermes").parse(text).calls
    assert [(c.name, c.error is None) for c in calls] == [
        ("now", True),
        ("", False),
        ("a", True),
        ("", False),
        ("then", True),
    ]


def test_a_broken_call_keeps_the_name_it_gave() -> None:
    (call,) = get_format("hermes").parse(tagged('{"name": "search", "arguments": {"query": ')).calls
    assert call.name == "search"


def test_text_outside_the_calls_is_the_content() -> None:
    parse = get_format("hermes").parse
    now = tagged('{"name": "now"}')
    assert parse(f"a\n{now}\nb {now}").content == "a\nb"
    assert parse("  untouched \n").content == "  untouched \n"


FRAGMENTS = [
    *("<tool_call>", "</tool_call>", "<function=calculator>", "<parameter=expression>", "</parameter>", "</function>"),
    *(
        '{"name": "search"',
        ', "arguments": ',
        '{"query": "x"}',
        "}",
        "[",
        "]",
        "'",
        '"',
        "\\",
        "\\u",
        "```json",
        "\n",
        " ",
    ),
    *("calculator(", ")", ",", "query=", "<|python_tag|>", ";", "True", "-1e", "NaN", "é"),
]


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "plain", "qwen3_coder"])
@settings(max_examples=150, deadline=None)
@given(pieces=st.lists(st.sampled_from(FRAGMENTS), max_size=25))
def test_no_text_raises_and_no_opened_call_is_lost(name: str, pieces: list[str]) -> None:
    text = "".join(pieces)
    calls = get_format(name).parse(text, TOOLS).calls
    opened = {"llama3_json": r"<\|python_tag\|>", "plain": r"(?<![\w.])calculator\("}
    if re.search(opened.get(name, "<tool_call>"), text):
        assert calls
    assert all(c.raw for c in calls)


@pytest.mark.parametrize("name", ["hermes", "llama3_json", "plain", "qwen3_coder"])
@pytest.mark.parametrize(
    "piece", ['{"name":', "<tool_call>[", "calculator(\n", "\n", " ", "[", "<function=a><parameter=b>", "'<tool_call>'"]
)
def test_a_runaway_turn_is_read_in_reasonable_time(name: str, piece: str) -> None:
    start = time.process_time()
    get_format(name).parse(piece * (30_000 // len(piece)), TOOLS)
    assert time.process_time() - start < 5
