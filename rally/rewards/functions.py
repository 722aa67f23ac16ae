"""Every data source has one reward function, and an unknown one is an error that names the known ones.

A reward function is `f(data_source, solution_str, ground_truth, extra_info=None, **keywords)`, plain or async, and
returns a number or a dict with "score". A user's runs in worker processes, which see the registrations of `sources.py`
and of the file named by `custom_reward_function.path`, and no others.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

from rally.rewards.result import RewardError

ARGUMENTS = ("data_source", "solution_str", "ground_truth", "extra_info")
BATCH_ARGUMENTS = ("data_sources", "solution_strs", "ground_truths", "extra_infos")

RewardFunction = Callable[..., float | dict[str, Any]]
F = TypeVar("F", bound=Callable[..., Any])


class Registered(NamedTuple):
    function: RewardFunction
    keywords: frozenset[str] | None  # beyond the four; None when it takes any


_registry: dict[str, Registered] = {}


def register_reward(data_source: str) -> Callable[[F], F]:
    """Score `data_source` with the decorated function; a trailing * stands for any ending.

    An exact name goes before a pattern and a longer pattern before a shorter one. The latest registration of a name
    holds, so a built-in one can be replaced. Put the function into the file that custom_reward_function.path names.
    """
    if not isinstance(data_source, str) or not data_source:
        raise RewardError('register_reward needs the name of a data source: write @register_reward("my_task")')

    def register(function: F) -> F:
        check_call(function, f"the reward function registered for {data_source}", {})
        _registry[data_source] = Registered(function, _keywords(function))
        return function

    return register


def registered() -> Mapping[str, Registered]:
    """What is registered in this process, by data source."""
    return dict(_registry)


def compute_score(
    data_source: str, solution_str: str, ground_truth: Any, extra_info: dict[str, Any] | None = None, **kw: Any
) -> float | dict[str, Any]:
    """Score with the function registered for `data_source`, which is given those of the keywords that it takes."""
    return route(_registry, kw, data_source, solution_str, ground_truth, extra_info)


def check_keywords(names: Iterable[str]) -> None:
    """A keyword that no registered function takes is a mistake: it would change nothing."""
    if any(entry.keywords is None for entry in _registry.values()):
        return
    known = frozenset[str]().union(*(entry.keywords or () for entry in _registry.values()))
    if unknown := sorted(set(names) - known):
        raise RewardError(
            f"no registered reward function takes reward_kwargs.{unknown[0]}; known are {', '.join(sorted(known))}"
        )


def check_call(
    function: Callable[..., Any], what: str, kwargs: Mapping[str, Any], arguments: Sequence[str] = ARGUMENTS
) -> None:
    """A function that cannot be called as we call it is found before training, not at the first episode."""
    if not callable(function):
        raise RewardError(f"{what} is not a function but {type(function).__name__}; name a function instead")
    if clash := sorted(set(kwargs) & set(arguments)):
        raise RewardError(f"reward_kwargs.{clash[0]} is always given by the episode; take it out of reward_kwargs")
    try:
        inspect.signature(function).bind(**dict.fromkeys(arguments), **kwargs)
    except TypeError as error:
        given = ", ".join((*arguments, *kwargs))
        raise RewardError(f"{what} cannot be called with {given} ({error}); give it those parameters") from error


def _keywords(function: Callable[..., Any]) -> frozenset[str] | None:
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return None
    return frozenset(p.name for p in parameters) - set(ARGUMENTS)


def route(registry: Mapping[str, Registered], kw: Mapping[str, Any], *given: Any) -> float | dict[str, Any]:
    """Call the function that `registry` has for the first of the given arguments, its data source."""
    arguments = dict(zip(ARGUMENTS, given, strict=True))
    entry = find(registry, arguments["data_source"])
    taken = {k: v for k, v in kw.items() if entry.keywords is None or k in entry.keywords}
    return entry.function(**arguments, **taken)


def find(registry: Mapping[str, Registered], data_source: str) -> Registered:
    """The function of a data source, or a sentence that names those there are."""
    if data_source in registry:
        return registry[data_source]
    patterns = [name for name in registry if name.endswith("*") and data_source.startswith(name[:-1])]
    if patterns:
        return registry[max(patterns, key=len)]
    raise RewardError(
        f"no reward function for data_source {data_source!r} (known: {', '.join(sorted(registry))}); "
        f'write one with @register_reward("{data_source}") and name its file in custom_reward_function.path'
    )
