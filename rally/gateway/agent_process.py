"""Runs an agent as a program of its own, in any language or container: `agent_loop_config.command`.

It gets its episode by environment variables and reports over HTTP. Cancelling it, as a deadline does, kills its process
group. A program that fails is reported with its exit code and its last lines.

    OPENAI_BASE_URL, OPENAI_API_KEY     where the policy is asked, as OpenAI's clients read it
    RALLY_EPISODE_URL                   GET: the row. POST: {"reward": ..., "answer": ..., ...}. POST .../credit
    RALLY_TASK                          the row as JSON, if it is short enough for an environment variable
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rally.gateway.agent_runner import AgentClient
from rally.loops import LoopError
from rally.redact import redact
from rally.rewards.score import plain
from rally.types import RallyError
from rally.util.subprocesses import run_process

MOST_TASK_BYTES = 100_000  # Linux allows 128 KiB for one variable
QUOTED_LINES = 8


class AgentProgramFailed(Exception):
    """The program of an agent ended with an error."""


class AgentWorkerLost(RallyError):
    """The worker of an episode stopped answering, or was stopped (worker_pool.py)."""


def check_command(command: Any) -> list[str]:
    if isinstance(command, str) or not isinstance(command, Sequence) or not command:
        raise LoopError(
            f"agent_loop_config.command must be a list of words, such as [python, agent.py], not {command!r}"
        )
    return [str(word) for word in command]


def environment_of(row: Mapping[str, Any], client: AgentClient) -> dict[str, str]:
    task = json.dumps(plain(dict(row)), ensure_ascii=False)
    short = {"RALLY_TASK": task} if len(task.encode()) <= MOST_TASK_BYTES else {}
    episode = {"RALLY_EPISODE": client.episode_id, "RALLY_EPISODE_URL": f"{client.base_url}/episode"}
    return {**client.environment, **episode, **short}


async def run_command(
    command: Sequence[str], reported: Callable[[], Any], row: Mapping[str, Any], client: AgentClient
) -> Any:
    """Run the program to its end. Returns what it reported; None if it reported nothing and ended with 0."""
    try:
        ended = await run_process(command, environment={**os.environ, **environment_of(row, client)})
    except OSError as error:
        raise LoopError(
            f"the agent {command[0]} cannot be started ({error}); correct agent_loop_config.command"
        ) from None
    if ended.code:
        raise AgentProgramFailed(program_failure(ended.code, ended.text))
    return reported()


def program_failure(code: int, output: str) -> str:
    """How a program failed, with its last lines."""
    how = f"by signal {-code}" if code < 0 else f"with exit code {code}"
    lines = "; ".join(line for line in output.splitlines()[-QUOTED_LINES:] if line.strip())
    return f"it ended {how}" + (f": {redact(lines)}" if lines else ", without output")
