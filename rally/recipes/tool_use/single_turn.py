"""Single-turn tasks: a request, the tools, and the calls that are right. Calls are compared by value.

Names of functions vary in style with the seed. A call is right if it has every asked value, and no optional argument
that was not asked for unless it has the default. Texts are compared without case, spaces and punctuation at the ends.
"""

from __future__ import annotations

import random
import re
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from rally.recipes.tool_use.functions import OfferedFunction, functions
from rally.types import ToolCall

SingleKind = Literal["single", "multiple", "parallel", "parallel_multiple", "irrelevance"]


class WantedCall(NamedTuple):
    name: str
    arguments: dict[str, Any]
    defaults: dict[str, Any]
    """Of optional arguments that were not asked for."""


class SingleTask(NamedTuple):
    request: str
    tools: list[dict[str, Any]]
    calls: list[WantedCall]
    """None where no tool fits the request."""


def single_task(kind: SingleKind, seed: int, held_out: bool) -> SingleTask:
    rng = random.Random(f"tool_use/{kind}/{held_out}/{seed}")
    style = rng.choice(tuple(_STYLES))
    known = list(functions(held_out))
    chosen = rng.sample(known, min(len(known), 4))
    others = [one for one in known if one.domain != chosen[0].domain]
    if kind == "irrelevance":
        request, _ = _request(chosen[0], style, rng)
        return SingleTask(request, _tools(rng.sample(others, rng.randint(1, min(3, len(others)))), style), [])
    asked = {"parallel": [chosen[0]] * rng.randint(2, 3), "parallel_multiple": chosen[:2]}.get(kind, chosen[:1])
    offered = chosen[:1] if kind in ("single", "parallel") else rng.sample(chosen, len(chosen))
    drawn = [_request(function, style, rng) for function in asked]
    return SingleTask(" ".join(text for text, _ in drawn), _tools(offered, style), [call for _, call in drawn])


def _request(function: OfferedFunction, style: str, rng: random.Random) -> tuple[str, WantedCall]:
    arguments = {param.name: param.drawn(rng) for param in function.params if param.required}
    text = rng.choice(function.requests).format(**{name: _shown(value) for name, value in arguments.items()})
    defaults: dict[str, Any] = {}
    for param in function.params:
        if param.required:
            continue
        if rng.random() < 0.5:
            arguments[param.name] = param.drawn(rng)
            text += f" {param.asked.format(value=_shown(arguments[param.name]))}"
        else:
            defaults[param.name] = param.default
    return text, WantedCall(_STYLES[style](function), arguments, defaults)


def _shown(value: Any) -> str:
    return ", ".join(value[:-1]) + f" and {value[-1]}" if isinstance(value, list) else str(value)


_STYLES = {
    "snake": lambda function: function.name,
    "domain": lambda function: f"{function.domain}_{function.name}",
    "camel": lambda function: re.sub(r"_(\w)", lambda m: m[1].upper(), function.name),
}


def _tools(some: Sequence[OfferedFunction], style: str) -> list[dict[str, Any]]:
    return [
        {
            "type": "function",
            "function": {
                "name": _STYLES[style](function),
                "description": function.about,
                "parameters": {
                    "type": "object",
                    "properties": {param.name: param.schema() for param in function.params},
                    "required": [param.name for param in function.params if param.required],
                },
            },
        }
        for function in some
    ]


def right_calls(calls: Sequence[ToolCall], wanted: Sequence[WantedCall]) -> bool:
    """Whether the calls are the wanted ones, in any order."""
    left = list(wanted)
    for call in calls:
        found = next((one for one in left if _is_call(call, one)), None)
        if found is None:
            return False
        left.remove(found)
    return not left


def _is_call(call: ToolCall, wanted: WantedCall) -> bool:
    accepted = {**wanted.defaults, **wanted.arguments}
    return (
        call.name == wanted.name
        and wanted.arguments.keys() <= call.arguments.keys() <= accepted.keys()
        and all(same_value(value, accepted[name]) for name, value in call.arguments.items())
    )


def same_value(value: Any, wanted: Any) -> bool:
    if isinstance(wanted, bool) or isinstance(value, bool):
        return value is wanted
    if isinstance(wanted, str) and isinstance(value, str):
        return value.strip(" .!?\"'").casefold() == wanted.strip(" .!?\"'").casefold()
    if isinstance(wanted, list) and isinstance(value, list):
        return len(value) == len(wanted) and all(map(same_value, value, wanted))
    if isinstance(wanted, Mapping) or not isinstance(value, type(wanted) if isinstance(wanted, str) else int | float):
        return False
    return bool(value == wanted)
