"""Agents as programs: the row and the key by environment variables, the result over HTTP, deadlines and lost agents."""

import asyncio
import os
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from gateway_cases import row_of
from loop_cases import Held, Reply, hold, make_job, make_runner, said, sampling_of, tiny_codec

from rally.chat import ChatCodec
from rally.gateway import BlackBoxAgentLoop
from rally.loops import LoopError, LoopSpec, Runner
from rally.types import StopReason


@pytest.fixture(scope="module")
def tiny() -> ChatCodec:
    return tiny_codec()


PROGRAM = """
import json, os, sys, time, urllib.request

def send(url, body=None):
    headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"], "Content-Type": "application/json"}
    data = None if body is None else json.dumps(body).encode()
    return json.load(urllib.request.urlopen(urllib.request.Request(url, data, headers)))

row, episode = json.loads(os.environ["RALLY_TASK"]), os.environ["RALLY_EPISODE_URL"]
assert send(episode)["task"] == row
answer = send(os.environ["OPENAI_BASE_URL"] + "/chat/completions", {"model": "m", "messages": row["raw_prompt"]})
how = sys.argv[1]
if how == "fail":
    sys.exit("no more ideas")
if how == "hang":
    open(sys.argv[2], "w").write(str(os.getpid()))
    time.sleep(1000)
if how == "report":
    send(episode + "/credit", {"call": answer["id"], "reward": 0.25})
    send(episode, {"reward": 0.5, "note": row["raw_prompt"][0]["content"]})
"""


@pytest.fixture
def program(tmp_path: Path) -> str:
    (tmp_path / "agent.py").write_text(PROGRAM)
    return str(tmp_path / "agent.py")


def runner_of(tiny: ChatCodec, *command: str, **settings: Any) -> Runner:
    script = [Reply(said(tiny, "four"))]
    loops = {"black_box": LoopSpec(BlackBoxAgentLoop, {"command": [sys.executable, *command]})}
    return make_runner(tiny, script, loops=loops, loop="black_box", **settings)


def played(tiny: ChatCodec, *command: str, **settings: Any) -> Held:
    return asyncio.run(hold(runner_of(tiny, *command, **settings), row_of(tiny)))


def test_a_program_reports_its_reward_and_credit(tiny: ChatCodec, program: str) -> None:
    episode = played(tiny, program, "report").episode
    assert episode.error is None and episode.reward == 0.75 and episode.turns[0].reward == 0.25
    assert episode.extra["returned"] == {"note": "What is 2+2?"} and episode.turns[0].text == "four"


def test_a_program_without_a_report_leaves_the_reward_to_the_reward_function(tiny: ChatCodec, program: str) -> None:
    episode = played(tiny, program, "end").episode
    assert (episode.error, episode.reward, episode.extra["scored_text"]) == (None, None, "four")


def test_many_at_a_time(tiny: ChatCodec, program: str) -> None:
    runner = runner_of(tiny, program, "report")
    jobs = [make_job(row_of(tiny), number) for number in range(6)]
    episodes = asyncio.run(runner.run(jobs, sampling_of(tiny)))
    assert [episode.reward for episode in episodes] == [0.75] * 6


def test_a_lost_program_is_reported_with_its_last_lines(tiny: ChatCodec, program: str) -> None:
    episode = played(tiny, program, "fail").episode
    assert episode.stop_reason is StopReason.ERROR
    assert "it ended with exit code 1: no more ideas" in str(episode.error)
    assert episode.turns[0].text == "four", "what was sampled is kept"


def test_a_program_past_its_deadline_is_killed(tiny: ChatCodec, program: str, tmp_path: Path) -> None:
    mark = tmp_path / "pid"
    episode = played(tiny, program, "hang", str(mark), timeout_per_turn=6.0).episode
    assert episode.stop_reason is StopReason.DEADLINE and episode.turns[0].text == "four"
    pid = int(mark.read_text())
    for _ in range(200):
        if not Path(f"/proc/{pid}").exists():
            return
        time.sleep(0.05)
    raise AssertionError(f"{pid} still runs: {os.getpid()}")


def test_mistakes_are_refused_before_the_run() -> None:
    for options, words in (
        ({"command": "python agent.py"}, "must be a list of words"),
        ({"command": ["no-such-program"]}, "there is no program 'no-such-program'"),
        ({"command": ["sh"], "agent": "a:b"}, "both agent and command"),
    ):
        with pytest.raises(LoopError, match=words):
            BlackBoxAgentLoop.prepare(options)
