"""mini-swe-agent through the gateway: it repairs a repository in Rally's sandbox, and hidden tests give the reward.

rally train my_run.yaml actor_rollout_ref.rollout.agent_loop_class=black_box \
    actor_rollout_ref.rollout.agent_loop_config.agent=examples/repair_agent/agent.py:run

The agent, its prompts and its parsing are the package's. Commands run in the sandbox and nowhere else. A reply that the
package cannot parse stays in the history, so that it does not begin a segment of its own. The tests run in a fresh
sandbox on the files that the agent left, so that it cannot change how they are run.
"""

from __future__ import annotations

import asyncio
import json
import os
import platform
import secrets
from collections.abc import Coroutine
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rally.gateway.agent_runner import AgentClient, AgentThread
from rally.sandbox.sandbox import Sandbox, SandboxSession
from rally.sandbox.types import Outcome, Program

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

import minisweagent
from minisweagent.agents.default import DefaultAgent
from minisweagent.environments.local import LocalEnvironment
from minisweagent.models.utils.actions_toolcall import (
    BASH_TOOL,
    format_toolcall_observation_messages,
    parse_toolcall_actions,
)

COMMAND_SECONDS = 20.0
MOST_OUTPUT = 4000  # characters of a command's output that the policy sees
STEPS = 12
_RUN = """
import json, subprocess
shell, both = ["/bin/sh", "-c", {command!r}], dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
try:
    done = subprocess.run(shell, **both, timeout={seconds})
    text, code = done.stdout.decode("utf-8", "replace"), done.returncode
except subprocess.TimeoutExpired as late:
    text, code = (late.stdout or b"").decode("utf-8", "replace") + "\\n(ended after {seconds} seconds)", -1
left_out = f"\\n({{len(text) - {most}}} characters left out)" if len(text) > {most} else ""
print(json.dumps([text[:{most}] + left_out, code]))
"""
_READ = """
import json, pathlib
paths = [pathlib.Path(name) for name in {names!r}]
print(json.dumps({{str(path): path.read_text() for path in paths if path.is_file()}}))
"""


@cache
def _config() -> dict[str, Any]:
    return yaml.safe_load((Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text())


@cache
def _sandbox() -> tuple[AgentThread, Sandbox]:
    """One sandbox for all agents, used from one event loop."""
    return AgentThread(), Sandbox()


def _wait(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run_coroutine_threadsafe(work, _sandbox()[0].loop).result()


class GatewayModel:
    """The model of the agent: the policy, asked over OpenAI's API."""

    def __init__(self, client: AgentClient) -> None:
        self.client, self.llm = client, client.sync_openai(max_retries=0)
        given = _config()["model"]
        self.error, self.observation = given["format_error_template"], given["observation_template"]

    def query(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        sent = [{k: v for k, v in message.items() if k != "extra"} for message in messages]
        choice = self.llm.chat.completions.create(model=self.client.model, messages=sent, tools=[BASH_TOOL]).choices[0]
        said = choice.message.model_dump(exclude_none=True)
        try:
            actions = parse_toolcall_actions(
                choice.message.tool_calls or [],
                format_error_template=self.error,
                template_kwargs={"finish_reason": choice.finish_reason},
            )
        except minisweagent.exceptions.FormatError as wrong:
            wrong.messages = (said, *_answered(said, wrong.messages))
            raise
        return {**said, "extra": {"actions": actions}}

    def format_message(self, **fields: Any) -> dict[str, Any]:
        return fields

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        return format_toolcall_observation_messages(
            actions=message["extra"]["actions"],
            outputs=outputs,
            observation_template=self.observation,
            template_vars=template_vars,
        )

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return {"model_name": self.client.model}

    def serialize(self) -> dict[str, Any]:
        return {}


def _answered(said: dict[str, Any], problem: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """The complaint about a reply: as the answers of its calls, if it has some, else as a user message."""
    calls, text = said.get("tool_calls") or [], problem[0]["content"]
    extra = problem[0].get("extra", {})
    if not calls:
        return [{"role": "user", "content": text, "extra": extra}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": text, "extra": extra} for call in calls]


class SandboxEnvironment(LocalEnvironment):
    """Runs the commands of the agent in the sandbox."""

    def __init__(self, session: SandboxSession) -> None:
        super().__init__()
        self.session = session

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        seconds = timeout or COMMAND_SECONDS
        code = _RUN.format(command=action["command"], seconds=seconds, most=MOST_OUTPUT)
        outcome: Outcome = _wait(self.session.run(code, seconds + 5))
        if outcome.run is None or not outcome.run.ok:
            problem = (outcome.last.reason or outcome.last.stderr)[-MOST_OUTPUT:]
            output = {"output": "", "returncode": -1, "exception_info": f"the sandbox ended the command: {problem}"}
        else:
            text, status = json.loads(outcome.run.stdout)
            output = {"output": text, "returncode": status, "exception_info": ""}
        self._check_finished(output)
        return output

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        names = platform.uname()
        return {"system": names.system, "release": names.release, "version": names.version, "machine": names.machine}


def run(row: dict[str, Any], client: AgentClient) -> dict[str, Any]:
    info = row["extra_info"]
    files = {name: text.encode() for name, text in json.loads(info["files"]).items()}
    session = _sandbox()[1].session(Program(code="", files=files))
    try:
        settings = {**_config()["agent"], "cost_limit": 0.0, "step_limit": STEPS}
        settings = {
            key: value for key, value in settings.items() if key in minisweagent.agents.default.AgentConfig.model_fields
        }
        agent = DefaultAgent(GatewayModel(client), SandboxEnvironment(session), **settings)
        ended = agent.run(row["prompt"][-1]["content"])
        left: Outcome = _wait(session.run(_READ.format(names=list(files)), COMMAND_SECONDS))
    finally:
        _wait(session.close())
    found = json.loads(left.run.stdout) if left.run is not None and left.run.ok else {}
    passed = tests_pass({**files, **{name: text.encode() for name, text in found.items()}}, info["test"])
    return {"reward": float(passed), "exit_status": ended.get("exit_status"), "steps": agent.n_calls}


def tests_pass(files: dict[str, bytes], test: str) -> bool:
    """Whether the hidden tests pass on the files, in a sandbox of their own. Ending early does not pass."""
    word = secrets.token_hex(8)
    code = f"{test}\nprint({word!r})\n"
    outcome: Outcome = _wait(_sandbox()[1].run(Program(code=code, files=files, timeout=COMMAND_SECONDS)))
    return outcome.ok and outcome.run is not None and outcome.run.stdout.strip().endswith(word)
