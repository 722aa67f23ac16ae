"""Generated arguments match the schema they were made from."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from rally.tools import load_tools
from rally.tools.sample_arguments import example_arguments, example_of
from rally.tools.schema import fit

LEAVES = st.sampled_from(
    [
        {"type": "string"},
        {"type": "string", "enum": ["red", "blue"]},
        {"type": "string", "minLength": 9},
        {"type": "integer", "minimum": 3},
        {"type": "number", "exclusiveMinimum": 0, "maximum": 0.5},
        {"type": "boolean"},
        {"type": ["string", "null"]},
        {"const": 7},
        {"anyOf": [{"type": "integer"}, {"type": "null"}]},
        {"type": "integer", "examples": [12]},
        {"$ref": "#/$defs/Colour"},
    ]
)


def _objects(parts: st.SearchStrategy[dict[str, Any]]) -> st.SearchStrategy[dict[str, Any]]:
    properties = st.dictionaries(st.sampled_from("abc"), parts, min_size=1)
    return properties.map(lambda p: {"type": "object", "properties": p, "required": list(p)})


SCHEMAS = st.recursive(
    LEAVES, lambda parts: _objects(parts) | parts.map(lambda p: {"type": "array", "items": p}), max_leaves=6
)


@given(_objects(SCHEMAS))
def test_made_up_arguments_fit(schema: dict[str, Any]) -> None:
    whole = schema | {"$defs": {"Colour": {"enum": ["red"]}}, "additionalProperties": False}
    arguments = example_arguments(whole)
    assert fit(whole, arguments) == arguments


def test_the_tools_own_example_is_taken_unless_the_yaml_changed_its_arguments() -> None:
    [usual] = load_tools({"tools": [{"name": "calculator"}]})
    assert example_of(usual) == ({"expression": "6*7"}, True)
    other = {"type": "object", "properties": {"sum": {"type": "string"}}, "required": ["sum"]}
    [changed] = load_tools({"tools": [{"name": "calculator", "parameters": other | {"additionalProperties": False}}]})
    assert example_of(changed) == ({"sum": "test"}, False)
