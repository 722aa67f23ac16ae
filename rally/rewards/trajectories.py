"""A reward function over whole trajectories is registered for a data source and scores its episodes, each as it ends.

    @RewardManager.register("my_task")
    def compute_reward(data):                       # data["trajectories"]: lists of {"role", "content"}
        return [score(trajectory) for trajectory in data["trajectories"]]

Beside `trajectories` the mapping has `data_sources`, `ground_truths` and `extra_infos`, one entry each.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any, TypeVar

from rally.rewards.functions import RewardFunction, register_reward
from rally.rewards.result import RewardError

F = TypeVar("F", bound=Callable[..., Any])
_scorers: dict[Callable[..., Any], RewardFunction] = {}


class RewardManager:
    """Where functions over trajectories are registered."""

    @staticmethod
    def register(data_source: str) -> Callable[[F], F]:
        """Score `data_source` with the decorated function of one argument; a trailing * stands for any ending."""

        def add(function: F) -> F:
            _scorers[function] = _scorer(function)
            register_reward(data_source)(_scorers[function])
            return function

        return add


def as_reward_function(function: Callable[..., Any]) -> RewardFunction:
    """The function as one over the four usual arguments; itself unless it was registered over trajectories."""
    return _scorers.get(function, function) if isinstance(function, Hashable) else function


def _scorer(function: Callable[..., Any]) -> RewardFunction:
    name = getattr(function, "__name__", "the reward function")

    async def score(data_source: str, solution_str: str, ground_truth: Any, extra_info: Any = None) -> Any:
        value = function(_data(data_source, ground_truth, extra_info or {}))
        scores = await value if inspect.isawaitable(value) else value
        if not isinstance(scores, Sequence) or len(scores) != 1:
            raise RewardError(f"{name} must return a list with one score for each of data['trajectories']")
        return scores[0]

    return score  # type: ignore[return-value]


def _data(data_source: str, ground_truth: Any, extra_info: Mapping[str, Any]) -> dict[str, Any]:
    said = [{"role": message["role"], "content": message["text"]} for message in extra_info.get("messages", ())]
    return {
        "trajectories": [said],
        "data_sources": [data_source],
        "ground_truths": [ground_truth],
        "extra_infos": [extra_info],
    }
