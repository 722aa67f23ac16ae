"""Loads a user's reward function and checks its signature. A mistake raises one RewardError before training.

`path` is a file (`my_reward.py`), a dotted module (`my_package.reward`) or `pkg://my_package.reward`. If the module has
a function called `name`, it scores every episode. Otherwise the functions that the module registers with
`@register_reward` or `RewardManager.register` (over trajectories) score their data sources, and the built-in functions
score the others. With `batch`, the function takes lists (`BATCH_ARGUMENTS`) and returns one result per episode.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rally.importing import ImportFailed, import_path
from rally.rewards import registry
from rally.rewards.completions import CompletionsReward, takes_completions
from rally.rewards.registry import ARGUMENTS, BATCH_ARGUMENTS, RewardFunction, register_reward
from rally.rewards.score import RewardError

F = TypeVar("F", bound=Callable[..., Any])
_scorers: dict[Callable[..., Any], RewardFunction] = {}


class RewardManager:
    """verl's registry of reward functions over trajectories."""

    @staticmethod
    def register(data_source: str) -> Callable[[F], F]:
        """Score `data_source` with the decorated function of one argument. A trailing * matches any ending."""

        def add(function: F) -> F:
            _scorers[function] = _scorer(function)
            register_reward(data_source)(_scorers[function])
            return function

        return add


def as_reward_function(function: Callable[..., Any]) -> RewardFunction:
    """The function with the four usual arguments. It is changed only if it was registered over trajectories."""
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
    messages = [{"role": message["role"], "content": message["text"]} for message in extra_info.get("messages", ())]
    return {
        "trajectories": [messages],
        "data_sources": [data_source],
        "ground_truths": [ground_truth],
        "extra_infos": [extra_info],
    }


@dataclass(frozen=True, kw_only=True)
class JudgeAddress:
    """Where a reward function finds the reward model, and its tokenizer."""

    address: str  # HOST:PORT
    tokenizer: str | None = None  # a folder or a name on the hub
    trust_remote_code: bool = False


class LazyTokenizer:
    """The tokenizer of a reward model. It is loaded at its first use, because many functions never use it, and it
    takes seconds in each worker."""

    def __init__(self, judge: JudgeAddress) -> None:
        self._judge = judge

    @functools.cached_property
    def _tokenizer(self) -> Any:
        from rally.models.load import load_tokenizer

        trusted, option = self._judge.trust_remote_code, "reward_model.model.path"
        return load_tokenizer(str(self._judge.tokenizer), trust_remote_code=trusted, option=option)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._tokenizer, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._tokenizer(*args, **kwargs)

    def __len__(self) -> int:
        return len(self._tokenizer)


def judge_arguments(judge: JudgeAddress) -> dict[str, Any]:
    """The arguments of a reward function that asks a served reward model."""
    tokenizer = None if judge.tokenizer is None else LazyTokenizer(judge)
    return {"reward_router_address": judge.address, "reward_model_tokenizer": tokenizer}


def load_reward_function(
    path: str | None = None,
    name: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: bool = False,
    judge: Mapping[str, Any] | None = None,
) -> Callable[..., Any]:
    """The reward function of a run, with `kwargs` bound. Without a `path`, it calls the registered functions. With a
    `judge`, the fields of a JudgeAddress, it also gets verl's two arguments for a served reward model."""
    kwargs = {**(kwargs or {}), **(judge_arguments(JudgeAddress(**judge)) if judge else {})}
    function = registry.compute_score if path is None else _custom_function(path, name)
    routed = function is registry.compute_score
    if batch and routed:
        raise RewardError("reward_manager=batch needs a function of your own; set custom_reward_function.path and name")
    label = f"the reward function {name} of {path}"
    if isinstance(function, CompletionsReward) or takes_completions(function):
        if not batch:
            raise RewardError(f"{label} scores the completions of a whole batch; set reward_model.reward_manager=batch")
        made = function if isinstance(function, CompletionsReward) else CompletionsReward([function])
        made = made.with_kwargs(kwargs)
        return BatchFunction(made, made.needs_ids)
    registry.check_call(function, label, kwargs, BATCH_ARGUMENTS if batch else ARGUMENTS)
    if routed:
        registry.check_keywords(kwargs)
        registry.check_equality(kwargs)
    bound = functools.partial(function, **kwargs)
    return BatchFunction(functools.partial(_of_lists, bound)) if batch else bound


@dataclass(frozen=True)
class BatchFunction:
    """Scores a whole batch by a function of its requests, and answers in the form of a single score, whose own `score`
    is unused."""

    function: Callable[[Sequence[Mapping[str, Any]]], Any]
    needs_ids: bool = False

    async def __call__(self, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        value: Any = self.function(requests)
        scores = list(await value if inspect.isawaitable(value) else value)
        if len(scores) != len(requests):
            raise RewardError(
                f"the reward function returned {len(scores)} scores for {len(requests)} episodes; return one for each"
            )
        return {"score": 0.0, "scores": scores}


def _of_lists(function: RewardFunction, requests: Sequence[Mapping[str, Any]]) -> Any:
    lists = zip(ARGUMENTS, BATCH_ARGUMENTS, strict=True)
    return function(**{many: [request[one] for request in requests] for one, many in lists})


def _custom_function(path: str, name: str) -> RewardFunction:
    module = _import(path)
    if hasattr(module, name):
        return as_reward_function(getattr(module, name))
    if any(entry.function.__module__ != registry.__name__ for entry in registry.registered().values()):
        return registry.compute_score
    raise RewardError(
        f"{path} has no function {name}; set custom_reward_function.name to one it has, or register it there "
        f"with @register_reward"
    )


def _import(path: str) -> ModuleType:
    is_file = not path.startswith("pkg://") and (path.endswith(".py") or "/" in path)
    if is_file and not Path(path).is_file():
        raise RewardError(f"there is no file {Path(path).absolute()}; correct custom_reward_function.path")
    try:
        return import_path(path, "reward")
    except ImportFailed as failed:
        raise RewardError(f"custom_reward_function.path={path} cannot be imported ({failed}); correct it") from failed
