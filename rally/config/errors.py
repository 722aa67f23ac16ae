"""Turns every mistake in a configuration into one sentence: the key, its value, and what it must be."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from difflib import get_close_matches
from typing import Any

from pydantic_core import ErrorDetails

from rally.types import RallyError

KINDS: dict[type, str] = {
    bool: "a true/false value",
    int: "a whole number",
    float: "a number",
    str: "text",
    list: "a list",
    tuple: "a list",
    dict: "a mapping",
    type(None): "nothing",
}
EXPECTED = {
    "int_type": "a whole number",
    "int_parsing": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "float_parsing": "a number",
    "finite_number": "a finite number",
    "bool_type": "true or false",
    "bool_parsing": "true or false",
    "string_type": "text",
    "tuple_type": "a list",
    "dict_type": "a mapping",
    "model_type": "a section with keys of its own",
    "model_attributes_type": "a section with keys of its own",
    "greater_than": "more than {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "less than {lt}",
    "less_than_equal": "at most {le}",
    "too_long": "a list of {max_length}",
    "too_short": "a list of {min_length}",
    "literal_error": "one of {expected}",
}


class ConfigError(RallyError):
    """All problems of a configuration, one sentence per line; `problems` holds them as a tuple."""

    def __init__(self, problems: str | Sequence[str]) -> None:
        self.problems = (problems,) if isinstance(problems, str) else tuple(problems)
        super().__init__("\n".join(self.problems))


def shown(value: Any) -> str:
    """The value as YAML would show it, shortened to 80 characters."""
    text = value if isinstance(value, str) and value else json.dumps(value, default=str, ensure_ascii=False)
    return text if len(text) <= 80 else text[:77] + "..."


def sentence(error: ErrorDetails, known: Iterable[str]) -> str:
    """The message for one validation error of Pydantic."""
    key, value, kind = _dotted(error["loc"]), error["input"], error["type"]
    if kind in ("extra_forbidden", "invalid_key"):
        return _unknown(_deepest(key, value), known)
    context = error.get("ctx", {})
    if kind == "only":
        return f"{key}={shown(value)} is not supported: {context['because']}; leave the key out."
    if kind == "missing":
        return f"{key} is missing from {shown(value)}; the list must be longer."
    expected = EXPECTED[kind].format(**context) if kind in EXPECTED else error["msg"]
    return f"{key} is {shown(value)} ({KINDS.get(type(value), 'a value')}); it must be {expected}."


def not_a_section(key: str, value: Any, meant: str | None) -> str:
    """The message for a value that is written where a section stands; `meant` is the key it was probably meant for."""
    question = "" if meant is None else f"; did you mean {meant}={shown(value)}?"
    what = KINDS.get(type(value), "a value")
    return f"{key} is {shown(value)} ({what}); it must be a section with keys of its own{question or '.'}"


def nearest(key: str, known: Iterable[str], limit: int = 3) -> list[str]:
    """The known keys most similar to `key`, best first. A key without its leading sections matches the full one."""
    depth = key.count(".") + 1
    named: dict[str, list[str]] = {}
    for candidate in known:
        for text in {candidate, ".".join(candidate.split(".")[-depth:])}:
            named.setdefault(text, []).append(candidate)
    close = [candidate for text in get_close_matches(key, named, n=limit) for candidate in named[text]]
    return list(dict.fromkeys(close))[:limit]


def _unknown(key: str, known: Iterable[str]) -> str:
    close = nearest(key, known)
    if not close:
        return f"unknown key {key}; no known key is similar, so leave it out."
    return f"unknown key {key}; did you mean {' or '.join(filter(None, (', '.join(close[:-1]), close[-1])))}?"


def _dotted(location: tuple[int | str, ...]) -> str:
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in location).removeprefix(".")


def _deepest(key: str, value: Any) -> str:
    """The full dotted name as written, where an unknown section holds a single key."""
    while isinstance(value, dict) and len(value) == 1:
        name, value = next(iter(value.items()))
        key = f"{key}.{name}"
    return key
