"""Environments: how they are written, found by name, made into rows, and played within their deadlines.

`session` is imported on first use: an environment in a process of its own needs only `base`.
"""

from typing import TYPE_CHECKING, Any

from rally.envs.base import EnvError, Environment, EnvTurn, MatchEnd, SeatTurn, tool_reply

if TYPE_CHECKING:
    from rally.envs.session import Environments, EnvSession, EnvSpec

__all__ = [
    "EnvError",
    "EnvSession",
    "EnvSpec",
    "EnvTurn",
    "Environment",
    "Environments",
    "MatchEnd",
    "SeatTurn",
    "tool_reply",
]


def __getattr__(name: str) -> Any:
    if name in ("EnvSession", "EnvSpec", "Environments"):
        from rally.envs import session

        return getattr(session, name)
    raise AttributeError(f"module {__name__} has no attribute {name}")
