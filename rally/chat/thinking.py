"""Finds the template variables for what a client asks of a model's thinking.

Clients ask by `reasoning_effort` (OpenAI), `thinking` (Anthropic) or `chat_template_kwargs` (vLLM).

A variable is used only if the chat template reads it: its rendering of a question must depend on it. What the template
cannot express is refused in one sentence.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from rally.chat.codec import ChatCodec
from rally.types import RallyError

SWITCHES = ("enable_thinking", "thinking")
EFFORT, BUDGET = "reasoning_effort", "thinking_budget"
DEGREES = ("low", "medium", "high")
PROBES: Mapping[str, tuple[Any, Any]] = {
    **dict.fromkeys(SWITCHES, (True, False)),
    EFFORT: ("low", "high"),
    BUDGET: (512, 1024),
}
"""The variables of templates that are known, and two values of each that a template must tell apart."""


class ThinkingError(RallyError):
    """Something about thinking that the chat template cannot express. `field` is the request's."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field


@dataclass(frozen=True, kw_only=True)
class ThinkingRequest:
    """What a request says: an effort, Anthropic's `thinking`, and template variables by name."""

    effort: str | None = None
    thinking: Mapping[str, Any] | None = None
    variables: Mapping[str, Any] | None = None

    def template_variables(self, codec: ChatCodec) -> dict[str, Any]:
        """The variables that differ from those of the codec. Raises ThinkingError."""
        found: dict[str, Any] = {}
        for field, own in (
            ("chat_template_kwargs", _checked(codec, self.variables or {})),
            ("thinking", {} if self.thinking is None else _of_thinking(codec, self.thinking)),
            ("reasoning_effort", {} if self.effort is None else _of_effort(codec, self.effort)),
        ):
            if clash := [name for name, value in own.items() if found.get(name, value) != value]:
                raise ThinkingError(
                    field, f"it sets {clash[0]} to another value than the other fields; give one of them"
                )
            found |= own
        return {name: value for name, value in found.items() if codec.variables.get(name, ...) != value}


def _checked(codec: ChatCodec, variables: Mapping[str, Any]) -> dict[str, Any]:
    field = "chat_template_kwargs"
    for name, value in variables.items():
        if name not in PROBES:
            raise ThinkingError(field, f"{name} is not supported; it may set {', '.join(PROBES)}")
        if type(value) is not type(PROBES[name][0]):
            raise ThinkingError(field, f"{name} must be of type {type(PROBES[name][0]).__name__}")
        if not _reads(codec, name):
            raise ThinkingError(field, f"the model's chat template does not read {name}; leave it out")
    return dict(variables)


def _of_thinking(codec: ChatCodec, thinking: Mapping[str, Any]) -> dict[str, Any]:
    kind, budget = thinking.get("type"), thinking.get("budget_tokens")
    if kind not in ("enabled", "adaptive", "disabled") or thinking.keys() - {"type", "budget_tokens", "display"}:
        raise ThinkingError("thinking", "it must have type enabled, adaptive or disabled, and at most budget_tokens")
    switch = _switch(codec)
    if kind == "disabled":
        return {switch: False} if switch else {}  # the same as leaving it out, where there is nothing to switch
    if budget is not None:
        if type(budget) is not int or budget < 1:
            raise ThinkingError("thinking", "budget_tokens must be a positive number")
        if not _reads(codec, BUDGET):
            problem = "the model's chat template has no thinking_budget, so budget_tokens cannot be kept"
            raise ThinkingError("thinking", f"{problem}; send type adaptive without it, or leave thinking out")
        return {BUDGET: budget, **({switch: True} if switch else {})}
    if switch is None and kind == "adaptive":
        return {}  # the model decides whether to think, and this one decides by itself
    if switch is None:
        problem = "the model's chat template has no variable that switches thinking"
        raise ThinkingError("thinking", f"{problem}; leave it out")
    return {switch: True}


def _of_effort(codec: ChatCodec, effort: str) -> dict[str, Any]:
    switch = _switch(codec)
    if _reads(codec, EFFORT) and (effort in DEGREES or codec.template_mentions(effort)):
        return {EFFORT: effort}
    if switch is not None and effort in ("none", "medium"):
        return {switch: effort != "none"}
    if _reads(codec, EFFORT):
        possible = ", ".join((*DEGREES, *(("none",) if switch else ())))
        problem = f"the model's chat template does not know {effort!r}; use {possible}, or leave it out"
    elif switch is not None:
        problem = (
            f"the model's chat template can only switch thinking on or off, so it has no {effort!r}; use none or "
            "medium, or leave it out"
        )
    else:
        problem = "the model's chat template has no variable for it; leave it out"
    raise ThinkingError("reasoning_effort", problem)


def _switch(codec: ChatCodec) -> str | None:
    return next((name for name in SWITCHES if _reads(codec, name)), None)


def _reads(codec: ChatCodec, name: str) -> bool:
    return codec.reads_variable(name, *PROBES[name])
