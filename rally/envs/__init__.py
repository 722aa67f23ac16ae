"""Environments: how they are written, found by name, made into rows, and played within their deadlines."""

from rally.envs.base import EnvError, Environment, EnvTurn, tool_reply
from rally.envs.session import Environments, EnvSession, EnvSpec

__all__ = ["EnvError", "EnvSession", "EnvSpec", "EnvTurn", "Environment", "Environments", "tool_reply"]
