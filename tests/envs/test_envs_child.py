"""Environments in a process of their own: played like others; deaths, hangs and mistakes are reported in words."""

import asyncio
import json
import os
import resource
import signal
import subprocess
import sys
import time
import venv
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

import rally
from rally.config import load_config
from rally.envs import EnvError, EnvSession, EnvSpec, EnvTurn
from rally.envs.child import ChildEnvironment, process_of
from rally.runs.build.data import environments_of
from rally.types import Task, ToolCall

SOURCE = """
import asyncio, os, resource, subprocess, time
from rally.envs import Environment, tool_reply

class Echo(Environment):
    def __init__(self, greeting="hi"):
        self.greeting = greeting
    def tasks(self):
        return [{"word": "a"}, {"word": "b"}]
    async def reset(self, row, seed):
        print("a package prints")
        parameters = {"type": "object", "properties": {"n": {"type": "integer"}}}
        tool = {"type": "function", "function": {"name": "add", "parameters": parameters}}
        return f"{self.greeting} {row['word']} {os.getpid()}", [tool]
    def step(self, turn):
        if turn.text == "die":
            os._exit(7)
        if turn.text == "hang":
            time.sleep(1000)
        if turn.text == "raise":
            raise KeyError("lost")
        if turn.text == "cancel":
            raise asyncio.CancelledError("by itself")
        if turn.text == "files":
            return "", float(resource.getrlimit(resource.RLIMIT_NOFILE)[0]), True, {}
        if turn.text == "start":
            left = subprocess.Popen(["sleep", "600"]).pid
            return f"{left}", 0.0, False, {}
        if turn.text == "fork":
            left = os.fork()
            if left == 0:
                time.sleep(600)
                os._exit(0)
            return f"{left}", 0.0, False, {}
        if turn.calls:
            return [tool_reply(call, str(call.arguments["n"] + 1)) for call in turn.calls], None, False, {}
        return "", 1.5, True, {"said": turn.text}
"""


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory) -> str:
    """An environment with nothing but the standard library."""
    folder = tmp_path_factory.mktemp("bare")
    venv.create(folder, with_pip=False)
    return str(folder / "bin" / "python")


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "child_env_case.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)


def opened(python: str, timeout: float = 60.0, **args: Any) -> EnvSession:
    def make(**given: Any) -> ChildEnvironment:
        return ChildEnvironment(python, "child_env_case.Echo", **given)

    row = {"env": "echo", "id": "1", "seed": 1, "word": "b"}
    return EnvSession(EnvSpec(label="echo", make=make, args=args), row, 1, timeout)


async def test_an_environment_is_played_in_a_python_without_rally(python: str) -> None:
    config = load_config(overrides=["env.name=child_env_case.Echo", f"env.python={python}", "env.args.greeting=hello"])
    environments = environments_of(config)
    assert environments.tasks("child_env_case.Echo") == [{"word": "a"}, {"word": "b"}]
    assert environments.seats("child_env_case.Echo") == 1
    row = {"env": "child_env_case.Echo", "id": "x", "seed": 1}
    session = environments.open(Task(id="x", data_source="x", prompt=(), row=row))
    prompt = (await session.reset()).messages[0]["content"]
    assert prompt.startswith("hello b ") and int(prompt.split()[-1]) != os.getpid()
    step = await session.step(EnvTurn(text="", calls=(ToolCall(name="add", id="c", arguments={"n": 4}),)))
    assert step.messages[0]["content"] == "5"
    step = await session.step(EnvTurn(text="done"))
    assert (step.reward, step.done, step.info) == (1.5, True, {"said": "done"})
    assert await session.close() == []


async def test_a_mistake_in_it_fails_only_its_episode(python: str) -> None:
    broken, other = opened(python), opened(python)
    await broken.reset()
    await other.reset()
    with pytest.raises(EnvError, match=r"step of the environment echo raised KeyError: 'lost'"):
        await broken.step(EnvTurn(text="raise"))
    assert (await other.step(EnvTurn(text="fine"))).reward == 1.5
    assert await broken.close() == [] == await other.close()
    with pytest.raises(EnvError, match="unexpected keyword argument"):
        await opened(python, nothing=1).reset()


async def test_a_process_that_dies_is_reported_and_replaced(python: str) -> None:
    dying, other = opened(python), opened(python)
    await dying.reset()
    await other.reset()
    with pytest.raises(EnvError, match="ended with exit code 7"):
        await dying.step(EnvTurn(text="die"))
    with pytest.raises(EnvError, match="ended with exit code 7"):
        await other.step(EnvTurn(text="fine"))
    for session in (dying, other):
        assert "ended with exit code 7" in (await session.close())[0]
    again = opened(python)
    await again.reset()
    assert (await again.step(EnvTurn(text="fine"))).reward == 1.5
    await again.close()


@pytest.mark.drill(
    "reliability",
    "An environment process dies and leaves a child behind",
    "Its episodes fail at once; no process is left",
)
@pytest.mark.parametrize("how", ["start", "fork"])  # a fork holds the pipe of the answers open, too
async def test_a_process_that_dies_leaves_nothing_behind(python: str, how: str) -> None:
    session = opened(python)
    await session.reset()
    left = int((await session.step(EnvTurn(text=how))).messages[0]["content"])
    assert _lives(left)
    with pytest.raises(EnvError, match="ended with exit code 7"):
        await session.step(EnvTurn(text="die"))
    await session.close()
    await asyncio.to_thread(_gone, left)


async def test_whatever_a_step_raises_fails_only_its_episode(python: str) -> None:
    broken, other = opened(python), opened(python)
    await broken.reset()
    await other.reset()
    with pytest.raises(EnvError, match=r"step of the environment echo raised CancelledError: by itself"):
        await broken.step(EnvTurn(text="cancel"))
    assert (await other.step(EnvTurn(text="fine"))).reward == 1.5
    assert await broken.close() == [] == await other.close()


async def test_as_many_episodes_are_played_as_the_machine_allows_files(python: str) -> None:
    """Not as the usual limit of 1024 allows: the event loop of each episode holds three of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    low = 256 + len(os.listdir("/proc/self/fd"))  # earlier tests may have left files open in this process
    process_of(python).kill()  # it has the limit of its start
    resource.setrlimit(resource.RLIMIT_NOFILE, (low, hard))
    try:
        sessions = [opened(python) for _ in range(low * 2 // 5)]
        await sessions[0].reset()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    await asyncio.gather(*(session.reset() for session in sessions[1:]))
    assert (await sessions[-1].step(EnvTurn(text="files"))).reward > low
    for session in sessions:
        assert await session.close() == []


@pytest.mark.parametrize("answer", ["5", "[]", "{}", '{"call": [1]}', '{"call": 0, "error": 1}', "half"])
def test_a_process_whose_answers_cannot_be_read_is_ended(tmp_path: Path, answer: str) -> None:
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport time; input(); print({answer!r}, flush=True); time.sleep(600)\n")
    script.chmod(0o755)
    with pytest.raises(EnvError, match=r"ended by signal 9: it answered something that cannot be read"):
        ChildEnvironment(str(script), "a.B")


async def test_a_call_that_hangs_misses_its_deadline_and_the_process_is_killed(
    python: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("rally.envs.child.CLOSE_SECONDS", 0.2)
    session = opened(python, timeout=5.0)
    await session.reset()
    session._timeout = 0.3
    process = process_of(python)
    with pytest.raises(EnvError, match=r"did not return within 0\.3 seconds"):
        await session.step(EnvTurn(text="hang"))
    session._timeout = 30.0
    assert "which was ended" in (await session.close())[0]
    process._process.wait(20)
    assert process._process.returncode == -signal.SIGKILL


def test_a_python_that_cannot_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(EnvError, match=r"env\.python=/nowhere/python is no program"):
        ChildEnvironment("/nowhere/python", "a.B")
    script = tmp_path / "python"
    script.write_text(f"#!{sys.executable}\nimport sys; sys.exit('too old')\n")
    script.chmod(0o755)
    with pytest.raises(EnvError, match="ended with exit code 1: too old"):
        ChildEnvironment(str(script), "a.B")


@pytest.mark.timeout(120)
@pytest.mark.drill("reliability", "An environment process stops reading", "Its episodes fail at their deadlines")
async def test_a_process_that_reads_nothing_blocks_nobody(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rally.envs.child.CLOSE_SECONDS", 0.2)
    session = opened(python)
    pid = int((await session.reset()).messages[0]["content"].split()[-1])
    os.kill(pid, signal.SIGSTOP)
    session._timeout = 1.0
    began = asyncio.get_running_loop().create_task(asyncio.sleep(0.5))
    with pytest.raises(EnvError, match="step of the environment echo"):
        await session.step(EnvTurn(text="more than a pipe holds" * 10_000))
    assert began.done(), "the event loop went on"
    session._timeout = 30.0
    assert await session.close() != []
    assert (await opened(python).reset()).messages, "another process plays the next episode"


async def test_an_answer_that_comes_as_its_caller_gives_up_ends_no_other(python: str) -> None:
    session, process = opened(python), process_of(python)
    await session.reset()
    assert isinstance(session._environment, ChildEnvironment)
    late: Any = Future()
    late.cancelled = lambda: False  # it is cancelled right after it was asked
    Future.cancel(late)
    number = process.next_number()
    process._waiting[number] = late
    request = {"call": number, "object": session._environment._object, "method": "seats"}
    process._requests.put(json.dumps(request) + "\n")
    assert (await session.step(EnvTurn(text="fine"))).reward == 1.5
    assert await session.close() == []


RUN = """
import sys, threading, time
from rally.envs.child import ChildEnvironment

def open_in_a_thread():
    environment = ChildEnvironment(sys.argv[1], "child_env_case.Echo")
    print(environment._process._process.pid, environment.seats(), flush=True)

opening = threading.Thread(target=open_in_a_thread)
opening.start()
opening.join()
time.sleep(1000)
"""


@pytest.mark.drill("reliability", "`kill -9` of a run whose environment process is stopped", "No process is left")
def test_a_stopped_process_does_not_outlive_a_killed_run(python: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(Path(rally.__file__).parents[1]), os.getcwd())))
    run = subprocess.Popen([sys.executable, "-c", RUN, python], stdout=subprocess.PIPE, text=True)
    assert run.stdout is not None
    pid = int(run.stdout.readline().split()[0])
    try:
        os.kill(pid, 0)  # the end of the thread that made the environment has not ended it
        os.kill(pid, signal.SIGSTOP)
        run.kill()
        run.wait()
        _gone(pid)
    finally:
        if _lives(pid):
            os.kill(pid, signal.SIGKILL)


def _gone(pid: int) -> None:
    deadline = time.monotonic() + 30
    while _lives(pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not _lives(pid)


def _lives(pid: int) -> bool:
    """Whether it is there and no zombie, which nobody may wait for in a container."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False
