"""Reward functions over completions, as users of TRL write them: lists of a whole batch in, a list of numbers out.

Such a function gets `prompts` and `completions` as lists of messages, the columns of the rows by name, and what else it
names: `completion_ids`, `log_extra`, `log_metric`. None in its list means that it does not score that episode.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rally.importing import import_functions
from rally.rewards.score import FACTS, RewardError

GIVEN = ("prompts", "completions", "completion_ids", "log_extra", "log_metric")
NOT_COLUMNS = {*FACTS, "tools_kwargs", "tool_selection", "interaction_kwargs"}


def takes_completions(function: Callable[..., Any]) -> bool:
    """Whether the function is of this form, and not of Rally's (docs/rewards.md)."""
    try:
        parameters = inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False
    return "completions" in parameters and not {"solution_str", "solution_strs"} & set(parameters)


def completions_reward(places: Sequence[tuple[str, str]], weights: Sequence[float]) -> CompletionsReward:
    """The functions at (module or file, name) as one."""
    return CompletionsReward(import_functions(places, "reward"), weights)


class CompletionsReward:
    """The weighted sum of functions over completions, and the number of each under its name."""

    def __init__(
        self,
        functions: Sequence[Callable[..., Any]],
        weights: Sequence[float] | None = None,
        kwargs: Mapping[str, Any] | None = None,
    ) -> None:
        self._functions = {getattr(f, "__name__", type(f).__name__): f for f in functions}
        self._weights, self._kwargs = [1.0] * len(functions) if weights is None else list(weights), dict(kwargs or {})
        if len(self._functions) < len(functions) or len(self._weights) != len(functions):
            raise RewardError("reward functions over completions need different names and a weight each; correct them")
        if clash := sorted(set(self._kwargs) & set(GIVEN)):
            raise RewardError(f"reward_kwargs.{clash[0]} is always set from the episodes; remove it from reward_kwargs")
        parameters = [p for f in functions for p in inspect.signature(f).parameters.values()]
        taken = {p.name for p in parameters}
        if unknown := [] if any(map(_is_free, parameters)) else [name for name in self._kwargs if name not in taken]:
            raise RewardError(f"no reward function takes reward_kwargs.{unknown[0]}; remove it, or add the parameter")
        if unnamed := next((p.name for p in parameters if p.kind is p.POSITIONAL_ONLY and p.default is p.empty), None):
            raise RewardError(f"reward functions get their arguments by name; let {unnamed} be given by its name")

    def with_kwargs(self, kwargs: Mapping[str, Any]) -> CompletionsReward:
        """The same functions, which also get these arguments."""
        return CompletionsReward(list(self._functions.values()), self._weights, {**self._kwargs, **kwargs})

    @property
    def needs_ids(self) -> bool:
        return any("completion_ids" in inspect.signature(f).parameters for f in self._functions.values())

    async def __call__(self, requests: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """The score of each request of a batch, with the numbers of the single functions."""
        logged: list[dict[str, Any]] = [{} for _ in requests]
        columns = self._columns(requests)
        scores: dict[str, list[float | None]] = {}
        for name, function in self._functions.items():
            value = function(**self._arguments(name, function, columns, logged))
            numbers = list(await value if inspect.isawaitable(value) else value)
            if len(numbers) != len(requests):
                raise RewardError(
                    f"the reward function {name} returned {len(numbers)} numbers for {len(requests)} episodes; "
                    "return one for each"
                )
            for number in numbers:
                if number is not None and not hasattr(number, "__float__"):
                    kind = type(number).__name__
                    raise RewardError(f"the reward function {name} returned a list of {kind}; return numbers or None")
            scores[name] = [None if number is None else float(number) for number in numbers]
        single = [dict(zip(scores, row, strict=True)) for row in zip(*scores.values(), strict=True)]
        return [{**info, **row, "score": self._sum(row)} for info, row in zip(logged, single, strict=True)]

    def _sum(self, single: Mapping[str, float | None]) -> float | None:
        """The weighted sum over the functions that scored the episode; None, which is an error of it, if none did."""
        numbers = zip(self._weights, single.values(), strict=True)
        scored = [weight * number for weight, number in numbers if number is not None]
        return sum(scored) if scored else None

    def _columns(self, requests: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
        """One list for each argument. A column that a row does not have is None there."""
        infos = [request["extra_info"] for request in requests]
        names = dict.fromkeys(name for info in infos for name in info if name not in NOT_COLUMNS)
        columns = {name: [info.get(name) for info in infos] for name in names}
        for name in ("ground_truth", "data_source"):
            columns.setdefault(name, [request[name] for request in requests])
        exchanged = [
            [{"role": message["role"], "content": message["text"]} for message in info["messages"]] for info in infos
        ]
        sizes = [request["prompt_messages"] for request in requests]
        columns["prompts"] = [messages[:size] for messages, size in zip(exchanged, sizes, strict=True)]
        columns["completions"] = [messages[size:] for messages, size in zip(exchanged, sizes, strict=True)]
        if self.needs_ids:
            columns["completion_ids"] = [request["completion_ids"] for request in requests]
        return columns

    def _arguments(
        self, name: str, function: Callable[..., Any], columns: Mapping[str, list[Any]], logged: list[dict[str, Any]]
    ) -> dict[str, Any]:
        def log_extra(column: str, values: Sequence[Any]) -> None:
            if column in ("score", *self._functions):
                raise RewardError(f"the reward function {name} logs {column}, a name of scores; choose another one")
            for info, value in zip(logged, values, strict=True):
                info[column] = value

        def log_metric(column: str, value: float) -> None:
            log_extra(column, [value] * len(logged))

        parameters = inspect.signature(function).parameters.values()
        named = {p.name: p for p in parameters if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)}
        free = any(map(_is_free, parameters))
        every = {**columns, **self._kwargs, "log_extra": log_extra, "log_metric": log_metric}
        if missing := [p.name for p in named.values() if p.default is p.empty and p.name not in every]:
            raise RewardError(
                f"the reward function {name} needs {', '.join(missing)}, which is no column of the rows: they have "
                f"{', '.join(sorted(columns))}; add it to each row, or give it a default"
            )
        return {key: value for key, value in every.items() if free or key in named}


def _is_free(parameter: inspect.Parameter) -> bool:
    return parameter.kind is parameter.VAR_KEYWORD
