"""verifiers 0.4 through the gateway, as a program. RALLY_VERIFIERS_PYTHON names a python with verifiers."""

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
pytestmark = pytest.mark.skipif(not PYTHON, reason="RALLY_VERIFIERS_PYTHON names no python with verifiers")
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
