"""The adapter `tau2/<domain>`: tau2-bench by the interface of its `AgentGymEnv`. The policy is the agent.

The package is installed from its repository (github.com/sierra-research/tau2-bench); `tau2` on PyPI is something else.
It needs Python 3.12, so it usually runs with `env.python`. The tasks are those in `task_ids`, or all of the domain. The
simulated user is a model of its own (`user_llm`, `user_llm_args`), never the policy. `solo_mode` needs none, and its
tasks are tickets.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from tau2.gym.gym_agent import AgentGymEnv
from tau2.runner.helpers import load_tasks

from rally.envs.base import EnvError, Environment, EnvTurn, tool_reply
from rally.types import Message, ToolCall


def names() -> list[str]:
    return ["mock", "airline", "retail", "telecom"]


def make(name: str, task_ids: Sequence[str] = (), **args: Any) -> Environment:
    """The environment of a domain. `args` are those of AgentGymEnv."""
    if not args.get("solo_mode") and not args.get("user_llm"):
        raise EnvError("tau2 needs a model for its simulated user; set env.args.user_llm, or env.args.solo_mode=true")
    alone = bool(args.get("solo_mode"))
    known = [str(task) for task in task_ids] or [task.id for task in load_tasks(name) if task.ticket or not alone]
    if not known:
        raise EnvError(f"no task of tau2/{name} has a ticket to solve alone; leave env.args.solo_mode out")
    return Tau2Task(name, known, args)


class Tau2Task(Environment):
    """One task of a domain. One call per turn is sent to the package, which answers it."""

    def __init__(self, domain: str, task_ids: Sequence[str], args: Mapping[str, Any]) -> None:
        self.domain, self.task_ids, self.args = domain, task_ids, dict(args)
        self.env: Any = None

    def tasks(self) -> Sequence[Mapping[str, Any]]:
        return [{"task": task} for task in self.task_ids]

    def reset(self, row: Mapping[str, Any], seed: int) -> tuple[list[Message], list[Mapping[str, Any]]]:
        self.env = AgentGymEnv(domain=self.domain, task_id=row["task"], **self.args)
        observation, info = self.env.reset(seed=seed)
        policy: Message = {"role": "system", "content": str(info.get("policy", ""))}
        text = str(observation or getattr(info.get("task"), "ticket", None) or "")  # without a user, the ticket asks
        if not text:
            raise EnvError(f"the task {row['task']} of tau2/{self.domain} has no ticket to solve alone; leave it out")
        opening: Message = {"role": "user", "content": text}
        return [policy, opening] if policy["content"] else [opening], [_schema(tool) for tool in info.get("tools", ())]

    def step(self, turn: EnvTurn) -> tuple[list[Message], float | None, bool, dict[str, Any]]:
        replies: list[Message] = []
        calls: Sequence[ToolCall | None] = turn.calls or (None,)
        for number, call in enumerate(calls):
            observation, reward, ended, cut, _ = self.env.step(turn.reply if call is None else _action(call))
            text = str(observation)
            replies.append({"role": "user", "content": text or "..."} if call is None else tool_reply(call, text))
            if ended or cut:
                return replies, float(reward), True, {"truncated": bool(cut), "calls_left": len(calls) - number - 1}
        return replies, None, False, {}

    def close(self) -> None:
        if hasattr(self.env, "close"):
            self.env.close()


def _action(call: ToolCall) -> str:
    return json.dumps({"name": call.name, "arguments": call.arguments})


def _schema(tool: Any) -> Mapping[str, Any]:
    """The tool in OpenAI form: a mapping, or an object with `openai_schema`."""
    schema = tool if isinstance(tool, Mapping) else getattr(tool, "openai_schema", None)
    if not isinstance(schema, Mapping):
        raise EnvError(f"the tool {tool!r} of tau2 has no openai_schema; this version of tau2-bench is not supported")
    return schema
