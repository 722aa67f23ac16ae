"""mini-swe-agent through the gateway: it repairs a repository in Rally's sandbox, and hidden tests give the reward.

The agent, its prompts and its parsing are the package's. Commands run in the sandbox and nowhere else. A reply that the
package cannot parse stays in the history, so that it does not begin a segment of its own. The tests run in a fresh
sandbox on the files that the agent left, so that it cannot change how they are run. What it changed is recorded as a
patch.
"""

from __future__ import annotations

import json
import os
import platform
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from rally.recipes.repair.hidden_tests import (
    COMMAND_SECONDS,
    passes_hidden_tests,
    patch_of,
    read_last_line,
    sandbox,
    wait_for,
)
from rally.sandbox.types import Outcome, Program
from rally.types import RallyError

os.environ.setdefault("MSWEA_SILENT_STARTUP", "1")

try:
    import minisweagent
    from minisweagent.agents.default import AgentConfig, DefaultAgent
    from minisweagent.environments.local import LocalEnvironment
    from minisweagent.exceptions import FormatError
    from minisweagent.models.utils.actions_toolcall import (
        BASH_TOOL,
        format_toolcall_observation_messages,
        parse_toolcall_actions,
    )
except ImportError as error:
    raise RallyError(
        f"the recipe repair needs the package mini-swe-agent ({error}); run: pip install mini-swe-agent"
    ) from error

MOST_OUTPUT = 4000  # characters of a command's output that the policy sees
MOST_FILE = 100_000  # bytes of a file that are read back; the sandbox returns at most a megabyte
STEPS = 12
SUBMIT = "echo COMPLETE_TASK_AND_SUBMIT_FINAL_OUTPUT"
_RUN = """
import codecs, json, os, select, signal, subprocess, time
shell, both = ["/bin/sh", "-c", {command!r}], dict(stdout=subprocess.PIPE, stderr=subprocess.STDOUT)
child = subprocess.Popen(shell, **both, start_new_session=True)
pipe, decoder = child.stdout.fileno(), codecs.getincrementaldecoder("utf-8")("replace")
os.set_blocking(pipe, False)
text, length, deadline, running = "", 0, time.monotonic() + {seconds}, True
while running:
    code = child.poll()  # before the last read, so that all of its output is read
    late = code is None and time.monotonic() >= deadline
    if late:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
    running = code is None and not late  # what it left in the background may hold the pipe
    try:
        data = os.read(pipe, 1 << 20)
        more = decoder.decode(data, final=not running)
    except BlockingIOError:
        data, more = None, decoder.decode(b"", final=not running)
    text, length = text + more[:max(0, {most} - length)], length + len(more)
    if running and data is None:
        select.select([pipe], [], [], 0.02)
    elif running and (not data or length > {most}):
        time.sleep(0.001 if data else 0.02)  # it closed its output, or writes without end
child.stdout.close()
left_out = f"\\n({{length - {most}}} characters left out)" if length > {most} else ""
ended = "\\n(ended after {seconds} seconds)" if late else ""
print()
print(json.dumps([text + left_out + ended, -1 if late else code]))
"""
_READ = """
import json, pathlib
paths = [pathlib.Path(name) for name in {names!r}]
kept = {{}}
for path in paths:
    if path.is_file() and path.stat().st_size <= {most}:
        try:
            kept[str(path)] = path.read_bytes().decode()  # read_text would change the ends of lines
        except UnicodeDecodeError:
            pass  # Python could not read it either
print()
print(json.dumps(kept))
"""


@cache
def _config() -> dict[str, Any]:
    text = (Path(minisweagent.__file__).parent / "config" / "mini.yaml").read_text(encoding="utf-8")
    config: dict[str, Any] = yaml.safe_load(text)
    return config


class AgentModel:
    """The part of a model that does not depend on who replies."""

    name = "policy"

    def query(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        raise NotImplementedError

    def format_message(self, **fields: Any) -> dict[str, Any]:
        return fields

    def format_observation_messages(
        self, message: dict[str, Any], outputs: list[dict[str, Any]], template_vars: dict[str, Any] | None = None
    ) -> list[dict[str, Any]]:
        observed: list[dict[str, Any]] = format_toolcall_observation_messages(
            actions=message["extra"]["actions"],
            outputs=outputs,
            observation_template=_config()["model"]["observation_template"],
            template_vars=template_vars,
        )
        return observed

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        return {"model_name": self.name}

    def serialize(self) -> dict[str, Any]:
        return {}


class GatewayModel(AgentModel):
    """The model of the agent: the policy, asked over OpenAI's API. `client` is the gateway's AgentClient."""

    def __init__(self, client: Any) -> None:
        self.name, self.llm = client.model, client.sync_openai(max_retries=0)

    def query(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        sent = [{k: v for k, v in message.items() if k != "extra"} for message in messages]
        choice = self.llm.chat.completions.create(model=self.name, messages=sent, tools=[BASH_TOOL]).choices[0]
        said: dict[str, Any] = choice.message.model_dump(exclude_none=True)
        try:
            actions = parse_toolcall_actions(
                choice.message.tool_calls or [],
                format_error_template=_config()["model"]["format_error_template"],
                template_kwargs={"finish_reason": choice.finish_reason},
            )
        except FormatError as wrong:
            wrong.messages = (said, *_answered(said, wrong.messages))
            raise
        return {**said, "extra": {"actions": actions}}


@dataclass(frozen=True)
class AgentTurn:
    """A scripted reply: its reasoning and its command."""

    thought: str
    command: str


class ScriptedModel(AgentModel):
    """Replies with steps that are known, for conversations of the supervised start."""

    def __init__(self, steps: Iterable[AgentTurn]) -> None:
        self.steps: Iterator[tuple[int, AgentTurn]] = iter(enumerate(steps))

    def query(self, messages: list[dict[str, Any]], **_: Any) -> dict[str, Any]:
        number, step = next(self.steps)
        function = {"name": "bash", "arguments": {"command": step.command}}
        call = {"id": f"call_{number}", "type": "function", "function": function}
        action = {"command": step.command, "tool_call_id": call["id"]}
        return {"role": "assistant", "content": step.thought, "tool_calls": [call], "extra": {"actions": [action]}}


def _answered(said: dict[str, Any], problem: tuple[dict[str, Any], ...]) -> list[dict[str, Any]]:
    """The complaint about a reply: as the answers of its calls, if it has some, else as a user message."""
    calls, text = said.get("tool_calls") or [], problem[0]["content"]
    extra = problem[0].get("extra", {})
    if not calls:
        return [{"role": "user", "content": text, "extra": extra}]
    return [{"role": "tool", "tool_call_id": call["id"], "content": text, "extra": extra} for call in calls]


class SandboxEnvironment(LocalEnvironment):
    """Runs the commands of the agent in the sandbox."""

    def __init__(self, files: Mapping[str, str]) -> None:
        super().__init__()
        self.files = dict(files)
        held = {name: text.encode() for name, text in files.items()}
        self.session = sandbox().session(Program(code="", files=held))

    def execute(self, action: dict[str, Any], cwd: str = "", *, timeout: int | None = None) -> dict[str, Any]:
        seconds = timeout or COMMAND_SECONDS
        code = _RUN.format(command=action["command"], seconds=seconds, most=MOST_OUTPUT)
        outcome: Outcome = wait_for(self.session.run(code, seconds + 5))
        match read_last_line(outcome.last.stdout) if outcome.ok else None:
            case [str(text), int(status)]:
                output = {"output": text, "returncode": status, "exception_info": ""}
            case _:
                problem = (outcome.last.reason or outcome.last.stderr or "it was killed")[-MOST_OUTPUT:]
                lost = " All files are as they were at the beginning." if outcome.state_lost else ""
                problem = f"the sandbox ended the command: {problem}.{lost}"
                output = {"output": "", "returncode": -1, "exception_info": problem}
        self._check_finished(output)
        return output

    def left(self) -> dict[str, str]:
        """The files as they are now. Those that are gone, too long, or no UTF-8, are as they were."""
        code = _READ.format(names=list(self.files), most=MOST_FILE)
        outcome: Outcome = wait_for(self.session.run(code, COMMAND_SECONDS))
        read = read_last_line(outcome.last.stdout) if outcome.ok else None
        kept = read.items() if isinstance(read, dict) else ()
        return {**self.files, **{name: text for name, text in kept if name in self.files and isinstance(text, str)}}

    def close(self) -> None:
        wait_for(self.session.close())

    def get_template_vars(self, **_: Any) -> dict[str, Any]:
        names = platform.uname()
        return {"system": names.system, "release": names.release, "version": names.version, "machine": names.machine}


def run(row: dict[str, Any], client: Any) -> dict[str, Any]:
    """Play one episode. `client` is the gateway's AgentClient."""
    return _played(row, GatewayModel(client))[1]


def conversation(row: Mapping[str, Any], steps: Sequence[AgentTurn]) -> dict[str, Any]:
    """A row for `rally sft`: the messages of the agent as it plays the steps, with real observations."""
    messages, returned = _played(row, ScriptedModel(steps))
    if returned["reward"] != 1.0 or returned["exit_status"] != "Submitted":
        raise RallyError(f"a scripted repair failed ({returned}); check the sandbox with: rally doctor --sandbox")
    kept = [{k: v for k, v in m.items() if k != "extra"} for m in messages if m["role"] != "exit"]
    return {"messages": kept, "tools": [BASH_TOOL]}


def _played(row: Mapping[str, Any], model: AgentModel) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    """The messages of an agent that works on the repository of a row, and what is recorded of it."""
    info = row["extra_info"]
    environment = SandboxEnvironment(json.loads(info["files"]))
    try:
        given = {**_config()["agent"], "cost_limit": 0.0, "step_limit": STEPS}
        settings = {key: value for key, value in given.items() if key in AgentConfig.model_fields}
        agent = DefaultAgent(model, environment, **settings)
        ended = agent.run(row["prompt"][-1]["content"])
        left = environment.left()
    finally:
        environment.close()
    passed = passes_hidden_tests(left, info["test"])
    recorded = {"exit_status": ended.get("exit_status"), "steps": agent.n_calls}
    return agent.messages, {"reward": float(passed), **recorded, "patch": patch_of(environment.files, left)}
