"""Valid arguments pass, near misses are converted, and other errors are explained to the model."""

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rally.tools import BadArguments
from rally.tools.schema import fit, usage


def schema(required: list[str] | None = None, **properties: Any) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": required or []}


@pytest.mark.parametrize(
    ("kind", "written", "understood"),
    [
        ("integer", "3", 3),
        ("integer", 3.0, 3),
        ("integer", "3.0", 3),
        ("number", "2.5", 2.5),
        ("number", 7, 7),
        ("string", 42, "42"),
        ("string", 1.5, "1.5"),
        ("boolean", "True", True),
        ("array", '["a", "b"]', ["a", "b"]),
        ("object", '{"a": 1}', {"a": 1}),
        (["integer", "null"], "5", 5),
        ("float", "anything", "anything"),
    ],
)
def test_plain_meaning_is_converted(kind: Any, written: Any, understood: Any) -> None:
    fitted = fit(schema(x={"type": kind}), {"x": written})["x"]
    assert fitted == understood and type(fitted) is type(understood)


@pytest.mark.parametrize(
    ("kind", "written"),
    [
        ("integer", "three"),
        ("integer", 3.5),
        ("integer", True),
        ("number", "NaN"),
        ("boolean", 1),
        ("array", "a, b"),
        ("object", "[1]"),
        ("string", ["a"]),
    ],
)
def test_what_has_no_plain_meaning_is_refused_by_name(kind: str, written: Any) -> None:
    with pytest.raises(BadArguments, match=f"'x' must be {kind}"):
        fit(schema(["x"], x={"type": kind}), {"x": written})


def test_missing_unknown_and_enum() -> None:
    with pytest.raises(BadArguments, match="'x' is required but missing"):
        fit(schema(["x"], x={"type": "string"}), {})
    with pytest.raises(BadArguments, match="'y' is not an argument"):
        fit({**schema(x={"type": "string"}), "additionalProperties": False}, {"y": 1})
    with pytest.raises(BadArguments, match=r"'x' must be one of \[\"c\", \"f\"\], not \"k\""):
        fit(schema(x={"enum": ["c", "f"]}), {"x": "k"})
    assert fit(schema(x={"type": "string"}), {"x": "a", "more": 1}) == {"x": "a", "more": 1}


def test_null_is_not_given_when_optional() -> None:
    assert fit(schema(x={"type": "integer"}), {"x": None}) == {}
    with pytest.raises(BadArguments, match="'x' must be integer"):
        fit(schema(["x"], x={"type": "integer"}), {"x": None})


def test_nested_values_are_checked_and_named_by_path() -> None:
    point = {"type": "object", "properties": {"x": {"type": "number"}}, "required": ["x"]}
    nested = {**schema(points={"type": "array", "items": {"$ref": "#/$defs/Point"}}), "$defs": {"Point": point}}
    assert fit(nested, {"points": [{"x": "1.5"}]}) == {"points": [{"x": 1.5}]}
    with pytest.raises(BadArguments, match=r"'points\[1\].x' is required but missing"):
        fit(nested, {"points": [{"x": 1}, {}]})


def test_alternatives_prefer_the_value_as_it_is() -> None:
    either = schema(x={"anyOf": [{"type": "integer"}, {"type": "string"}]})
    assert fit(either, {"x": "5"}) == {"x": "5"}
    assert fit(either, {"x": 5}) == {"x": 5}
    with pytest.raises(BadArguments, match="'x'"):
        fit(either, {"x": [1]})


def test_endless_nesting_ends() -> None:
    tree = {"type": "object", "properties": {"child": {"$ref": "#/$defs/Tree"}}}
    value: dict[str, Any] = {}
    for _ in range(200):
        value = {"child": value}
    with pytest.raises(BadArguments, match="nested too deeply"):
        fit({**tree, "$defs": {"Tree": tree}}, value)
    assert fit({**schema(x={"$ref": "#/$defs/A"}), "$defs": {"A": {"$ref": "#/$defs/A"}}}, {"x": 1}) == {"x": 1}


def test_usage_names_every_argument() -> None:
    shown = usage(schema(["a"], a={"type": "string"}, b={"type": ["integer", "null"]}, c={}))
    assert shown == "The arguments are: a (string), b (integer or null, optional), c (any, optional)."
    assert usage({}) == "It takes no arguments."


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=8,
)
KINDS = st.sampled_from(["string", "integer", "number", "boolean", "array", "object", "null", "int"])


@given(st.dictionaries(st.sampled_from(["a", "b", "c"]), JSON), KINDS, KINDS)
def test_any_arguments_fit_or_are_explained(arguments: dict[str, Any], first: str, second: str) -> None:
    described = schema(["a"], a={"type": first}, b={"anyOf": [{"type": first}, {"type": second}]})
    try:
        fitted = fit(described, arguments)
    except BadArguments as problem:
        assert str(problem)
    else:
        assert set(fitted) <= set(arguments) and "a" in fitted
