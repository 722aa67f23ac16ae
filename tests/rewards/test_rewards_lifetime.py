"""Reward workers end on close() and on the death of the parent, and a killed worker is replaced."""

from __future__ import annotations

import asyncio
import errno
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rally.rewards import RewardError, RewardSpec, Scorer, worker_pool

ROOT = Path(__file__).resolve().parents[2]

PID = """
    import os, subprocess, time
    def compute_score(data_source, solution_str, ground_truth, extra_info=None):
        child = subprocess.Popen(["sleep", "600"]).pid if ground_truth == "child" else 0
        if ground_truth == "hang":
            subprocess.Popen(["sleep", "600"])
            time.sleep(600)
        return {"score": 1, "pid": os.getpid(), "child": child}
"""


def is_running(pid: int) -> bool:
    """Whether the process runs. A zombie counts only if it has other threads, which may hold its pipes open."""
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        return state != "Z" or len(os.listdir(f"/proc/{pid}/task")) > 1
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pids: list[int], seconds: float) -> list[int]:
    deadline = time.monotonic() + seconds
    while (left := [pid for pid in pids if is_running(pid)]) and time.monotonic() < deadline:
        time.sleep(0.02)
    return left


def children_of(pid: int) -> list[str]:
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()


async def until(happened: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not happened():
            await asyncio.sleep(0.01)


@pytest.mark.drill("reliability", "A reward process dies between requests", "No episode is lost")
async def test_a_worker_killed_between_requests_costs_no_episode(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(PID)), 1, 20) as scorer:
        before = (await scorer.score(make_episode())).info["pid"]
        os.kill(before, signal.SIGKILL)
        assert wait_until_gone([before], 30) == []
        after = await scorer.score(make_episode())
    assert after.reward == 1.0 and after.info["pid"] != before


@pytest.mark.drill("reliability", "A reward process dies while it scores", "The error names the signal")
async def test_a_worker_killed_while_it_runs_is_an_error_that_names_the_signal(
    write_reward: Any, make_episode: Any
) -> None:
    async with Scorer(RewardSpec(path=write_reward(PID)), 1, 20) as scorer:
        pid = (await scorer.score(make_episode())).info["pid"]
        hanging = asyncio.create_task(scorer.score(make_episode(truth="hang")))
        await until(lambda: bool(children_of(pid)))
        os.kill(pid, signal.SIGKILL)
        assert (await hanging).error == "the reward worker was killed by SIGKILL (exit code -9)"
        assert (await scorer.score(make_episode())).reward == 1.0


@pytest.mark.drill(
    "reliability",
    "A reward process reads nothing, and the answer is longer than its pipe",
    "Its episode fails at the deadline; the process is replaced",
)
async def test_a_worker_that_reads_nothing_misses_its_deadline(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(PID)), 1, 0.2) as scorer:
        pid = (await scorer.score(make_episode())).info["pid"]
        os.kill(pid, signal.SIGSTOP)
        late = await scorer.score(make_episode("long " * 50_000))
        assert late.error == "timed out after 0.2s" and wait_until_gone([pid], 30) == []
        scored = await scorer.score(make_episode("long " * 50_000))
        assert scored.reward == 1.0 and scored.info["pid"] != pid


@pytest.mark.drill(
    "reliability",
    "No reward process can be started in place of one that died",
    "An error at once; later ones are scored",
)
async def test_workers_that_cannot_be_replaced_are_replaced_later(
    write_reward: Any, make_episode: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_files(*args: object, **options: object) -> None:
        raise OSError(errno.EMFILE, "Too many open files")

    async with Scorer(RewardSpec(path=write_reward(PID)), 2, 20) as scorer:
        pids = [worker.process.pid for worker in scorer._workers]
        for pid in pids:
            os.kill(pid, signal.SIGKILL)
        assert wait_until_gone(pids, 30) == []
        with monkeypatch.context() as patch:
            patch.setattr(worker_pool, "start_tied", no_files)
            for _ in range(4):
                with pytest.raises(OSError, match="Too many open files"):
                    await scorer.score(make_episode())
        async with asyncio.timeout(60):
            scores = await asyncio.gather(*(scorer.score(make_episode()) for _ in range(4)))
        assert [score.reward for score in scores] == [1.0] * 4


async def test_close_ends_the_workers_and_what_they_started(write_reward: Any, make_episode: Any) -> None:
    async with Scorer(RewardSpec(path=write_reward(PID)), 2, 20) as scorer:
        info = (await scorer.score(make_episode(truth="child"))).info
        hanging = asyncio.create_task(scorer.score(make_episode(truth="hang")))
        await until(lambda: sum(len(children_of(worker.process.pid)) for worker in scorer._workers) == 2)
        assert is_running(info["pid"]) and is_running(info["child"])
    assert wait_until_gone([info["pid"], info["child"]], 30) == []
    assert (await hanging).reward is None
    with pytest.raises(RewardError, match="this Scorer is closed"):
        await scorer.score(make_episode())
    await scorer.close()


PARENT = """
import asyncio, os, sys
from rally import Episode, Segment, StopReason, Task
from rally.rewards import RewardSpec, Scorer

def episode(truth):
    task = Task(id="t", data_source="s", prompt=({"role": "user", "content": "?"},), ground_truth=truth)
    return Episode(id="e", task=task, group="g", stop_reason=StopReason.STOP, segments=(Segment(prompt_ids=(1,)),))

async def main():
    spec = RewardSpec(path=sys.argv[1])
    async with Scorer(spec, 1, 60.0) as idle, Scorer(spec, 1, 60.0) as busy:
        pids = [(await scorer.score(episode("pid"))).info["pid"] for scorer in (idle, busy)]
        hanging = asyncio.create_task(busy.score(episode("hang")))
        while not (children := open(f"/proc/{pids[1]}/task/{pids[1]}/children").read()):
            await asyncio.sleep(0.01)
        print(*pids, children, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


@pytest.mark.drill("reliability", "`kill -9` of a run with reward processes", "No process is left")
def test_workers_end_when_the_parent_is_killed(write_reward: Any) -> None:
    command = [sys.executable, "-c", PARENT, write_reward(PID)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        parent.kill()
    assert len(pids) == 3
    assert wait_until_gone(pids[:1], 30) == [], "the idle one sees the end of its input"
    assert wait_until_gone(pids[1:2], 30) == [], "the kernel kills the one that hangs"
    assert wait_until_gone(pids[2:], 30) == [], "and what it has started ends with it"


def test_a_stopped_worker_ends_when_the_parent_is_killed(write_reward: Any) -> None:
    command = [sys.executable, "-c", PARENT, write_reward(PID)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        pids = [int(word) for word in parent.stdout.readline().split()]
        os.kill(pids[0], signal.SIGSTOP)
        parent.kill()
    assert wait_until_gone(pids, 30) == []


def test_a_worker_imports_nothing_heavy() -> None:
    code = (
        "import sys, rally.rewards.worker_process; print(sorted({'torch', 'transformers', 'numpy'} & set(sys.modules)))"
    )
    found = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert found.strip() == "[]"
