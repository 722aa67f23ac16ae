"""verifiers through the gateway, as a program. RALLY_VERIFIERS_PYTHON names a python with verifiers 0.4, and
RALLY_VERIFIERS_01_PYTHON one with 0.1."""

import asyncio
import json
import os
import subprocess
from pathlib import Path

import pytest
from loop_cases import Reply, make_job, make_runner, make_task, said, sampling_of, tiny_codec

from rally.gateway import BlackBoxAgentLoop
from rally.loops import LoopSpec

PYTHON = os.environ.get("RALLY_VERIFIERS_PYTHON", "")
OLD_PYTHON = os.environ.get("RALLY_VERIFIERS_01_PYTHON", "")
SCRIPT = str(Path(__file__).parents[2] / "examples" / "verifiers_agent" / "agent.py")
TASKSET = """
import verifiers.v1 as vf

__all__ = ["ToyTaskset"]

class ToyTask(vf.Task):
    @vf.reward
    async def says_four(self, trace) -> float:
        return 0.75 * ("four" in str(trace.assistant_messages[-1].content))

class ToyTaskset(vf.Taskset):
    def load(self):
        for n in range(2):
            yield ToyTask(vf.TaskData(prompt=f"What is {n}+2?"))
"""


@pytest.mark.skipif(not PYTHON, reason="RALLY_VERIFIERS_PYTHON names no python with verifiers")
def test_the_reward_of_the_taskset_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "toy_taskset.py").write_text(TASKSET)
    monkeypatch.chdir(tmp_path)
    subprocess.run([PYTHON, SCRIPT, "rows", "toy_taskset", "--out", "rows.jsonl"], check=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    assert [row["prompt"][0]["content"] for row in rows] == ["What is 0+2?", "What is 1+2?"]
    codec = tiny_codec()
    for text, reward in (("it is four", 0.75), ("it is five", 0.0)):
        loops = {"black_box": LoopSpec(BlackBoxAgentLoop, {"command": [PYTHON, SCRIPT, "play", "toy_taskset"]})}
        runner = make_runner(codec, [Reply(said(codec, text))], loops=loops, loop="black_box")
        jobs = [make_job(make_task(row["prompt"], row=row), row["index"]) for row in rows]
        for row, episode in zip(rows, asyncio.run(runner.run(jobs, sampling_of(codec))), strict=True):
            assert episode.error is None and episode.reward == reward and len(episode.segments) == 1
            assert row["prompt"][0]["content"] in codec.decode(episode.segments[0].prompt_ids)


TOOL_ENV = """
import verifiers as vf
from datasets import Dataset

def add(x: int, y: int) -> int:
    \"\"\"Adds.\"\"\"
    return x + y

def says_four(completion, **kwargs) -> float:
    return 0.75 * ("four" in str(completion[-1].content))

def load_environment(**kwargs):
    rows = [{"question": f"What is {n}+2?", "answer": str(n + 2)} for n in range(2)]
    rubric = vf.Rubric(funcs=[says_four], weights=[1.0])
    return vf.ToolEnv(dataset=Dataset.from_list(rows), tools=[add], rubric=rubric, max_turns=4)
"""


@pytest.mark.skipif(not OLD_PYTHON, reason="RALLY_VERIFIERS_01_PYTHON names no python with verifiers 0.1")
def test_an_environment_of_verifiers_0_1_has_its_tools_and_its_reward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = SCRIPT.replace("agent.py", "agent_0_1.py")
    (tmp_path / "toy_env.py").write_text(TOOL_ENV)
    monkeypatch.chdir(tmp_path)
    subprocess.run([OLD_PYTHON, script, "rows", "toy_env", "--out", "rows.jsonl"], check=True)
    rows = [json.loads(line) for line in (tmp_path / "rows.jsonl").read_text().splitlines()]
    codec = tiny_codec()
    loops = {"black_box": LoopSpec(BlackBoxAgentLoop, {"command": [OLD_PYTHON, script, "play", "toy_env"]})}
    turns = [Reply(said(codec, "", ("add", {"x": 2, "y": 2}))), Reply(said(codec, "it is four"))]
    runner = make_runner(codec, turns, loops=loops, loop="black_box")
    jobs = [make_job(make_task(row["prompt"], row=row), row["index"]) for row in rows]
    for episode in asyncio.run(runner.run(jobs, sampling_of(codec))):
        assert episode.error is None and episode.reward == 0.75 and len(episode.segments) == 1
        (answer,) = (turn for turn in episode.turns if turn.role == "tool")
        assert answer.text == "4" and episode.extra["agent"]["rewritten"] == 0
