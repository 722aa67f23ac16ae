"""A user's reward function is either ready to be called, or refused with one sentence before training.

`path` is a file (`my_reward.py`), a dotted module (`my_package.reward`) or `pkg://my_package.reward`. When the module
has a function called `name`, that function scores every episode. When it has none but registers some with
`@register_reward`, episodes are routed by data source, to the built-in functions as well. With `batch`, the function
takes lists (`BATCH_ARGUMENTS`) and returns one result per episode.
"""

from __future__ import annotations

import functools
import importlib
import importlib.util
import inspect
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

from rally.rewards import functions, sources
from rally.rewards.functions import ARGUMENTS, BATCH_ARGUMENTS, RewardFunction
from rally.rewards.result import RewardError


def load_reward_function(
    path: str | None = None,
    name: str = "compute_score",
    kwargs: Mapping[str, Any] | None = None,
    *,
    batch: bool = False,
) -> Callable[..., Any]:
    """The function that scores a run, with `kwargs` bound; without a `path`, the router over the registered ones."""
    kwargs = dict(kwargs or {})
    function = functions.compute_score if path is None else _custom_function(path, name)
    routed = function is functions.compute_score
    if batch and routed:
        raise RewardError("reward_manager=batch needs a function of your own; set custom_reward_function.path and name")
    what = f"the reward function {name} of {path}"
    functions.check_call(function, what, kwargs, BATCH_ARGUMENTS if batch else ARGUMENTS)
    if routed:
        functions.check_keywords(kwargs)
        sources.check_equality(kwargs)
    bound = functools.partial(function, **kwargs)
    return functools.partial(_score_batch, bound) if batch else bound


async def _score_batch(function: RewardFunction, requests: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """One answer for the whole batch, so that it crosses the pipe as any other; its `score` is nobody's."""
    lists = zip(ARGUMENTS, BATCH_ARGUMENTS, strict=True)
    value: Any = function(**{many: [request[one] for request in requests] for one, many in lists})
    scores = list(await value if inspect.isawaitable(value) else value)
    if len(scores) != len(requests):
        raise RewardError(
            f"the reward function returned {len(scores)} scores for {len(requests)} episodes; return one for each"
        )
    return {"score": 0.0, "scores": scores}


def _custom_function(path: str, name: str) -> RewardFunction:
    module = _import(path)
    if hasattr(module, name):
        function: RewardFunction = getattr(module, name)
        return function
    if any(entry.function.__module__ != sources.__name__ for entry in functions.registered().values()):
        return functions.compute_score
    raise RewardError(
        f"{path} has no function {name}; set custom_reward_function.name to one it has, or register it there "
        f"with @register_reward"
    )


def _import(path: str) -> ModuleType:
    dotted = path.removeprefix("pkg://")
    is_file = dotted == path and (path.endswith(".py") or os.sep in path)
    if is_file and not Path(path).is_file():
        raise RewardError(f"there is no file {Path(path).absolute()}; correct custom_reward_function.path")
    try:
        return _import_file(Path(path).resolve()) if is_file else importlib.import_module(dotted)
    except Exception as error:  # foreign code: whatever its import raises is the user's to read
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        raise RewardError(f"custom_reward_function.path={path} cannot be imported ({reason}); correct it") from error


def _import_file(path: Path) -> ModuleType:
    # A file may import its neighbours, as it may when run by hand; last in the list, so that it shadows nothing.
    if str(path.parent) not in sys.path:
        sys.path.append(str(path.parent))
    spec = importlib.util.spec_from_file_location(f"rally_reward_{path.stem}", path)
    if spec is None or spec.loader is None:
        raise ImportError("its name does not end in .py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[module.__name__] = module  # dataclasses and typing look their module up there
    spec.loader.exec_module(module)
    return module
