"""A typed function becomes a tool whose schema contains everything that its types say."""

import asyncio
import threading
from dataclasses import dataclass
from typing import Any, Literal, Optional

import pytest
from pydantic import BaseModel
from typing_extensions import TypedDict

from rally.tools import BadArguments, ToolConfigError, function_tool
from rally.tools.function_tool import read_docstring
from rally.tools.sample_arguments import Example, example_of


@dataclass
class Point:
    x: float
    y: float = 0.0


class Range(TypedDict):
    low: int
    high: int


class Filter(BaseModel):
    title: str
    tags: list[str] = []


@function_tool
def plot(
    points: list[Point],
    counts: list[dict[str, int]],
    unit: Literal["m", "ft"] = "m",
    within: Optional[Range] = None,  # noqa: UP045 - the older spelling must work as well
    only: Filter | None = None,
) -> str:
    """Draws the points.

    The picture is discarded.

    Args:
        points (list): where to draw,
            one by one
        counts: how often
        unit: of length

    Returns:
        str: a report
    """
    return f"{points} {counts} {unit} {within} {only}"


def execute(tool: Any, **arguments: Any) -> Any:
    return asyncio.run(tool.execute("id", arguments))


def test_schema_keeps_nested_types_and_descriptions() -> None:
    function = plot.tool_schema["function"]
    parameters = function["parameters"]
    properties = parameters["properties"]
    assert (function["name"], function["description"]) == ("plot", "Draws the points. The picture is discarded.")
    assert parameters["required"] == ["points", "counts"]
    assert properties["points"]["items"] == {"$ref": "#/$defs/Point"}
    assert properties["points"]["description"] == "where to draw, one by one"
    assert properties["counts"]["items"]["additionalProperties"] == {"type": "integer"}
    assert properties["unit"] == {"type": "string", "enum": ["m", "ft"], "description": "of length", "default": "m"}
    assert {"$ref": "#/$defs/Range"} in properties["within"]["anyOf"]
    assert parameters["$defs"]["Point"]["required"] == ["x"]
    assert parameters["$defs"]["Filter"]["properties"]["title"] == {"type": "string"}, "a property may be called title"
    assert "title" not in parameters["$defs"]["Filter"]


def test_arguments_become_the_functions_own_types() -> None:
    text = execute(plot, points=[{"x": "1"}], counts=[{"a": "2"}], within={"low": 1, "high": 2}, only={"title": "t"})
    assert text == "[Point(x=1.0, y=0.0)] [{'a': 2}] m {'low': 1, 'high': 2} title='t' tags=[]"


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"counts": []}, "'points' is required but missing"),
        ({"points": [{}], "counts": []}, r"'points\[0\].x': Field required"),
        ({"points": [], "counts": [], "colour": "red"}, "'colour' is not an argument"),
        ({"points": [], "counts": [], "unit": "mile"}, "'unit': Input should be 'm' or 'ft'"),
    ],
)
def test_bad_arguments_never_reach_the_function(arguments: dict[str, Any], sentence: str) -> None:
    with pytest.raises(BadArguments, match=sentence):
        execute(plot, **arguments)


def test_it_stays_the_function_it_was() -> None:
    assert plot([], [], "ft") == "[] [] ft None None"


def test_plain_functions_run_in_a_thread_and_async_ones_on_the_loop() -> None:
    @function_tool
    def plain() -> str:
        return threading.current_thread().name

    @function_tool(name="other", description="Waits.")
    async def awaited(seconds: float = 0) -> str:
        await asyncio.sleep(seconds)
        return threading.current_thread().name

    assert execute(plain) == "rally-tool"
    assert execute(awaited) == threading.main_thread().name
    assert (awaited.name, awaited.tool_schema["function"]["description"]) == ("other", "Waits.")


def test_a_given_schema_is_kept_whole_and_needs_no_hints() -> None:
    schema = {"name": "add", "parameters": {"type": "object", "properties": {"a": {"type": "integer", "minimum": 1}}}}

    @function_tool(schema=schema)
    def add(a, b=2):  # type: ignore[no-untyped-def]
        return a + b

    assert add.parameters == schema["parameters"]
    assert execute(add, a=1) == 3


def test_a_row_can_give_arguments() -> None:
    @function_tool
    def greet(name: str, greeting: str = "hello") -> str:
        return f"{greeting} {name}"

    assert asyncio.run(greet.execute("id", {"name": "Ada"}, greeting="ciao")) == "ciao Ada"
    with pytest.raises(ToolConfigError, match="function tool 'greet' takes no 'colour'"):
        asyncio.run(greet.execute("id", {"name": "Ada"}, colour="red"))


def test_functions_that_cannot_be_tools_say_why() -> None:
    def no_hint(a) -> str:  # type: ignore[no-untyped-def]
        return a

    def by_place(a: int, /) -> str:
        return str(a)

    def lost(a: "Nowhere") -> str:  # type: ignore[name-defined]  # noqa: F821
        return str(a)

    for function, sentence in (
        (no_hint, "parameter 'a' has no type hint"),
        (by_place, "'a' must be a keyword parameter"),
        (lost, "type hints cannot be read"),
        (3, "needs a function, not int"),
    ):
        with pytest.raises(ToolConfigError, match=sentence):
            function_tool(function)  # type: ignore[call-overload]


def test_docstrings_of_other_styles_are_all_summary() -> None:
    assert read_docstring("Adds.\n\n:param a: one").summary == "Adds. :param a: one"
    assert read_docstring("") == read_docstring("  ")


def test_the_doctor_calls_a_function_with_its_own_example() -> None:
    @function_tool(example={"width": 2})
    def square(width: float) -> str:
        return str(width * width)

    assert example_of(square) == Example({"width": 2}, known=True)


def test_an_example_that_does_not_fit_is_an_error() -> None:
    with pytest.raises(ToolConfigError, match=r"its own example does not fit its parameters .*; correct it"):

        @function_tool(example={"height": 2})
        def square(width: float) -> str:
            return str(width * width)


def test_another_schema_keeps_the_rest_of_a_tool() -> None:
    @function_tool(process=False, example={"width": 2})
    def square(width: float) -> str:
        return str(width * width)

    described = {"name": "area", "parameters": square.parameters}
    renamed = square.with_schema(described)
    assert (renamed.name, renamed.process, renamed.example) == ("area", False, {"width": 2})
