"""The adapter `openenv/<name>`: an OpenEnv server that is already running, over its own client.

`env.args.base_url` is the address of the server; the name is only a label. Each episode is a session of its own, so the
server must allow as many sessions as episodes run at once. The reply of the policy is an action: the text under the key
`action`, or, without that key, a JSON object. What the policy sees is the field `observation` of an observation, or all
of it as JSON.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from openenv.core import GenericEnvClient

from rally.envs.base import EnvError, Environment, EnvTurn

REFUSED = "VALIDATION_ERROR"  # the server's code for an action that does not fit its schema
HIDDEN = ("reward", "done", "metadata")  # fields of every observation that are not for the policy


def names() -> list[str]:
    return ["server"]


def make(
    name: str,
    base_url: str | None = None,
    action: str | None = None,
    observation: str | None = None,
    instruction: str = "",
    **reset: Any,
) -> Environment:
    """The environment of a server. `instruction` is written before the first observation; `reset` are further
    arguments of the server's reset."""
    if not base_url:
        raise EnvError("openenv needs the address of a server; set env.args.base_url=http://127.0.0.1:8000")
    return OpenEnvSession(base_url, action, observation, instruction, reset)


class OpenEnvSession(Environment):
    """One session of a server."""

    def __init__(
        self, base_url: str, action: str | None, observation: str | None, instruction: str, options: Mapping[str, Any]
    ) -> None:
        self.client: Any = GenericEnvClient(base_url=base_url)
        self.action, self.observation, self.instruction, self.options = action, observation, instruction, dict(options)

    async def reset(self, row: Mapping[str, Any], seed: int) -> tuple[str, list[Mapping[str, Any]]]:
        result = await self.client.reset(seed=seed, **self.options)
        text = self._text(result.observation)
        return "\n\n".join(part for part in (self.instruction, text) if part), []

    async def step(self, turn: EnvTurn) -> tuple[str, float | None, bool, dict[str, Any]]:
        action: Any = {self.action: turn.reply}
        if self.action is None:
            try:
                action = json.loads(turn.reply)
            except (ValueError, RecursionError):  # text of the policy, which may be nested without end
                action = None
            if not isinstance(action, dict):
                return "Reply with one JSON object.", None, False, {"valid": False}
        try:
            result = await self.client.step(action)
        except RuntimeError as error:
            if REFUSED not in str(error):
                raise
            return f"The action does not fit the environment. ({error})", None, False, {"valid": False}
        reward = None if result.reward is None else float(result.reward)
        if result.done and reward is None:
            reward = 0.0
        return self._text(result.observation), reward, bool(result.done), {"valid": True}

    async def close(self) -> None:
        await self.client.close()

    def _text(self, observed: Mapping[str, Any]) -> str:
        if self.observation is None:
            return json.dumps({key: value for key, value in observed.items() if key not in HIDDEN})
        if self.observation not in observed:
            known = ", ".join(observed)
            raise EnvError(
                f"the server's observations have no field {self.observation}, only {known}; correct env.args"
            )
        return str(observed[self.observation])
