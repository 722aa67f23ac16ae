"""Tool YAML in every form that users write, and one error sentence for every mistake."""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from rally.tools import ToolBox, ToolConfigError, load_function_tools, load_tools
from rally.tools.builtin.answer_check import Gsm8kTool
from rally.tools.builtin.calculator import Calculator
from rally.tools.plain_class_tool import snake_case
from rally.types import Task, ToolCall


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A user's working folder; import paths that it adds are removed again."""
    monkeypatch.chdir(tmp_path)
    path, modules = list(sys.path), set(sys.modules)
    yield tmp_path
    sys.path[:] = path
    for name in set(sys.modules) - modules:
        del sys.modules[name]


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


KB_LOOKUP = """
from typing import Any, Dict, Tuple, Union
from rally.tools import BaseTool, ToolResponse
from pydantic import BaseModel, Field

class KBArgs(BaseModel):
    query: str = Field(..., description="the words to look for")

class KBLookup(BaseTool[KBArgs]):
    name = "kb_lookup"
    description = "Asks the knowledge base"
    args_schema = KBArgs

    async def create(self, *args, **kwargs) -> tuple[str, ToolResponse]:
        return "inst-0", ToolResponse(text="ready")

    async def execute(self, args: KBArgs, **kwargs) -> Tuple[Union[str, Dict[str, Any]], float, dict]:
        return {"summary": args.query, "evidence": []}, 0.0, {}
"""

MY_TOOL = '''
class MyCalculatorTool:
    """Evaluates sums."""

    def __init__(self, **create_kwargs):
        self.precision = create_kwargs.get("precision", 2)

    def execute(self, expression: str, **execute_kwargs):
        """
        Computes.

        Args:
            expression: the sum
        """
        try:
            return {"result": round(float(expression), self.precision), "success": True}
        except ValueError as e:
            return {"result": None, "success": False, "error": str(e)}
'''


async def ask(tool: Any, row: dict[str, Any] | None = None, **arguments: Any) -> tuple[str, str | None]:
    task = Task(id="t", data_source="d", prompt=({"role": "user", "content": "hi"},), tools_kwargs=row or {})
    session = ToolBox([tool]).open(task, "e")
    (result,) = await session.run([ToolCall(name=tool.name, arguments=arguments)])
    await session.close()
    return result.status.value, result.response.text


async def test_a_class_with_a_bare_schema(project: Path) -> None:
    write(project / "A3/tools/kb_lookup.py", KB_LOOKUP)
    yaml = """
tools:
  - class_name: A3.tools.kb_lookup.KBLookup
    config:
      type: native
    tool_schema:
      name: kb_lookup
      description: "asks"
      parameters:
        type: object
        properties:
          query: { type: string }
        required: ["query"]
"""
    (tool,) = load_tools(write(project / "A3/conf/tool.kb.yaml", yaml))
    assert list(tool.tool_schema["function"]) == ["name", "description", "parameters"], "in the order templates show"
    assert tool.tool_schema["function"]["description"] == "asks"
    assert await ask(tool, query="cache") == ("ok", '{"summary": "cache", "evidence": []}')


def test_a_class_without_a_schema_in_yaml_brings_its_own(project: Path) -> None:
    write(project / "kb.py", KB_LOOKUP)
    (tool,) = load_tools({"tools": [{"class_name": "kb.KBLookup"}]})
    assert tool.parameters == {
        "type": "object",
        "properties": {"query": {"type": "string", "description": "the words to look for"}},
        "required": ["query"],
    }


async def test_a_plain_class_beside_the_yaml(project: Path) -> None:
    write(project / "elsewhere/my_tool.py", MY_TOOL)
    (tool,) = load_tools(write(project / "elsewhere/tools.yaml", "tools: [{class_name: my_tool.MyCalculatorTool}]"))
    assert (tool.name, tool.parameters["required"]) == ("my_calculator", ["expression"])
    assert tool.parameters["properties"]["expression"] == {"type": "string", "description": "the sum"}
    assert await ask(tool, expression="1.23456") == ("ok", '{"result": 1.23, "success": true}')
    row = {"my_calculator": {"create_kwargs": {"precision": 4}}}
    assert await ask(tool, row, expression="1.23456") == ("ok", '{"result": 1.2346, "success": true}')
    assert (await ask(tool, expression="one"))[0] == "error"


async def test_config_of_a_plain_class_is_its_default(project: Path) -> None:
    write(project / "my_tool.py", MY_TOOL)
    (tool,) = load_tools({"tools": [{"class_name": "my_tool.MyCalculatorTool", "config": {"precision": 1}}]})
    assert await ask(tool, expression="1.26") == ("ok", '{"result": 1.3, "success": true}')


async def test_an_async_plain_class_with_a_life(project: Path) -> None:
    source = """
log = []
class Counter:
    name = "count"
    description = "Counts."
    def __init__(self): self.n = 0
    async def execute(self, by: int = 1) -> str:
        self.n += by
        return str(self.n)
    def calc_reward(self, scale=1): return self.n * scale
    async def release(self): log.append(self.n)
"""
    write(project / "counting.py", source)
    (tool,) = load_tools({"tools": [{"class_name": "counting.Counter"}]})
    task = Task(
        id="t",
        data_source="d",
        prompt=({"role": "user", "content": "hi"},),
        tools_kwargs={"count": {"calc_reward_kwargs": {"scale": 10}}},
    )
    session = ToolBox([tool]).open(task, "e")
    results = [(await session.run([ToolCall(name="count", arguments={"by": "2"})]))[0] for _ in range(2)]
    assert [r.response.text for r in results] == ["2", "4"]
    (wrong,) = await session.run([ToolCall(name="count", arguments={"amount": 2})])
    assert wrong.response.text == (
        "Error: bad arguments for count: 'amount' is not an argument of this tool. "
        "The arguments are: by (integer, optional)."
    )
    assert await session.close() == {"count": 40.0}
    assert sys.modules["counting"].log == [4]


def test_nested_schemas_are_kept_whole() -> None:
    parameters = {
        "type": "object",
        "properties": {"q": {"type": "array", "items": {"type": "string", "enum": ["a", "b"]}, "minItems": 1}},
        "required": ["q"],
        "$defs": {"X": {"type": "integer"}},
    }
    function = {"name": "c", "description": "d", "parameters": parameters, "strict": True}
    entry = {"class_name": "calculator", "tool_schema": {"type": "function", "function": function}}
    assert load_tools({"tools": [entry]})[0].tool_schema == {"type": "function", "function": function}


async def test_built_ins_by_name(project: Path) -> None:
    yaml = """
tools:
  - name: calculator
    description: "A calculator that can evaluate mathematical expressions"
    parameters:
      type: object
      properties:
        expression:
          type: string
          description: "The mathematical expression to evaluate"
"""
    (tool,) = load_tools(write(project / "tools.yaml", yaml))
    assert isinstance(tool, Calculator)
    assert tool.tool_schema["function"]["description"].startswith("A calculator that can")
    assert await ask(tool, expression="12*34+56") == ("ok", "464")
    assert await ask(tool) == ("error", "Error: the expression is empty")
    (short,) = load_tools({"tools": ["calculator"]})
    assert short.parameters["required"] == ["expression"]


@pytest.mark.parametrize(
    ("class_name", "kind"),
    [
        ("verl.tools.gsm8k_tool.Gsm8kTool", Gsm8kTool),
        ("verl.tools.calculator_tool.CalculatorTool", Calculator),
        ("rally.tools.builtin.calculator.Calculator", Calculator),
    ],
)
def test_known_class_names(class_name: str, kind: type) -> None:
    assert type(load_tools({"tools": [{"class_name": class_name}]})[0]) is kind


def test_a_function_by_class_name(project: Path) -> None:
    write(project / "fn.py", "def double(n: int) -> int:\n    return 2 * n\n")
    (tool,) = load_tools({"tools": [{"class_name": "fn.double"}]})
    assert tool.name == "double"


@pytest.mark.parametrize(
    ("yaml", "sentence"),
    [
        ("tools:\n  - name: a: b", "line 2: this is not valid YAML"),
        ("tool: []", "must have a list under the key `tools`"),
        ("tools: []", "must have a list under the key `tools`"),
        ("tools: [3]", "tool 1: an entry must be a mapping"),
        ("tools: [{name: browser}]", r"tool 1: 'browser' is not a built-in tool \(calculator, calc_gsm8k_reward, "),
        ("tools: [{class: x}]", "tool 1: unknown key 'class'"),
        ("tools: [{class_name: nowhere.Tool}]", "tool 1: there is no module 'nowhere', neither installed nor below"),
        ("tools: [{class_name: Tool}]", "must be written as package.module.Class"),
        ("tools: [{class_name: json.Tool}]", "module json has no 'Tool'; correct class_name"),
        ("tools: [{class_name: bare.Tool}]", "module bare has no 'Tool'; correct class_name to one of bare.Bare"),
        ("tools: [{class_name: os.path}]", "tool 1: class_name names a module; name a class, or a function"),
        ("tools: [{class_name: json.JSONDecoder}]", "tool class JSONDecoder has no method execute"),
        ("tools: [{class_name: dividing.Tool}]", "module dividing cannot be imported: ZeroDivisionError"),
        ("tools: [{class_name: foreign.Tool}]", "lists the verl names that Rally provides"),
        ("tools: [{class_name: bare.Bare}]", "tool class Bare has no schema: write tool_schema"),
        ("tools: [{class_name: bare.Fussy, tool_schema: {name: f}}]", "the constructor failed: KeyError: 'url'"),
        ("tools: [{class_name: my_tool.Strict, config: {colour: red}}]", "tool class Strict takes no 'colour'"),
        ("tools: [{class_name: calculator, name: x}]", "with class_name, write 'name' under tool_schema"),
        ("tools: [{name: calculator, tool_schema: {description: d}}]", "the tool_schema has no name"),
        ("tools: [{name: calculator, tool_schema: {function: {}}}]", "the tool_schema has no name"),
        ("tools: [{name: calculator, tool_schema: [1]}]", "tool_schema must be a mapping, not list"),
        ("tools: [{name: calculator, parameters: 3}]", "parameters of tool 'calculator' must be a JSON schema"),
        ("tools: [{name: calculator, config: 3}]", "config must be a mapping, not int"),
        ("tools: [{name: calculator, config: {type: remote}}]", "config.type must be native, not 'remote'"),
        ("tools: [calculator, calculator]", "two tools are called 'calculator'"),
        ("tools: [{class_name: a.B, config: {type: mcp}}]", "an entry of type mcp takes no class_name"),
        (
            "tools: [{class_name: verl.tools.search_tool.SearchTool}]",
            "needs one of retrieval_service_url .* index_path",
        ),
        (
            "tools: [{name: search, config: {url: x}}]",
            "config of the search tool: 'url': Extra inputs are not permitted",
        ),
        (
            "tools: [{name: search, config: {index_path: none}}]",
            "there is no index at none; build one with: rally data",
        ),
        ("tools: [{name: code_interpreter, config: {colour: red}}]", "code_interpreter: config has no key 'colour'"),
        ("tools: [{name: code_interpreter, config: {num_workers: 0}}]", "config key 'num_workers'"),
    ],
)
def test_every_mistake_has_its_sentence(project: Path, yaml: str, sentence: str) -> None:
    write(project / "dividing.py", "1 / 0")
    write(project / "foreign.py", "from verl.tools.base_tool import Hammer")
    bare = (
        "class Bare(BaseTool): ...\nclass Fussy(BaseTool):\n    def __init__(self, config, tool_schema): config['url']"
    )
    write(project / "bare.py", f"from rally.tools import BaseTool\n{bare}")
    strict = "class Strict:\n    def __init__(self): ...\n    def execute(self, a: int): ..."
    write(project / "my_tool.py", strict)
    with pytest.raises(ToolConfigError, match=sentence) as caught:
        load_tools(write(project / "tools.yaml", yaml))
    assert "\n" not in str(caught.value)
    assert "tools.yaml" in str(caught.value)


def test_a_missing_file() -> None:
    with pytest.raises(ToolConfigError, match=r"the tool config nowhere.yaml does not exist"):
        load_tools("nowhere.yaml")
    with pytest.raises(ToolConfigError, match=r"the tool file nowhere.py does not exist"):
        load_function_tools("nowhere.py")


async def test_function_tools_of_a_file(project: Path) -> None:
    write(project / "f/helper.py", "FACTOR = 3")
    source = """
from __future__ import annotations
from dataclasses import dataclass
from helper import FACTOR
from rally.tools import function_tool

@dataclass
class Size:
    n: int

@function_tool
def triple(size: Size) -> int:
    "Triples."
    return size.n * FACTOR

@function_tool(name="shout")
async def loud(text: str) -> str:
    return text.upper()

same = triple
def not_a_tool(): ...
"""
    tools = load_function_tools(write(project / "f/tools.py", source))
    assert [tool.name for tool in tools] == ["triple", "shout"]
    assert await ask(tools[0], size={"n": "4"}) == ("ok", "12")
    assert await ask(tools[1], text="hi") == ("ok", "HI")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("x = 1", "defines no tool; put @function_tool above a function"),
        ("import nowhere_at_all", "cannot be imported: ModuleNotFoundError"),
        ("def f(:", "cannot be imported: SyntaxError"),
        (
            "from rally.tools import function_tool as t\n@t(name='a')\ndef f(): ...\n@t(name='a')\ndef g(): ...",
            "two tools are called 'a'",
        ),
    ],
)
def test_mistakes_in_a_function_file(project: Path, source: str, sentence: str) -> None:
    with pytest.raises(ToolConfigError, match=sentence):
        load_function_tools(write(project / "tools.py", source))


@pytest.mark.parametrize(
    ("class_name", "name"),
    [("MyCalculatorTool", "my_calculator"), ("KBLookup", "kb_lookup"), ("Tool", "tool"), ("Geo3kTool", "geo3k")],
)
def test_names_from_classes(class_name: str, name: str) -> None:
    assert snake_case(class_name) == name
