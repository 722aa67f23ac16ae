"""Small functions and classes that files written for verl import from its utilities."""

from __future__ import annotations

import asyncio
import functools
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ConfigDict

from rally.data.tasks import TOKENIZED_ROWS
from rally.interactions import BaseInteraction, load_interactions
from rally.tools.results import read_answer
from rally.types import RallyError, ToolResponse

F = TypeVar("F", bound=Callable[..., Any])


def get_event_loop() -> asyncio.AbstractEventLoop:
    """The event loop that runs or is set, or a new one."""
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        pass
    try:
        return asyncio.get_event_loop_policy().get_event_loop()
    except RuntimeError:
        loop = asyncio.new_event_loop()
        asyncio.set_event_loop(loop)
        return loop


def copy_to_local(src: str, *args: Any, **options: Any) -> str:
    """The path itself. Files of HDFS cannot be read."""
    if str(src).startswith("hdfs:"):
        raise RallyError(f"{src} is on HDFS, which Rally cannot read; copy it to this machine")
    return os.path.expanduser(str(src))


def no_hdfs(*paths: Any, **options: Any) -> None:
    """Data preparation imports it and calls it only with an --hdfs_dir."""
    raise RallyError("HDFS is not supported; leave --hdfs_dir out")


def tokenized_here(*args: Any, **options: Any) -> Any:
    """A data set that tokenizes its rows calls it."""
    raise RallyError(TOKENIZED_ROWS)


def deprecated(replacement: str = "") -> Callable[[F], F]:
    """Decorator: calls warn that the function or class should not be used."""

    def decorate(function: F) -> F:
        advice = f"; use {replacement}" if replacement else ""
        message = f"{getattr(function, '__qualname__', function)} is deprecated{advice}"
        if isinstance(function, type):
            return function  # type: ignore[return-value]

        @functools.wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            warnings.warn(message, FutureWarning, stacklevel=2)
            return function(*args, **kwargs)

        return call  # type: ignore[return-value]

    return decorate


def initialize_interactions_from_config(interaction_config_file: str | Path) -> dict[str, BaseInteraction]:
    """The simulated users of an interaction YAML, by name."""
    return {user.name: user for user in load_interactions(interaction_config_file)}


def normalize_function_tool_return(result: Any) -> tuple[ToolResponse, float, dict[str, Any]]:
    """What a function tool returned, as (response, reward, metrics)."""
    answer = read_answer(result)
    return answer.response, answer.reward or 0.0, answer.metrics


class RolloutMessage(BaseModel):
    """verl's `Message`: one message of a history."""

    model_config = ConfigDict(extra="allow")

    role: str
    content: Any = None
    tool_calls: list[Any] | None = None
